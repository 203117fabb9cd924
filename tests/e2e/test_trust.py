"""Keys change under a running stack: answers go on, what was signed before stays, and a forged root gets nowhere."""

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraport import Client, LoraportError
from loraport.admin import AdminClient
from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.publish import state_name
from loraport.trust.edit import next_root
from loraport.trust.files import read_chain
from loraport.trust.root import PAYLOAD_TYPE, Role
from tests.e2e.harness import Stack, add_tenant, publish, running, wait_until

pytestmark = pytest.mark.e2e

PROMPT = list(range(5, 25))
SERVICES = ("registry", "loader", "router", "tiny-0")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, world_dir: Path) -> Iterator[Stack]:
    """A stack of its own: it does not keep its keys."""
    with running(tmp_path_factory.mktemp("trust"), "--base", f"tiny={world_dir / 'bases' / 'tiny'}") as stack:
        add_tenant(stack, "acme")
        publish(stack, world_dir / "bundles" / "alpha_8", "acme", "first")
        yield stack


class Asking:
    """Asks for one adapter without a pause, in a thread, and remembers what was refused."""

    def __init__(self, stack: Stack, adapter: str) -> None:
        self._stack, self._adapter = stack, adapter
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers, self.refused = 0, []

    def _run(self) -> None:
        with Client.local(self._stack.data, tenant="acme") as client:
            while not self._done.is_set():
                try:
                    client.generate(prompt_token_ids=PROMPT, adapter=self._adapter, max_tokens=4)
                    self.answers += 1
                except LoraportError as error:
                    self.refused.append(str(error))

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(60)


def version(stack: Stack) -> int:
    return int(stack.ok("trust", "show")["version"])


def logged(stack: Stack, name: str, event: str) -> list[dict]:
    """What a service logged of a kind, in this run of the stack."""
    lines = (stack.data / "logs" / f"{name}.log").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return [row for row in rows if row["event"] == event]


def follow(stack: Stack, number: int) -> None:
    """Waits until every service has accepted a root."""

    def accepted(name: str) -> bool:
        return any(row["version"] == number for row in logged(stack, name, "trust root accepted"))

    for name in SERVICES:
        wait_until(lambda name=name: accepted(name), within_s=120, what=f"{name} accepting root {number}")


def alarms(stack: Stack, name: str) -> list[dict]:
    return logged(stack, name, "ALARM: trust root refused")


def ask(stack: Stack, tenant: str, adapter: str) -> str:
    """The reason of a refusal, empty for an answer. What is not there for a moment is asked for again."""
    try:
        with Client.local(stack.data, tenant=tenant, timeout=120, patience=60) as client:
            client.generate(prompt_token_ids=PROMPT, adapter=adapter, max_tokens=2)
    except LoraportError as error:
        return error.reason
    return ""


def test_every_key_is_replaced_while_an_adapter_serves(fleet: Stack, world_dir: Path) -> None:
    before = fleet.ok("trust", "show")
    with Asking(fleet, "first") as asking:
        for number, role in enumerate(("timestamp", "registry", "loader", "router", "root", "registry"), start=2):
            made = fleet.ok("trust", "rotate", "--role", role)
            assert (made["version"], made["stopped_revision_count"]) == (number, 0)
            assert made["roles"][role]["keys"] != before["roles"][role]["keys"]
            follow(fleet, number)
            count = asking.answers
            wait_until(lambda count=count: asking.answers > count + 2, within_s=120, what="answers after a rotation")
            tenant = f"after-{role}-{number}"
            add_tenant(fleet, tenant)
            publish(fleet, world_dir / "bundles" / "alpha_8", tenant, "new")
            assert ask(fleet, tenant, "new") == ""
    assert asking.refused == []
    audited = fleet.ok("log", "verify")
    assert audited["good"], audited
    # What is loaded anew goes by the record of before all rotations.
    fleet.down()
    assert fleet.up("--base", f"tiny={world_dir / 'bases' / 'tiny'}", "--json").code == 0
    assert ask(fleet, "acme", "first") == ""
    assert version(fleet) == 7


def test_a_leaked_key_of_the_registry_is_believed_up_to_a_place_in_the_log(fleet: Stack, world_dir: Path) -> None:
    old = fleet.ok("log", "checkpoint")["tree_size"]
    add_tenant(fleet, "late")
    publish(fleet, world_dir / "bundles" / "alpha_8", "late", "bot")
    assert ask(fleet, "late", "bot") == ""
    made = fleet.ok("trust", "rotate", "--role", "registry", "--since-log-index", str(old), "--reason", "leaked")
    assert made["stopped_revision_count"] == 1
    follow(fleet, made["version"])
    wait_until(lambda: ask(fleet, "late", "bot") == "REVISION_NOT_ACTIVE", within_s=120, what="the stop")
    assert ask(fleet, "acme", "first") == ""
    with AdminClient.local(fleet.data) as admin:
        (revision,) = admin.list_revisions("late", "bot")
        assert (state_name(revision), revision.reasons[-1].code) == ("VERIFIED", "RECORD_WITHDRAWN")
        admin.approve_revision(revision.name)
    wait_until(lambda: ask(fleet, "late", "bot") == "", within_s=120, what="an approval by the new key")
    assert fleet.ok("log", "verify")["good"]


def test_a_leaked_key_of_the_loader_takes_its_verdicts_with_it(fleet: Stack, world_dir: Path) -> None:
    old = fleet.ok("log", "checkpoint")["tree_size"]
    add_tenant(fleet, "judged")
    publish(fleet, world_dir / "bundles" / "alpha_8", "judged", "bot")
    made = fleet.ok("trust", "rotate", "--role", "loader", "--since-log-index", str(old))
    assert made["stopped_revision_count"] == 1
    follow(fleet, made["version"])
    wait_until(lambda: ask(fleet, "judged", "bot") == "REVISION_NOT_ACTIVE", within_s=120, what="the stop")
    assert ask(fleet, "late", "bot") == ""
    # The same bytes, verified by the new key, are as good as ever.
    again = publish(fleet, world_dir / "bundles" / "alpha_8", "judged", "bot")
    assert again["version"] == 2
    assert ask(fleet, "judged", "bot") == ""


def test_a_leaked_key_of_a_publisher_stops_what_it_announced_since(fleet: Stack, world_dir: Path) -> None:
    add_tenant(fleet, "careless")
    publish(fleet, world_dir / "bundles" / "alpha_8", "careless", "good")
    leaked = fleet.ok("log", "checkpoint")["tree_size"]
    publish(fleet, world_dir / "bundles" / "plain_r64", "careless", "bad")
    assert (ask(fleet, "careless", "good"), ask(fleet, "careless", "bad")) == ("", "")
    rotated = fleet.ok("signer", "rotate", "default", "--tenant", "careless")
    assert rotated["signer"] == "default-2"
    # Replaced only: all of it stays.
    assert (ask(fleet, "careless", "good"), ask(fleet, "careless", "bad")) == ("", "")
    fleet.ok("signer", "revoke", "default", "--tenant", "careless", "--since-log-index", str(leaked))
    wait_until(lambda: ask(fleet, "careless", "bad") == "REVISION_NOT_ACTIVE", within_s=120, what="the stop")
    assert ask(fleet, "careless", "good") == ""
    events = fleet.ok("audit", "list", "--tenant", "careless")
    assert any(event["reason"] == "SIGNER_REVOKED" for event in events)
    again = publish(fleet, world_dir / "bundles" / "plain_r64", "careless", "bad")
    assert again["version"] == 2
    assert ask(fleet, "careless", "bad") == ""
    assert fleet.ok("log", "verify")["good"]


def test_two_signers_are_needed_where_two_are_asked_for(fleet: Stack, world_dir: Path) -> None:
    add_tenant(fleet, "careful")
    fleet.ok("signer", "create", "second", "--tenant", "careful")
    assert fleet.ok("signer", "threshold", "2", "--tenant", "careful")["threshold"] == 2
    bundle = str(world_dir / "bundles" / "alpha_8")
    named = ("--tenant", "careful", "--name", "bot", "--base", "tiny", "--approve", "--alias", "prod")
    answer = fleet.cli("adapter", "register", bundle, *named, "--signer", "second")
    assert answer.code == 1
    assert "UNTRUSTED_SIGNER" in answer.error or "fewer than 2" in answer.error
    assert fleet.ok("adapter", "register", bundle, *named, "--signer", "default,second")["state"] == "ACTIVE"
    assert ask(fleet, "careful", "bot") == ""


def test_a_forged_root_is_refused_everywhere_and_raises_alarms(fleet: Stack) -> None:
    root = read_chain(fleet.data / "trust")[-1][0]
    thief = SigningKey.generate()
    forged = next_root(root, now=root.issued + 1, role=Role.REGISTRY, public_keys=[thief.public_pem], since=1)
    envelope = sign_envelope(PAYLOAD_TYPE, forged.body(), thief)
    with AdminClient.local(fleet.data) as admin, pytest.raises(LoraportError) as caught:
        admin.submit_trust_root(envelope)
    assert (caught.value.reason, caught.value.metadata["code"]) == ("INVALID_TRUST_ROOT", "OLD_THRESHOLD")
    assert alarms(fleet, "registry")
    # Somebody writes it into the registry's database, which tells all its peers.
    with sqlite3.connect(fleet.data / "registry" / "registry.db") as database:
        epoch = database.execute("SELECT epoch FROM catalog_state").fetchone()[0] + 1
        row = (root.version + 1, envelope, 7, 1, epoch)
        database.execute("INSERT INTO trust_roots VALUES (?, ?, ?, ?, ?)", row)
        database.execute("UPDATE catalog_state SET epoch = ?", (epoch,))
    database.close()
    for name in ("loader", "router", "tiny-0"):
        wait_until(lambda name=name: alarms(fleet, name), within_s=120, what=f"an alarm of {name}")
    shown = fleet.cli("trust", "show")
    assert shown.code == 1
    assert "ALARM" in shown.error
    assert ask(fleet, "acme", "first") == ""
    offline = json.loads(fleet.cli("trust", "show", "--offline", "--json").out)
    assert offline["version"] == root.version
