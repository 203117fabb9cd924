"""A revision that takes an executor down with it: how much a router lets it meet, and what it tells of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraport.errors import LoraportError as ClientError
from loraport.registry.v1 import rollout_service_pb2 as rpb
from loraport.router.v1 import router_admin_service_pb2 as apb
from loraport.router.v1.router_admin_service_pb2_grpc import RouterAdminServiceStub
from services.router import rollout_agent, rollout_losses
from services.router.rollout_probes import LOWEST_PRIORITY
from services.shared.errors import LoraportError
from tests.contract.rollout_stage import NAME, Stage, staged
from tests.contract.router_world import SERVICE_CA, FakeExecutor, eventually

PROMPTS = [rpb.RolloutPrompt(token_ids={"ids": [5, 6, 7]}), rpb.RolloutPrompt(token_ids={"ids": [5, 6, 7, 8]})]


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Nothing is certain by itself, and nobody waits in vain, unless a test sets these times."""
    monkeypatch.setattr(rollout_losses, "SURE_S", 600.0)
    monkeypatch.setattr(rollout_losses, "ALONE_S", 600.0)
    async with staged(tmp_path) as stage:
        yield stage


def asked_for(executor: FakeExecutor, revision_id: str) -> int:
    return sum(ticket.revision_id == revision_id for ticket, _ in executor.requests)


async def one_request_on_board(stage: Stage) -> tuple[asyncio.Task, str]:
    """Begins a request of the new revision, and returns it and its executor."""
    await stage.rollout("SPLITTING", share=10_000)
    await eventually(lambda: {r.executor for r in stage.desk.readiness if r.ready} == {"e0", "e1"})
    executors = stage.world.executors
    for executor in executors.values():
        executor.pause_s = 600.0  # the server's end ends it
    running = asyncio.create_task(stage.ask("a"))
    await eventually(lambda: sum(e.running for e in executors.values()) == 1)
    name = next(name for name, e in executors.items() if e.running)
    for executor in executors.values():
        executor.pause_s = 0.0
    return running, name


async def reason_of(task: asyncio.Task) -> str:
    with pytest.raises(ClientError) as caught:
        await task
    return str(caught.value.reason)


async def test_one_request_takes_down_one_executor_and_the_next_ones_get_the_old_revision(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_losses, "SURE_S", 1.0)
    running, name = await one_request_on_board(stage)
    other = stage.world.executors["e1" if name == "e0" else "e0"]
    stage.desk.away = True  # the registry's word does not come for a while
    await stage.world.stop_server(name)
    assert await reason_of(running) == "EXECUTOR_UNAVAILABLE"
    assert asked_for(other, stage.new) == 0, "it was not tried on the second executor"
    answers = [await stage.ask(f"s{i}") for i in range(3)]
    assert {(a.revision_id, a.rollout_arm) for a in answers} == {(stage.old, "old")}
    stage.desk.away = False
    await eventually(lambda: stage.desk.lost)
    loss = stage.desk.lost[0]
    assert (loss.name, loss.executor, loss.revision_id, loss.ready) == (NAME, name, stage.new, False)
    # Its end says nothing of either revision by itself.
    await eventually(lambda: len(stage.desk.seen("old")) == 3)
    assert not stage.desk.seen("new")
    # The registry has moved: what it says is what counts.
    await stage.rollout("SPLITTING", share=10_000)
    assert (await stage.ask("b")).revision_id == stage.new
    assert len(stage.desk.lost) == 1


async def test_an_executor_that_is_back_as_it_was_is_no_loss_and_a_restarted_one_is(stage: Stage) -> None:
    running, name = await one_request_on_board(stage)
    await stage.world.stop_server(name)
    assert await reason_of(running) == "EXECUTOR_UNAVAILABLE"
    assert (await stage.ask("b")).revision_id == stage.old
    await stage.world.start_executor(name)  # the very same process
    await eventually(lambda: not stage.world.router._agent._parts.losses._losses)
    assert (await stage.ask("c")).revision_id == stage.new, "it is suspected no longer"
    assert not stage.desk.lost
    running, name = await one_request_on_board(stage)
    await stage.world.stop_server(name)
    assert await reason_of(running) == "EXECUTOR_UNAVAILABLE"
    stage.world.executors[name].epoch = 2
    await stage.world.start_executor(name)
    await eventually(lambda: [(loss.executor, loss.lost_epoch) for loss in stage.desk.lost] == [(name, 1)])


async def test_a_router_that_reaches_no_executor_tells_of_none(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    running, name = await one_request_on_board(stage)
    for each in ("e0", "e1"):
        await stage.world.stop_server(each)
    assert await reason_of(running) == "EXECUTOR_UNAVAILABLE"
    await eventually(lambda: not stage.world.router._fleet.answering)
    monkeypatch.setattr(rollout_losses, "SURE_S", 0.6)
    await asyncio.sleep(1.5)
    assert not stage.desk.lost
    await stage.world.start_executor("e1" if name == "e0" else "e0")
    await eventually(lambda: [loss.executor for loss in stage.desk.lost] == [name])


async def test_until_the_first_one_has_had_a_token_they_go_one_by_one(stage: Stage) -> None:
    await stage.rollout("SPLITTING", share=10_000)
    await eventually(lambda: {r.executor for r in stage.desk.readiness if r.ready} == {"e0", "e1"})
    executors = stage.world.executors
    for executor in executors.values():
        executor.pause_s = 600.0  # the server's end ends it
    running = [asyncio.create_task(stage.ask(f"s{i}")) for i in range(4)]
    await eventually(lambda: sum(e.running for e in executors.values()) == 1)
    await asyncio.sleep(0.3)
    assert sum(asked_for(e, stage.new) for e in executors.values()) == 1
    name = next(name for name, e in executors.items() if e.running)
    for executor in executors.values():
        executor.pause_s = 0.0
    await stage.world.stop_server(name)
    assert [await reason_of(task) for task in running] == ["EXECUTOR_UNAVAILABLE"] * 4
    assert sum(asked_for(e, stage.new) for e in executors.values()) == 1, "nobody followed it"
    # The registry lets it go on, and it answers: now they go together.
    await stage.rollout("SPLITTING", share=10_000)
    assert (await stage.ask("a")).revision_id == stage.new
    remaining = executors["e1" if name == "e0" else "e0"]
    remaining.held = asyncio.Event()
    running = [asyncio.create_task(stage.ask(f"t{i}")) for i in range(4)]
    await eventually(lambda: remaining.running == 4)
    remaining.held.set()
    assert {(await task).revision_id for task in running} == {stage.new}


async def test_an_executor_that_goes_away_without_the_new_revision_is_no_loss(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.rollout("SPLITTING", share=0)
    for executor in stage.world.executors.values():
        executor.pause_s = 600.0
    running = asyncio.create_task(stage.ask("a"))
    await eventually(lambda: sum(e.running for e in stage.world.executors.values()) == 1)
    name = next(name for name, e in stage.world.executors.items() if e.running)
    for executor in stage.world.executors.values():
        executor.pause_s = 0.0
    monkeypatch.setattr(rollout_losses, "SURE_S", 0.3)
    await stage.world.stop_server(name)
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.sleep(0.6)
    assert not stage.desk.lost
    assert (await stage.ask("b")).revision_id == stage.old


async def test_a_probe_that_takes_an_executor_down_meets_one_of_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_losses, "SURE_S", 0.6)
    for executor in stage.world.executors.values():
        executor.pause_s = 600.0  # the server's end ends it
    await stage.rollout("PROBING", golden_prompts=PROMPTS)
    await eventually(lambda: sum(e.running for e in stage.world.executors.values()) == 1)
    name = next(name for name, e in stage.world.executors.items() if e.running)
    other = stage.world.executors["e1" if name == "e0" else "e0"]
    await stage.world.stop_server(name)
    await eventually(lambda: [loss.executor for loss in stage.desk.lost] == [name])
    await asyncio.sleep(1.2)
    assert asked_for(other, stage.new) == 0, "the second one waits for the registry's word"


async def test_a_probe_is_queued_and_paid_for_and_asks_for_no_prompt_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_agent, "RETRY_S", 0.05)
    offered = []
    queue = stage.world.router._admission._dispatch.queue
    offer = queue.offer
    monkeypatch.setattr(queue, "offer", lambda request: (offered.append(request), offer(request)))
    first = stage.world.executors["e0"]
    refusals = 0

    def refuse_the_second() -> None:
        nonlocal refusals
        if asked_for(first, stage.new) == 2:
            refusals += 1
            raise LoraportError("POOL_TOO_SMALL")

    first.fail_before = refuse_the_second
    await stage.rollout("PROBING", golden_prompts=PROMPTS)
    await eventually(lambda: {p.executor for p in stage.desk.probes if not p.failure_reason} == {"e0", "e1"})
    assert refusals == 1
    asked = [list(request.continuation_token_ids) for _, request in first.requests]
    assert asked == [[6, 7], [6, 7, 8], [6, 7, 8]], "the first prompt was not asked again"
    assert {(r.tenant, r.priority) for r in offered} == {(NAME, LOWEST_PRIORITY)}
    assert {r.only for r in offered} == {"e0", "e1"}
    account = stage.world.router._admission._dispatch.ledger.accounts[NAME]
    assert account.prefill > 0
    assert account.weight < 1
    certificate, key = stage.world.leaf("admin/operator")
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{stage.world.router.admin_port}", credentials) as channel:
        fairness = await RouterAdminServiceStub(channel).GetFairness(apb.GetFairnessRequest(), timeout=60)
    assert not fairness.tenants, "a rollout is no tenant"
    assert {admission.tenant for admission in fairness.admissions} == {NAME}


async def test_what_an_executor_refuses_is_asked_ever_more_seldom(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_agent, "RETRY_S", 0.05)
    refusing = stage.world.executors["e0"]
    refusing.refuse_preload = {stage.new: "PIN_BUDGET"}
    await stage.rollout("PRELOADING")
    await eventually(lambda: {r.executor for r in stage.desk.readiness} == {"e0", "e1"})
    work = stage.world.router._agent._work[NAME, "e0"]
    await eventually(lambda: work.refusals >= 5)
    refusing.refuse_preload = {}
    await eventually(lambda: any(r.executor == "e0" and r.ready for r in stage.desk.readiness))
    # The desk has it a moment before the agent hears that.
    await eventually(lambda: work.refusals == 0)


def test_each_refusal_doubles_the_wait_up_to_the_last_one() -> None:
    work = rollout_agent._Work(epoch=1)
    waits = []
    for _ in range(12):
        work.refused(100.0)
        waits.append(work.retry_at - 100.0)
    expected = [min(rollout_agent.LAST_RETRY_S, rollout_agent.RETRY_S * 2**n) for n in range(12)]
    assert waits == pytest.approx(expected)
    assert waits[-1] == rollout_agent.LAST_RETRY_S > waits[0]
    work.did()
    assert (work.refusals, work.retry_at) == (0, 0.0)
