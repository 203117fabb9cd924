"""A fleet is upgraded and restored under traffic: every service is replaced in turn, and nobody's request is lost."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loraport import Client, LoraportError
from loraport.values import Started, Tokens
from tests.e2e.harness import Stack, add_tenant, environment, publish, running, wait_until

pytestmark = pytest.mark.e2e

ADAPTERS = {"steady": "alpha_1", "other": "alpha_8"}
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a greedy answer is known by."""

    revision_id: str | None
    token_ids: tuple[int, ...]


def ask(client: Client, adapter: str, tokens: int = 8) -> Answer:
    done = client.generate("a b", adapter=adapter, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Answer(done.revision_id, tuple(done.token_ids))


@dataclass(slots=True)
class Traffic:
    """Asks all the time from several threads, knows what the answers must be, and notes what else happens."""

    stack: Stack
    expected: dict[str, Answer]
    answered: int = 0
    wrong: list[Answer] = field(default_factory=list)
    # Errors before an answer had begun, and in the middle of one.
    lost: list[LoraportError] = field(default_factory=list)
    broken_off: list[LoraportError] = field(default_factory=list)

    def run(self, stopping: threading.Event) -> None:
        with Client.local(self.stack.data, tenant="acme", timeout=90, patience=PATIENCE_S) as client:
            while not stopping.is_set():
                for adapter in ADAPTERS:
                    self._one(client, adapter)
                    stopping.wait(0.05)

    def _one(self, client: Client, adapter: str) -> None:
        begun, tokens, revision = False, list[int](), None
        try:
            for event in client.stream("a b", adapter=adapter, max_tokens=8, temperature=0.0, ignore_eos=True):
                begun = True
                if isinstance(event, Started):
                    revision = event.revision_id
                elif isinstance(event, Tokens):
                    tokens += event.token_ids
        except LoraportError as error:
            (self.broken_off if begun else self.lost).append(error)
            return
        answer = Answer(revision, tuple(tokens))
        if answer != self.expected[adapter]:
            self.wrong.append(answer)
        self.answered += 1


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, world_dir: Path) -> Iterator[Stack]:
    """Two executors, two adapters in service."""
    tiny = f"tiny={world_dir / 'bases' / 'tiny'}"
    with running(tmp_path_factory.mktemp("upgrade") / "data", "--base", tiny, "--executors", "2") as stack:
        add_tenant(stack, "acme")
        for name, bundle in ADAPTERS.items():
            publish(stack, world_dir / "bundles" / bundle, "acme", name)
        yield stack


def expected(stack: Stack) -> dict[str, Answer]:
    with Client.local(stack.data, tenant="acme", timeout=60) as client:
        return {name: ask(client, name) for name in ADAPTERS}


def test_a_rolling_restart_of_everything_loses_no_request(fleet: Stack) -> None:
    traffic, stopping = Traffic(fleet, expected(fleet)), threading.Event()
    threads = [threading.Thread(target=traffic.run, args=(stopping,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for name in ("valkey", "s3", "registry", "loader", "tiny-0", "tiny-1", "router"):
            before = traffic.answered
            assert fleet.cli("dev", "restart", name).code == 0, name
            wait_until(lambda: traffic.answered > before + 3, within_s=60, what=f"answers after {name}")  # noqa: B023
    finally:
        stopping.set()
        for thread in threads:
            thread.join(120)
    assert traffic.answered > 20
    assert not traffic.wrong
    assert not traffic.lost, [str(error) for error in traffic.lost]
    # Nor was any cut off: each one had the time to end before its executor went.
    assert not traffic.broken_off, [str(error) for error in traffic.broken_off]


def test_an_answer_that_its_executor_did_not_live_to_end_says_when_to_ask_again(fleet: Stack) -> None:
    with Client.local(fleet.data, tenant="acme", timeout=90, patience=PATIENCE_S) as client:
        events = client.stream("a", adapter="steady", max_tokens=450, ignore_eos=True)
        started = next(events)
        assert isinstance(started, Started)
        os.kill(fleet.processes()[started.executor], signal.SIGKILL)
        with pytest.raises(LoraportError) as cut:
            list(events)
        assert cut.value.reason == "EXECUTOR_UNAVAILABLE"
        assert cut.value.retry_after is not None
        # The other executor answers at once; nothing that had not begun is lost.
        assert ask(client, "steady").revision_id == started.revision_id
    assert fleet.cli("dev", "restart", started.executor).code == 0


def upkeep(stack: Stack, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    config = str(stack.data / "run" / "registry.json")
    words = [sys.executable, "-m", "services.registry.upkeep", command, "--config", config, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment(), check=False)


def replace_database(stack: Stack, backup: Path) -> None:
    """Loses the registry's database and puts the backup in its place, as an operator would."""
    os.kill(stack.processes()["registry"], signal.SIGKILL)
    database = stack.data / "registry"
    shutil.rmtree(database)
    database.mkdir(mode=0o700)
    done = upkeep(stack, "restore", str(backup))
    assert done.returncode == 0, done.stderr
    assert stack.cli("dev", "restart", "registry").code == 0


def publish_soon(stack: Stack, bundle: Path) -> None:
    """Publishes and asks, by a loader and executors that may have to find the registry again first."""
    named = ("--tenant", "acme", "--name", "late", "--base", "tiny", "--approve", "--alias", "prod")
    register = ("adapter", "register", str(bundle), *named, "--json")
    wait_until(lambda: stack.cli(*register).code == 0, within_s=40, what="the publication")
    generate = ("generate", "a", "--tenant", "acme", "--adapter", "late", "--max-tokens", "2")
    wait_until(lambda: stack.cli(*generate).code == 0, within_s=40, what="an answer of what was published")


def test_a_lost_database_is_restored_and_an_older_story_is_believed_only_when_somebody_says_so(
    fleet: Stack, world_dir: Path, tmp_path: Path
) -> None:
    before = expected(fleet)
    backup = tmp_path / "registry.backup"
    done = upkeep(fleet, "backup", str(backup))  # while everything runs
    assert done.returncode == 0, done.stderr
    replace_database(fleet, backup)
    assert expected(fleet) == before
    assert fleet.ok("log", "verify")

    # What happened after the backup is lost with the database, and the peers have seen that it was there.
    publish_soon(fleet, world_dir / "bundles" / "alpha_64")
    replace_database(fleet, backup)
    alarm = fleet.cli("log", "peers")
    assert alarm.code == 1
    assert "ALARM" in alarm.out
    for name in ("loader", "tiny-0", "tiny-1"):
        assert fleet.cli("dev", "restart", name).code == 0
    with Client.local(fleet.data, tenant="acme", timeout=20) as client, pytest.raises(LoraportError) as refused:
        ask(client, "steady")
    # A user is told an incident, which the operator finds in the router's log.
    incident = str(refused.value).rsplit(" ", 1)[-1]
    told = [line for line in (fleet.data / "logs" / "router.log").read_text().splitlines() if incident in line]
    assert "CHECKPOINT_ROLLBACK" in "".join(told), refused.value

    for name in ("loader", "tiny-0", "tiny-1"):
        (fleet.data / "state" / f"{name}.json").unlink()
        assert fleet.cli("dev", "restart", name).code == 0
    assert expected(fleet) == before
    publish_soon(fleet, world_dir / "bundles" / "alpha_64")
