"""`SetAlias` with `now`: unjudged, but not before every executor has the revision; forced, it waits for nobody."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import audit_service_pb2 as audit_pb
from loraport.registry.v1 import rollout_service_pb2 as pb
from services.registry.servicers import pointing
from services.registry.servicers.pointing import Pointing
from services.registry.store.database import Database
from services.registry.ticker import RolloutTicker
from services.shared.clock import ManualClock
from tests.contract.registry_rig import TIMEOUT, Rig, reason_of, serving, write_config
from tests.contract.rollout_rig import ADAPTER, ALIAS, Hands, State, make_hands

MARGIN_S = 60.0


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url, rollout_interval_s=0.02)) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _wide_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry gives up so long before its caller does that the answer arrives, however slow this machine is."""
    monkeypatch.setattr(pointing, "MARGIN_S", MARGIN_S)


async def set_now(hands: Hands, *, timeout: float = MARGIN_S + TIMEOUT, **options: object) -> adapter_pb.Alias:
    request = adapter_pb.SetAliasRequest(
        name=ALIAS,
        revision_id=hands.new,
        now=True,
        reason="it burns",
        **options,  # type: ignore[arg-type]
    )
    return await hands.rig.adapters().SetAlias(request, timeout=timeout)


async def pointed_at(hands: Hands) -> str:
    found = await hands.rig.adapters().GetAdapter(adapter_pb.GetAdapterRequest(name=ADAPTER), timeout=TIMEOUT)
    return str(found.aliases[0].revision_id)


async def rollouts(hands: Hands) -> list[pb.Rollout]:
    page = await hands.rig.rollouts().ListRollouts(pb.ListRolloutsRequest(parent=ADAPTER), timeout=TIMEOUT)
    return list(page.rollouts)


async def running(hands: Hands) -> str:
    async with asyncio.timeout(TIMEOUT):
        while not (found := await rollouts(hands)):
            await asyncio.sleep(0.02)
    return str(found[0].name)


async def test_it_moves_when_every_executor_has_that_very_digest(rig: Rig) -> None:
    hands = await make_hands(rig)
    moving = asyncio.create_task(set_now(hands))
    name = await running(hands)
    await hands.ready(name, "e0")
    await hands.ready(name, "e1", revision_id=hands.old)
    await asyncio.sleep(0.3)
    assert not moving.done(), "one of them has another digest"
    assert await pointed_at(hands) == hands.old
    await hands.ready(name, "e1")
    assert (await moving).revision_id == hands.new
    assert await pointed_at(hands) == hands.new
    events = await rig.audit().ListAuditEvents(audit_pb.ListAuditEventsRequest(tenant="tenants/acme"), timeout=TIMEOUT)
    assert next(e.reason for e in events.events if e.method.endswith("SetAlias")) == "it burns"
    story = (await hands.until(name, lambda item: item.state == State.STATE_SUCCEEDED)).story
    assert "is to move at once from v1 to v2, unjudged: it burns" in story[0].sentence


async def test_without_a_quorum_nothing_moves_and_nothing_is_left_running(rig: Rig) -> None:
    hands = await make_hands(rig)
    assert await reason_of(set_now(hands, timeout=MARGIN_S + 0.6)) == "QUORUM_MISSING"
    assert await pointed_at(hands) == hands.old
    assert [item.state for item in await rollouts(hands)] == [State.STATE_ABORTED]
    # Whoever stops waiting leaves nothing behind either.
    waiting = asyncio.create_task(set_now(hands))
    async with asyncio.timeout(TIMEOUT):
        while len(await rollouts(hands)) < 2:
            await asyncio.sleep(0.02)
    waiting.cancel()
    await hands.until(f"{ADAPTER}/rollouts/r2", lambda item: item.state == State.STATE_ABORTED)
    assert await pointed_at(hands) == hands.old


async def test_its_request_id_is_checked_and_not_remembered_unless_it_is_forced(rig: Rig) -> None:
    hands = await make_hands(rig)
    assert await reason_of(set_now(hands, request_id="once")) == "INVALID_REQUEST"
    assert await rollouts(hands) == []
    once = str(uuid.UUID(int=1))
    for _ in range(2):
        assert await reason_of(set_now(hands, timeout=MARGIN_S + 0.3, request_id=once)) == "QUORUM_MISSING"
    assert len(await rollouts(hands)) == 2, "asked anew"
    first = await set_now(hands, force=True, request_id=once)
    assert await set_now(hands, force=True, request_id=once) == first


async def test_force_waits_for_nobody_and_what_serves_no_more_is_not_waited_with(rig: Rig) -> None:
    hands = await make_hands(rig)
    assert (await set_now(hands, force=True)).revision_id == hands.new
    assert await rollouts(hands) == []
    # The alias points to what was revoked: nobody is served by it.
    await rig.revoke(hands.new, security=True)
    back = adapter_pb.SetAliasRequest(name=ALIAS, revision_id=hands.old, now=True, reason="v2 was revoked")
    assert (await rig.adapters().SetAlias(back, timeout=TIMEOUT)).revision_id == hands.old
    assert await rollouts(hands) == []


async def orphan(hands: Hands, monkeypatch: pytest.MonkeyPatch, *, timeout: float) -> str:
    """A rollout whose caller's process of the registry has died: nobody is left to call it off."""

    async def died(*_: Any) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as dead:
        dead.setattr(Pointing, "_wait", died)
        calling = asyncio.create_task(set_now(hands, timeout=timeout))
        name = await running(hands)
        calling.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await calling
    return name


async def test_when_the_registry_dies_the_wait_ends_with_the_callers_deadline(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(url)
    # The registry's own ticker is the one that died.
    async with serving(write_config(tmp_path, database_url=url, rollout_interval_s=60.0)) as rig:
        hands = await make_hands(rig)
        name = await orphan(hands, monkeypatch, timeout=MARGIN_S + 60.0)
        clock = ManualClock(time.time())
        ticker = RolloutTicker(database, clock, interval_s=1.0)
        await hands.ready(name, "e0")
        await asyncio.to_thread(ticker.tick)
        assert (await hands.get(name)).state == State.STATE_PRELOADING, "its time is not over"
        clock.advance(90.0)  # a deadline is sent with few digits
        await asyncio.to_thread(ticker.tick)
        ended = await hands.get(name)
        assert ended.state == State.STATE_ABORTED
        assert "nobody waits any more" in ended.story[-1].sentence
        assert await hands.ready(name, "e1") == State.STATE_ABORTED
        assert await pointed_at(hands) == hands.old
        again = asyncio.create_task(set_now(hands, timeout=MARGIN_S + 120.0))
        second = f"{ADAPTER}/rollouts/r2"
        async with asyncio.timeout(TIMEOUT):
            while len(await rollouts(hands)) < 2:
                await asyncio.sleep(0.02)
        for executor in ("e0", "e1"):
            await hands.ready(second, executor)
        while not again.done():
            await asyncio.to_thread(ticker.tick)
            await asyncio.sleep(0.02)
        assert (await again).revision_id == hands.new
    database.close()


async def test_a_quorum_that_comes_after_the_callers_deadline_moves_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(write_config(tmp_path, database_url=url, rollout_interval_s=60.0)) as rig:
        hands = await make_hands(rig)
        name = await orphan(hands, monkeypatch, timeout=MARGIN_S + 0.5)
        await asyncio.sleep(0.6)
        # Nobody has looked at it since; the report is what does.
        assert [await hands.ready(name, executor) for executor in ("e0", "e1")] == [State.STATE_ABORTED] * 2
        assert await pointed_at(hands) == hands.old
