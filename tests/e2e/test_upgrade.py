"""A fleet is upgraded, disturbed and restored under traffic: every service is replaced in turn, and no request is lost."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraport import Client, LoraportError
from loraport.values import Started
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.traffic import Oracle, Traffic
from tests.chaos.trial import under
from tests.chaos.world import SERVICES, World, world
from tests.e2e.harness import Stack, environment, wait_until

pytestmark = pytest.mark.e2e

PATIENCE_S = 60.0
BRIEF = re.compile("disk full|disk slow|all clocks 60 min ahead|store: truncate")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two executors, adapters of two tenants; with their next start pools are too small for all of them."""
    with world(tmp_path_factory.mktemp("upgrade"), restarted=False) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(place: World) -> Stack:
    return place.stack


@pytest.fixture(scope="module")
def oracle(place: World) -> Oracle:
    return Oracle(place.stack.data, place.targets)


def expected(stack: Stack) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """Returns greedy answers by what they are known by: revision and tokens."""
    with Client.local(stack.data, tenant="acme", timeout=120) as client:
        return {name: ask(client, name) for name in ("steady", "other")}


def ask(client: Client, adapter: str) -> tuple[str | None, tuple[int, ...]]:
    done = client.generate("a b", adapter=adapter, max_tokens=8, temperature=0.0, ignore_eos=True)
    return done.revision_id, tuple(done.token_ids)


def test_a_rolling_restart_of_everything_loses_no_request(place: World, oracle: Oracle) -> None:
    with Traffic(place.stack.data, oracle, threads=2, pause_s=0.05, seed=1) as traffic:
        counts = traffic.counts
        for name in ("valkey", "s3", *SERVICES):
            before = counts.answered
            place.restart(name)
            wait_until(lambda: counts.answered > before + 3, within_s=120, what=f"answers after {name}")  # noqa: B023
    assert counts.answered > 20
    assert not counts.wrong
    assert not counts.refused
    # Nor was any cut off: each one had the time to end before its executor went.
    assert not counts.broken_off
    assert counts.begun == counts.ended


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if BRIEF.search(fault.name)], ids=lambda fault: fault.name)
def test_the_fleet_stands(place: World, oracle: Oracle, fault: Fault) -> None:
    """A few of those of `make chaos`."""
    stood, seen = under(fault, place, oracle, seed=2)
    if stood is None:
        pytest.skip(seen)
    assert stood, seen


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
        assert ask(client, "steady")[0] == started.revision_id
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
    wait_until(lambda: stack.cli(*register).code == 0, within_s=120, what="the publication")
    generate = ("generate", "a", "--tenant", "acme", "--adapter", "late", "--max-tokens", "2")
    wait_until(lambda: stack.cli(*generate).code == 0, within_s=120, what="an answer of what was published")


def test_a_lost_database_is_restored_and_an_older_story_is_believed_only_when_somebody_says_so(
    place: World, tmp_path: Path
) -> None:
    fleet, late = place.stack, place.small / "bundles" / "alpha_8"
    before = expected(fleet)
    backup = tmp_path / "registry.backup"
    done = upkeep(fleet, "backup", str(backup))  # while everything runs
    assert done.returncode == 0, done.stderr
    replace_database(fleet, backup)
    assert expected(fleet) == before
    # Clocks were set on this stack: until a peer has been told again, its checkpoint is from the future.
    wait_until(lambda: fleet.cli("log", "verify").code == 0, within_s=120, what="a log that holds together")

    # What happened after the backup is lost with the database, and the peers have seen that it was there.
    publish_soon(fleet, late)
    replace_database(fleet, backup)
    alarm = fleet.cli("log", "peers")
    assert alarm.code == 1
    assert "ALARM" in alarm.out
    for name in ("loader", "tiny-0", "tiny-1"):
        assert fleet.cli("dev", "restart", name).code == 0
    with Client.local(fleet.data, tenant="acme", timeout=120) as client, pytest.raises(LoraportError) as refused:
        ask(client, "steady")
    assert refused.value.reason == "CHECKPOINT_ROLLBACK"

    for name in ("loader", "tiny-0", "tiny-1"):
        (fleet.data / "state" / f"{name}.json").unlink()
        assert fleet.cli("dev", "restart", name).code == 0
    assert expected(fleet) == before
    publish_soon(fleet, late)
