"""Rollouts that may not begin, and rollouts whose registry dies at any step: nothing is half done, nothing is lost."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import inspect

from loraport.log.leaf import parse_leaf
from loraport.registry.v1 import audit_service_pb2 as audit_pb
from loraport.registry.v1 import key_service_pb2 as key_pb
from loraport.registry.v1 import rollout_service_pb2 as pb
from services.registry import moving
from services.registry.records import RolloutRow
from services.registry.store import log, rollouts
from services.registry.store.database import Database, Transaction
from services.registry.store.migrate import upgrade
from services.registry.ticker import RolloutTicker
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError
from services.shared.names import AdapterName
from tests.contract.registry_rig import TIMEOUT, Rig, base_spec, info_of, manifest, reason_of, serving, write_config
from tests.contract.rollout_rig import ADAPTER, QUICK, Hands, State, in_state, make_hands, requests


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url, rollout_interval_s=0.02)) as rig:
        yield rig


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url)
    yield database
    database.close()


async def test_what_may_not_begin_is_refused_by_name(rig: Rig) -> None:
    hands = await make_hands(rig)
    await rig.register("acme", manifest("acme", "bot", 3, content="c3"))
    waiting = (await rig.register("acme", manifest("acme", "bot", 4, content="c4"))).revision
    assert await reason_of(hands.start(to_revision_id=waiting.revision_id)) == "REVISION_NOT_ACTIVE"
    assert await reason_of(hands.start(to_revision_id="sha256:" + "0" * 64)) == "REVISION_NOT_FOUND"
    assert await reason_of(hands.start(to_revision_id=hands.old)) == "INVALID_REQUEST"
    assert await reason_of(hands.start(alias="staging")) == "ALIAS_NOT_FOUND"
    assert await reason_of(hands.start(alias="No Name")) == "INVALID_NAME"
    foreign = await rig.active("acme", "other", 1, "c9")
    assert await reason_of(hands.start(to_revision_id=foreign.revision_id)) == "REVISION_NOT_FOUND"
    await rig.base("second")
    payload = manifest("acme", "bot", 5, content="c5", base=base_spec("second"))
    registered = await rig.register("acme", payload)
    await rig.admit(payload, base_id=(await _base_id(rig, "second")))
    elsewhere = await rig.approve(registered.revision.name)
    assert await reason_of(hands.start(to_revision_id=elsewhere.revision_id)) == "WRONG_BASE"
    await hands.start()
    assert await reason_of(hands.start()) == "ROLLOUT_RUNNING"
    await rig.revoke(hands.new, security=True)
    assert await reason_of(hands.start()) == "REVISION_NOT_ACTIVE"


async def _base_id(rig: Rig, name: str) -> str:
    from loraport.registry.v1 import base_model_service_pb2 as base_pb

    request = base_pb.GetBaseModelRequest(name=f"baseModels/{name}")
    return (await rig.bases().GetBaseModel(request, timeout=TIMEOUT)).base_id


async def test_every_fault_of_the_settings_is_listed(rig: Rig) -> None:
    hands = await make_hands(rig)
    wrong: dict[str, Any] = {
        "step_percents": [5, 1, 100],
        "min_sample_count": -1,
        "quorum_count": -2,
        "shadow_percent": 101,
        "golden_prompts": [pb.RolloutPrompt(), pb.RolloutPrompt(token_ids={"ids": [1, -4]})],
        "gates": pb.RolloutGates(rollback_margin_percent=0, advance_tolerance_percent=float("nan")),
    }
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await hands.start(**wrong)
    text = info_of(caught.value).reason + caught.value.details()  # type: ignore[attr-defined]
    assert text.startswith("INVALID_REQUEST")
    assert "rollout.step_percents" in text
    assert "and 3 more" in text


async def test_a_dry_run_shows_the_plan_and_starts_nothing(rig: Rig) -> None:
    hands = await make_hands(rig)
    request = pb.StartRolloutRequest(parent=ADAPTER, rollout={"to_revision_id": hands.new}, validate_only=True)
    planned = await rig.rollouts().StartRollout(request, timeout=TIMEOUT)
    assert planned.plan[0].startswith("preload: every executor")
    assert [line.split(" %")[0] for line in planned.plan[2:-1]] == ["1", "5", "25", "50", "100"]
    page = await rig.rollouts().ListRollouts(pb.ListRolloutsRequest(parent=ADAPTER), timeout=TIMEOUT)
    assert list(page.rollouts) == []
    events = await rig.audit().ListAuditEvents(audit_pb.ListAuditEventsRequest(tenant="tenants/acme"), timeout=TIMEOUT)
    assert not [event for event in events.events if "Rollout" in event.method], "a question is no event"


async def test_reports_that_say_nothing_are_refused(rig: Rig) -> None:
    hands = await make_hands(rig)
    name = (await hands.start()).name
    for call in (
        hands.ready(name, "not a name"),
        hands.ready(name, failure_reason="oh no", ready=False),
        hands.probed(name, ""),
        hands.probed(name, failure_reason="x" * 70),
        hands.observe(name, 0, [pb.Observation(arm="canary", ok=True)]),
        hands.observe(name, 0, [pb.Observation(arm="new", ok=True, first_token_ms=float("nan"))]),
        hands.observe(name, 9, []),
        hands.observe(name, 0, [], sequence=0),
    ):
        assert await reason_of(call) == "INVALID_REQUEST"


async def test_another_digest_makes_no_quorum(rig: Rig) -> None:
    hands = await make_hands(rig)
    name = (await hands.start(quorum_count=1)).name
    assert await hands.ready(name, revision_id=hands.old) == State.STATE_PRELOADING
    assert await hands.ready(name, "e7") == State.STATE_PROBING


async def test_what_cannot_be_loaded_ends_it_and_what_has_no_room_waits(rig: Rig) -> None:
    hands = await make_hands(rig)
    name = (await hands.start()).name
    await hands.ready(name, "e0", ready=False, failure_reason="PIN_BUDGET")
    assert (await hands.until(name, in_state("PAUSED"))).hold_reason == "PIN_BUDGET"
    for executor in ("e0", "e1"):
        await hands.ready(name, executor)
    # The room has come: it goes on by itself.
    await hands.until(name, in_state("PROBING"))
    await hands.control(name, "ABORT")
    name = (await hands.start()).name
    await hands.ready(name, "e0", ready=False, failure_reason="LOADER_UNAVAILABLE")
    assert await hands.ready(name, "e1", ready=False, failure_reason="DIGEST_MISMATCH") == State.STATE_PRELOADING
    assert await hands.ready(name, "e0", ready=False, failure_reason="DIGEST_MISMATCH") == State.STATE_ROLLED_BACK


async def test_the_first_lost_executor_takes_the_share_back_and_the_second_one_ends_it(rig: Rig) -> None:
    hands = await make_hands(rig)
    name = (await hands.prepared(min_sample_count=1000)).name
    lost = {"ready": False, "failure_reason": "EXECUTOR_UNAVAILABLE", "serving_executors": ["e0"]}
    assert await reason_of(hands.ready(name, "e0", lost_epoch=7)) == "INVALID_REQUEST"
    assert await hands.ready(name, "e0", lost_epoch=7, **lost) == State.STATE_PAUSED
    held = await hands.get(name)
    assert (held.hold_reason, held.share_percent, held.step_index) == ("EXECUTOR_LOST", 0, 0)
    # Another router tells of the same end; that is no second one.
    assert await hands.ready(name, "e0", lost_epoch=7, **lost) == State.STATE_PAUSED
    await asyncio.sleep(0.1)
    assert (await hands.get(name)).state == State.STATE_PAUSED, "it waits for what was lost, though e1 has it"
    await hands.ready(name, "e0")
    again = await hands.until(name, in_state("SPLITTING"))
    assert (again.share_percent, again.step_index) == (10, 0)
    assert await hands.ready(name, "e1", lost_epoch=7, **lost) == State.STATE_ROLLED_BACK
    assert (
        "2 times an executor went away with work of the new revision: e0, e1"
        in (await hands.get(name)).story[-1].sentence
    )


async def test_a_leaked_publishers_key_ends_what_its_revision_was_in(rig: Rig) -> None:
    hands = await make_hands(rig)
    name = (await hands.prepared()).name
    leak = key_pb.RevokeSignerRequest(name="tenants/acme/signers/ci", since_log_index=0)
    await rig.keys().RevokeSigner(leak, timeout=TIMEOUT)
    found = await hands.get(name)
    assert found.state in (State.STATE_ABORTED, State.STATE_ROLLED_BACK)
    assert "signer ci is revoked" in found.story[-1].sentence


async def test_a_missing_quorum_holds_after_its_time_and_goes_on_when_it_comes(rig: Rig) -> None:
    hands = await make_hands(rig)
    name = (await hands.start(gates=pb.RolloutGates(preload_timeout={"nanos": 50_000_000}))).name
    assert (await hands.until(name, in_state("PAUSED"))).hold_reason == "QUORUM_MISSING"
    for executor in ("e0", "e1"):
        await hands.ready(name, executor)
    seen = await hands.until(name, lambda item: len(item.story) >= 4)
    assert "2 of 2 executors" in seen.story[3].sentence


async def test_a_registry_that_dies_between_any_two_moves_goes_on(url: str, tmp_path: Path) -> None:
    """Each life of the process makes one step and is gone; what was written is all that the next one knows."""
    config = write_config(tmp_path, database_url=url, rollout_interval_s=0.02)
    async with serving(config) as rig:
        first = await make_hands(rig)
        name = (await first.start(step_percents=[50, 100])).name
    steps = [
        (lambda hands: hands.ready(name, "e0"), in_state("PRELOADING")),
        (lambda hands: hands.ready(name, "e1"), in_state("PROBING")),
        (lambda hands: hands.probed(name, "e0"), in_state("PROBING")),
        (lambda hands: hands.probed(name, "e1"), in_state("SPLITTING")),
        (lambda hands: hands.observe(name, 0, requests(60)), lambda item: item.step_index == 1),
        (lambda hands: hands.observe(name, 1, requests(60)), in_state("RETAINING", "SUCCEEDED")),
        (lambda hands: asyncio.sleep(0), in_state("SUCCEEDED")),
    ]
    for act, wanted in steps:
        async with serving(config) as rig:
            hands = Hands(rig, first.old, first.new, sequence=first.sequence)
            await act(hands)
            first.sequence = hands.sequence
            ended = await hands.until(name, wanted)
    assert [line.sentence for line in ended.story] == list(dict.fromkeys(line.sentence for line in ended.story))
    assert ended.state == State.STATE_SUCCEEDED


# Looks at the rollouts once, as a registry does, and kills a process by force in the middle of the move: after one of
# its writes, this process or the one of PostgreSQL that works for it.
MOVE = """
import os, signal, sys
from services.registry import moving
from services.registry.store.database import Database
from services.registry.ticker import RolloutTicker
from services.shared.clock import SystemClock

url, module, write, victim = sys.argv[1:]
real = getattr(getattr(moving, module), write)

def written(transaction, *arguments, **named):
    real(transaction, *arguments, **named)
    pid = os.getpid()
    if victim == "database":
        pid = transaction.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    os.kill(pid, signal.SIGKILL)

setattr(getattr(moving, module), write, written)
RolloutTicker(Database(url), SystemClock(), interval_s=1.0).tick()
"""
WRITES = (("rollouts", "add_line"), ("adapters", "put_alias"), ("journal", "add_event"))


async def test_a_move_that_is_killed_is_made_whole_or_not_at_all(url: str, tmp_path: Path, database: Database) -> None:
    config = write_config(tmp_path, database_url=url, rollout_interval_s=3600.0)
    async with serving(config) as rig:
        hands = await make_hands(rig)
        name = (await hands.start(step_percents=[100], golden_prompts=[])).name
        for executor in ("e0", "e1"):
            await hands.ready(name, executor)
        # The last report before the flip is kept, its move is not: the process dies in the middle of it.
        with database.write() as transaction:
            row = rollouts.require(transaction.connection, AdapterName("acme", "bot"), 1)
            rollouts.add_stats(transaction, row, 0, _enough())
        before = await _state(rig, hands, name, database)
        deaths = [("registry", write) for write in WRITES]
        if url.startswith("postgresql"):
            deaths.append(("database", WRITES[-1]))
        for victim, write in deaths:
            command = [sys.executable, "-c", MOVE, url, *write, victim]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120, check=False)
            assert done.returncode == (-signal.SIGKILL if victim == "registry" else 0), done
            assert await _recovered(lambda: _state(rig, hands, name, database)) == before, (victim, write)
        RolloutTicker(database, SystemClock(), interval_s=1.0).tick()
        after = await hands.get(name)
        assert after.state == State.STATE_RETAINING
        assert len(after.story) == len(before[0].story) + 1


async def _recovered(look: Callable[[], Awaitable[Any]]) -> Any:
    """Looks again for as long as the database is not there: PostgreSQL ends every connection when one is killed."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(LoraportError, grpc.RpcError):
            return await look()
        await asyncio.sleep(0.1)
    return await look()


@pytest.mark.parametrize("error", [LoraportError("REVISION_NOT_ACTIVE"), OverflowError("math range error")])
async def test_a_rollout_that_cannot_be_moved_stops_no_other(
    url: str, tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with serving(write_config(tmp_path, database_url=url, rollout_interval_s=3600.0)) as rig:
        first = await make_hands(rig)
        old, new = [await rig.active("acme", "other", version, f"o{version}") for version in (1, 2)]
        parent = "tenants/acme/adapters/other"
        await rig.alias(f"{parent}/aliases/prod", old.revision_id)
        asked = {**QUICK, "to_revision_id": new.revision_id, "golden_prompts": [], "step_percents": [100]}
        request = pb.StartRolloutRequest(parent=parent, rollout=pb.Rollout(**asked))
        second = Hands(rig, old.revision_id, new.revision_id)
        names = [
            (await first.start(step_percents=[100], golden_prompts=[])).name,
            (await rig.rollouts().StartRollout(request, timeout=TIMEOUT)).name,
        ]
        for hands, name in zip((first, second), names, strict=True):
            for executor in ("e0", "e1"):
                await hands.ready(name, executor)
        with database.write() as transaction:
            for row in rollouts.running(transaction.connection):
                rollouts.add_stats(transaction, row, 0, _enough())
        advance = moving.advance

        def refuse(transaction: Transaction, row: RolloutRow, *, now_us: int) -> RolloutRow:
            if row.adapter == "bot":
                raise error
            return advance(transaction, row, now_us=now_us)

        monkeypatch.setattr(moving, "advance", refuse)
        RolloutTicker(database, SystemClock(), interval_s=1.0).tick()
        states = [State.Name((await first.get(name)).state) for name in names]
        assert states == ["STATE_SPLITTING", "STATE_RETAINING"]


def _enough() -> dict[Any, Any]:
    from services.registry.servicers.rollout_messages import _sums

    return _sums(requests(60), [])


async def _state(rig: Rig, hands: Hands, name: str, database: Database) -> tuple[pb.Rollout, str, int]:
    with database.read() as connection:
        size = log.state(connection).tree_size
        assert parse_leaf(log.leaf_body(connection, size - 1))
    rollout = await hands.get(name)
    rollout.verdict = ""
    return rollout, str(database.epoch()), size


def test_the_tables_go_back_and_forth(database: Database) -> None:
    upgrade(database)
    config = Config()
    config.set_main_option("script_location", "services/registry/migrations")
    with database.exclusive() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0006")
        assert not [name for name in inspect(connection).get_table_names() if name.startswith("rollout")]
    upgrade(database)
    with database.read() as connection:
        assert len([name for name in inspect(connection).get_table_names() if name.startswith("rollout")]) == 6
