"""Rollouts over real connections, on SQLite and PostgreSQL: how they go, and what the log, the audit and peers see."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraport.log.leaf import Kind, parse_leaf
from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import audit_service_pb2 as audit_pb
from loraport.registry.v1 import log_service_pb2 as log_pb
from loraport.registry.v1 import rollout_service_pb2 as pb
from services.shared.catalog_client import CatalogClient
from tests.contract.registry_rig import TIMEOUT, Rig, reason_of, serving, write_config
from tests.contract.rollout_rig import ADAPTER, ALIAS, Hands, State, in_state, make_hands, requests

KEY = ("acme", "bot", "prod")


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url, rollout_interval_s=0.02)) as rig:
        yield rig


@pytest.fixture
async def hands(rig: Rig) -> Hands:
    return await make_hands(rig)


@pytest.fixture
async def peer(rig: Rig) -> AsyncIterator[CatalogClient]:
    client = CatalogClient(rig.channel("router"), artefacts_only=False)
    client.start()
    assert await client.wait_synced(TIMEOUT)
    yield client
    await client.stop()


async def pointed_at(rig: Rig) -> str:
    found = await rig.adapters().GetAdapter(adapter_pb.GetAdapterRequest(name=ADAPTER), timeout=TIMEOUT)
    return found.aliases[0].revision_id


async def test_a_good_revision_is_promoted_step_by_step(rig: Rig, hands: Hands, peer: CatalogClient) -> None:
    rollout = await hands.start()
    assert (rollout.state, rollout.from_revision_id, rollout.share_percent) == (State.STATE_PRELOADING, hands.old, 0)
    assert rollout.name == f"{ADAPTER}/rollouts/r1"
    assert await peer.catch_up(TIMEOUT)
    seen = peer.view.rollouts[KEY]
    assert (seen.from_revision_id, seen.to_revision_id) == (hands.old, hands.new)
    await hands.ready(rollout.name, "e0")
    assert (await hands.get(rollout.name)).state == State.STATE_PRELOADING, "one of two executors is no quorum"
    await hands.ready(rollout.name, "e1")
    await hands.until(rollout.name, in_state("PROBING"))
    assert await peer.catch_up(TIMEOUT)
    assert [item.text for item in peer.view.rollouts[KEY].golden_prompts] == ["the quick brown fox"]
    for executor in ("e0", "e1"):
        await hands.probed(rollout.name, executor)
    for step, share in enumerate((10.0, 50.0, 100.0)):
        found = await hands.until(
            rollout.name, lambda item, at=step: in_state("SPLITTING")(item) and item.step_index == at
        )
        assert (found.share_percent, await pointed_at(rig)) == (share, hands.old)
        assert await peer.catch_up(TIMEOUT)
        assert peer.view.rollouts[KEY].share_basis_points == share * 100
        assert peer.view.rollouts[KEY].golden_prompts == ()
        await hands.observe(rollout.name, step, requests(60, seed=step))
    ended = await hands.until(rollout.name, in_state("SUCCEEDED"))
    assert await pointed_at(rig) == hands.new
    assert await peer.catch_up(TIMEOUT)
    assert (peer.view.rollouts, peer.view.aliases[KEY].revision_id) == ({}, hands.new)
    states = [State.Name(line.state).removeprefix("STATE_") for line in ended.story]
    assert states == ["PRELOADING", "PROBING", *["SPLITTING"] * 3, "RETAINING", "SUCCEEDED"]
    assert ended.story[0].actor == "spiffe://loraport.local/admin/ops"
    assert {line.actor for line in ended.story[1:]} == {"registry"}
    await _told_everywhere(rig, ended)


@pytest.mark.parametrize("identity", ["loader", "executor"])
async def test_prompts_are_for_routers_only(rig: Rig, hands: Hands, peer: CatalogClient, identity: str) -> None:
    early, late = (CatalogClient(rig.channel(identity), artefacts_only=False) for _ in range(2))
    early.start()
    assert await early.wait_synced(TIMEOUT)
    rollout = await hands.start(quorum_count=1)
    await hands.ready(rollout.name)
    await hands.until(rollout.name, in_state("PROBING"))
    late.start()
    assert await late.wait_synced(TIMEOUT)
    assert await early.catch_up(TIMEOUT)
    assert await peer.catch_up(TIMEOUT)
    assert peer.view.rollouts[KEY].golden_prompts
    for client in (early, late):
        seen = client.view.rollouts[KEY]
        assert (seen.from_revision_id, seen.to_revision_id) == (hands.old, hands.new), "these stay where they are"
        assert (seen.state, seen.golden_prompts, seen.eval_prompts) == ("PROBING", (), ())
        await client.stop()


async def _told_everywhere(rig: Rig, ended: pb.Rollout) -> None:
    """Every move is a leaf of the log and an audit event."""
    leaves = (await rig.log().ListLeaves(log_pb.ListLeavesRequest(page_size=500), timeout=TIMEOUT)).leaves
    moves = [leaf for leaf in map(parse_leaf, (leaf.body for leaf in leaves)) if leaf.resource == ended.name]
    assert [leaf.kind for leaf in moves] == [Kind.ROLLOUT] * len(ended.story)
    assert len({leaf.digest for leaf in moves}) == len(moves)
    request = audit_pb.ListAuditEventsRequest(page_size=500)
    events = (await rig.audit().ListAuditEvents(request, timeout=TIMEOUT)).events
    told = [event.reason for event in reversed(events) if event.resource == ended.name]
    assert told == [line.sentence for line in ended.story]


async def test_a_slow_revision_is_rolled_back_and_the_alias_never_moved(rig: Rig, hands: Hands) -> None:
    rollout = await hands.prepared()
    await hands.observe(rollout.name, 0, requests(15, new_ms=300))
    found = await hands.until(rollout.name, in_state("ROLLED_BACK"))
    assert "first token" in found.story[-1].sentence
    assert (found.share_percent, await pointed_at(rig)) == (0, hands.old)
    assert (await hands.observe(rollout.name, 0, requests(15))).state == State.STATE_ROLLED_BACK


async def test_failures_roll_back_also_after_the_alias_has_moved(rig: Rig, hands: Hands, peer: CatalogClient) -> None:
    rollout = await hands.prepared(
        step_percents=[50, 100],
        gates=pb.RolloutGates(advance_tolerance_percent=500, error_margin_percent=10),
        retention_duration={"seconds": 600},
    )
    for step in (0, 1):
        await hands.observe(rollout.name, step, requests(120, seed=step))
        await hands.until(rollout.name, lambda item, at=step: item.step_index > at or in_state("RETAINING")(item))
    assert await pointed_at(rig) == hands.new
    seen = [item for item in requests(40, new_errors=40) if item.arm == "new"]
    await hands.observe(rollout.name, 1, seen)
    found = await hands.until(rollout.name, in_state("ROLLED_BACK"))
    assert "errors" in found.story[-1].sentence
    assert await pointed_at(rig) == hands.old
    assert await peer.catch_up(TIMEOUT)
    assert (peer.view.rollouts, peer.view.aliases[KEY].revision_id) == ({}, hands.old)


BAD_PROBES: list[tuple[dict[str, object], str]] = [
    ({"mean_logprob_difference": 0.3}, "mean difference"),
    ({"max_logprob_difference": 2.0}, "largest difference"),
    ({"mean_logprob_difference": float("nan")}, "NaN"),
    ({"nonfinite": True}, "NaN"),
    ({"from_perplexity": 10.0, "to_perplexity": 11.0}, "perplexity"),
    ({"failure_reason": "NON_FINITE_LOGITS"}, "NON_FINITE_LOGITS"),
]


async def test_a_bad_probe_ends_it_before_any_traffic(hands: Hands) -> None:
    for probe, why in BAD_PROBES:
        rollout = await hands.start(quorum_count=1)
        await hands.ready(rollout.name)
        await hands.until(rollout.name, in_state("PROBING"))
        assert await hands.probed(rollout.name, **probe) == State.STATE_ROLLED_BACK, why
        assert why in (await hands.get(rollout.name)).story[-1].sentence


async def test_a_missing_probe_is_asked_for_until_it_has_come(hands: Hands, peer: CatalogClient) -> None:
    gates = pb.RolloutGates(preload_timeout={"nanos": 200_000_000})
    rollout = await hands.start(gates=gates, step_percents=[10, 100])
    for executor in ("e0", "e1"):
        await hands.ready(rollout.name, executor)
    await hands.until(rollout.name, lambda item: item.hold_reason == "PROBE_MISSING")
    assert await peer.catch_up(TIMEOUT)
    seen = peer.view.rollouts[KEY]
    assert (seen.state, [item.text for item in seen.golden_prompts]) == ("PAUSED", ["the quick brown fox"])
    for executor in ("e0", "e1"):
        await hands.probed(rollout.name, executor)
    await hands.until(rollout.name, in_state("SPLITTING"))
    await hands.control(rollout.name, "PAUSE")
    assert await peer.catch_up(TIMEOUT)
    assert peer.view.rollouts[KEY].golden_prompts == ()


async def test_logits_that_are_no_numbers_end_it_at_once(hands: Hands) -> None:
    rollout = await hands.prepared()
    bad = pb.Observation(arm="new", ok=False, error_reason="NON_FINITE_LOGITS")
    assert (await hands.observe(rollout.name, 0, [bad])).state == State.STATE_ROLLED_BACK


async def test_a_report_counts_once(hands: Hands) -> None:
    rollout = await hands.prepared(min_sample_count=1000)

    async def count() -> int:
        return (await hands.get(rollout.name)).arms[0].request_count

    await hands.observe(rollout.name, 0, requests(5))
    again = await hands.observe(rollout.name, 0, requests(5), sequence=1)
    assert (again.sequence, await count()) == (1, 5)
    await hands.observe(rollout.name, 0, requests(5), sequence=4)
    assert (await hands.observe(rollout.name, 0, requests(5), sequence=3)).sequence == 4
    assert await count() == 10
    later = {"seconds": hands.started.seconds + 1}
    await hands.observe(rollout.name, 0, requests(5), sequence=1, start_time=later)
    assert await count() == 15, "a new process begins anew"
    await hands.observe(rollout.name, 0, requests(5), sequence=9)
    assert await count() == 15, "the old process has nothing more to say"
    await hands.observe(rollout.name, 2, requests(5), sequence=2, start_time=later)
    assert await count() == 15, "a step that has not begun has no requests"


async def test_pausing_holds_the_share_and_the_gates_watch_on(rig: Rig, hands: Hands) -> None:
    rollout = await hands.prepared()
    paused = await hands.control(rollout.name, "PAUSE", reason="")
    assert (paused.state, paused.hold_reason, paused.share_percent) == (State.STATE_PAUSED, "BY_HAND", 10)
    assert (await hands.control(rollout.name, "PAUSE")).etag == paused.etag, "pausing again changes nothing"
    await hands.observe(rollout.name, 0, requests(60))
    await asyncio.sleep(0.1)
    assert (await hands.get(rollout.name)).state == State.STATE_PAUSED
    resumed = await hands.control(rollout.name, "RESUME")
    assert resumed.state == State.STATE_SPLITTING
    await hands.until(rollout.name, lambda item: item.step_index == 1)
    await hands.control(rollout.name, "PAUSE")
    await hands.observe(rollout.name, 1, requests(60, new_ms=400, seed=3))
    await hands.until(rollout.name, in_state("ROLLED_BACK"))


async def test_by_hand_forward_and_back(rig: Rig, hands: Hands) -> None:
    rollout = await hands.start()
    assert await reason_of(hands.control(rollout.name, "ADVANCE")) == "QUORUM_MISSING"
    for executor in ("e0", "e1"):
        await hands.ready(rollout.name, executor)
    await hands.until(rollout.name, in_state("PROBING"))
    assert await reason_of(hands.control(rollout.name, "ADVANCE", reason="")) == "INVALID_REQUEST"
    split = await hands.control(rollout.name, "ADVANCE", reason="probed\nelsewhere")
    assert split.story[-1].sentence == (
        "10 % of the conversations get the new revision: advanced by hand: probed elsewhere"
    )
    assert await reason_of(hands.control(rollout.name, "ROLLBACK", etag=rollout.etag)) == "STALE_ETAG"
    back = await hands.control(rollout.name, "ROLLBACK", reason="looks odd")
    assert (back.state, back.share_percent) == (State.STATE_ROLLED_BACK, 0)
    assert (await hands.control(rollout.name, "ROLLBACK")).etag == back.etag
    for action in ("ABORT", "PAUSE", "RESUME", "ADVANCE"):
        assert await reason_of(hands.control(rollout.name, action)) == "INVALID_STATE"
    assert await reason_of(hands.control(rollout.name, "UNSPECIFIED")) == "INVALID_REQUEST"
    called_off = await hands.control((await hands.start()).name, "ABORT", reason="not today")
    assert (called_off.state, called_off.name[-2:]) == (State.STATE_ABORTED, "r2")


async def test_a_request_id_starts_and_moves_once(rig: Rig, hands: Hands) -> None:
    once = "11111111-1111-4111-8111-111111111111"
    request = pb.StartRolloutRequest(parent=ADAPTER, rollout={"to_revision_id": hands.new}, request_id=once)
    first = await rig.rollouts().StartRollout(request, timeout=TIMEOUT)
    assert await rig.rollouts().StartRollout(request, timeout=TIMEOUT) == first
    moved = await hands.control(first.name, "ABORT", request_id=once)
    assert await hands.control(first.name, "ABORT", request_id=once) == moved


async def test_a_watch_tells_everything_and_ends_with_it(rig: Rig, hands: Hands) -> None:
    rollout = await hands.start()
    seen = []

    async def follow() -> None:
        stream = rig.rollouts().WatchRollout(pb.WatchRolloutRequest(name=rollout.name), timeout=TIMEOUT)
        async for item in stream:
            seen.append(item)

    following = asyncio.create_task(follow())
    async with asyncio.timeout(TIMEOUT):
        while not seen:
            await asyncio.sleep(0.02)
    await hands.control(rollout.name, "ABORT")
    await following
    assert [item.state for item in seen] == [State.STATE_PRELOADING, State.STATE_ABORTED]


async def test_lists_page_newest_first(rig: Rig, hands: Hands) -> None:
    for _ in range(3):
        await hands.control((await hands.start()).name, "ABORT")
    names, token = [], ""
    while True:
        request = pb.ListRolloutsRequest(parent="tenants/-", page_size=2, page_token=token)
        page = await rig.rollouts().ListRollouts(request, timeout=TIMEOUT)
        names += [item.name[-2:] for item in page.rollouts]
        token = page.next_page_token
        if not token:
            break
    assert names == ["r3", "r2", "r1"]
    missing = pb.ListRolloutsRequest(parent="tenants/acme/adapters/none")
    assert await reason_of(rig.rollouts().ListRollouts(missing, timeout=TIMEOUT)) == "ADAPTER_NOT_FOUND"
    assert await reason_of(hands.get(f"{ADAPTER}/rollouts/r9")) == "ROLLOUT_NOT_FOUND"
    with pytest.raises(grpc.aio.AioRpcError):
        await hands.get(f"{ADAPTER}/rollouts/first")


async def test_the_alias_and_the_revisions_are_not_to_be_touched_meanwhile(rig: Rig, hands: Hands) -> None:
    rollout = await hands.prepared()
    forced = {"now": True, "reason": "hurry"}
    assert await reason_of(rig.alias(ALIAS, hands.new, **forced)) == "ROLLOUT_RUNNING"
    delete = adapter_pb.DeleteAliasRequest(name=ALIAS)
    assert await reason_of(rig.adapters().DeleteAlias(delete, timeout=TIMEOUT)) == "ROLLOUT_RUNNING"
    for revision in (hands.old, hands.new):
        assert await reason_of(rig.revoke(revision)) == "ROLLOUT_RUNNING"
    await rig.alias(f"{ADAPTER}/aliases/next", hands.new)
    await hands.control(rollout.name, "ROLLBACK")
    await rig.revoke(hands.new)


async def test_a_security_revoke_rolls_back_first(rig: Rig, hands: Hands, peer: CatalogClient) -> None:
    rollout = await hands.prepared(step_percents=[100], retention_duration={"seconds": 600})
    await hands.observe(rollout.name, 0, requests(60))
    await hands.until(rollout.name, in_state("RETAINING"))
    await rig.revoke(hands.new, reason="a leak", security=True)
    found = await hands.get(rollout.name)
    assert (found.state, await pointed_at(rig)) == (State.STATE_ROLLED_BACK, hands.old)
    assert found.story[-1].sentence.endswith("is revoked: a leak")
    assert await peer.catch_up(TIMEOUT)
    assert peer.view.revisions[hands.new].state == "REVOKED"
    leaves = (await rig.log().ListLeaves(log_pb.ListLeavesRequest(page_size=500), timeout=TIMEOUT)).leaves
    kinds = [parse_leaf(leaf.body).kind for leaf in leaves]
    assert kinds[-3:] == [Kind.ROLLOUT, Kind.ALIAS_SET, Kind.REVOKED], "the way back comes first"


async def test_the_old_revision_revoked_before_the_flip_calls_it_off(rig: Rig, hands: Hands) -> None:
    rollout = await hands.prepared()
    await rig.revoke(hands.old, security=True)
    assert (await hands.get(rollout.name)).state == State.STATE_ABORTED
