"""A router and the rollouts of the catalog: who is asked, what is loaded, probed and reported, and how fast it is over."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraport.errors import LoraportError as ClientError
from loraport.errors import NotFoundError
from loraport.registry.v1 import catalog_service_pb2 as cpb
from loraport.registry.v1 import rollout_service_pb2 as rpb
from loraport.router.v1 import inference_service_pb2 as ipb
from loraport.router.v1.inference_service_pb2_grpc import InferenceServiceStub
from services.shared.split import arm_of, bucket_of
from tests.contract.rollout_stage import NAME, SALT, Stage, staged
from tests.contract.router_world import SERVICE_CA, api_key, eventually


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tmp_path) as stage:
        yield stage


async def test_every_serving_executor_is_loaded_probed_and_reported(stage: Stage) -> None:
    await stage.rollout("PRELOADING")
    await eventually(lambda: {r.executor for r in stage.desk.readiness} == {"e0", "e1"})
    for report in stage.desk.readiness:
        assert (report.name, report.revision_id, report.ready) == (NAME, stage.new, True)
    await eventually(lambda: any(set(r.serving_executors) == {"e0", "e1"} for r in stage.desk.readiness))
    for executor in stage.world.executors.values():
        assert set(executor.preloaded) == {stage.old, stage.new}, "the way back needs no load"
    stage.world.executors["e1"].reference_off_by = 0.3
    prompts = [rpb.RolloutPrompt(text="the quick brown fox"), rpb.RolloutPrompt(token_ids={"ids": [5, 6, 7]})]
    await stage.rollout("PROBING", golden_prompts=prompts, eval_prompts=prompts[1:])
    await eventually(lambda: {p.executor for p in stage.desk.probes} == {"e0", "e1"})
    probed = {p.executor: p for p in stage.desk.probes}
    assert probed["e0"].prompt_count == 2
    assert probed["e0"].token_count == len(stage.world.ids("the quick brown fox")) - 1 + 2
    assert probed["e0"].max_logprob_difference == 0
    assert probed["e1"].mean_logprob_difference == pytest.approx(0.3)
    assert probed["e1"].to_perplexity == pytest.approx(2.718281828**0.5)
    assert not any(p.failure_reason or p.nonfinite for p in stage.desk.probes)
    # Held there for want of a probe, it is probed on; held elsewhere, there is nothing to probe with.
    for more, executors in (({"golden_prompts": prompts}, {"e0", "e1"}), ({}, set())):
        stage.desk.probes.clear()
        await stage.rollout("PAUSED", **more)
        await eventually(lambda wanted=executors: {p.executor for p in stage.desk.probes} == wanted)


async def test_a_refused_load_is_a_reason_and_a_new_executor_is_taken_care_of(stage: Stage) -> None:
    # That the old revision is missing is no fault of the new one.
    # No room to keep the old one means that the way back would need a load.
    stage.world.executors["e0"].refuse_preload = {stage.old: "STORE_UNAVAILABLE"}
    stage.world.executors["e1"].refuse_preload = {stage.old: "PIN_BUDGET"}
    await stage.rollout("PRELOADING")
    await eventually(lambda: {r.executor for r in stage.desk.readiness} == {"e0", "e1"})
    said = {r.executor: (r.revision_id, r.ready, r.failure_reason) for r in stage.desk.readiness}
    assert said == {"e0": (stage.new, True, ""), "e1": (stage.new, False, "PIN_BUDGET")}
    assert stage.world.executors["e1"].preloaded[0] == stage.new
    stage.world.executors["e0"].refuse_preload = {}
    stage.world.executors["e1"].refuse_preload = {}
    await eventually(lambda: any(r.executor == "e1" and r.ready for r in stage.desk.readiness))
    # An executor goes away while the split runs: the others say so, and it is loaded again when it is back.
    await stage.rollout("SPLITTING", share=5000)
    await stage.world.stop_server("e1")
    stage.world.executors["e1"].resident.clear()
    await eventually(lambda: list(stage.desk.readiness[-1].serving_executors) == ["e0"])
    loaded = len(stage.world.executors["e1"].preloaded)
    await stage.world.start_executor("e1")
    await eventually(lambda: len(stage.world.executors["e1"].preloaded) > loaded)


async def test_the_split_is_the_hashs_and_each_answer_names_its_arm(stage: Stage) -> None:
    answer = await stage.ask("s")
    assert (answer.revision_id, answer.rollout_arm) == (stage.old, "")
    await stage.rollout("SPLITTING", share=2500, step=2)
    sessions = [f"chat-{i}" for i in range(40)]
    answers = dict(zip(sessions, await asyncio.gather(*map(stage.ask, sessions)), strict=True))
    for session, answer in answers.items():
        arm = arm_of(bucket_of(SALT, "acme", f"session/{session}"), 2500)
        wanted = stage.new if arm == "new" else stage.old
        assert (answer.rollout_arm, answer.revision_id) == (arm, wanted)
    arms = [answer.rollout_arm for answer in answers.values()]
    await eventually(lambda: sum(len(stage.desk.seen(arm, 2)) for arm in ("new", "control", "old")) == 40)
    for arm in ("new", "control", "old"):
        assert len(stage.desk.seen(arm)) == arms.count(arm) > 0
    buckets = {bucket_of(SALT, "acme", f"session/{s}") for s in sessions if answers[s].rollout_arm == "new"}
    assert {seen.bucket for seen in stage.desk.seen("new")} == buckets
    seen = stage.desk.seen("new")[0]
    assert seen.ok
    assert seen.output_token_count == 3
    assert seen.first_token_ms > 0
    assert seen.per_token_ms > 0
    # A share that grows moves no conversation that the old revision has begun, and new ones by their bucket.
    await stage.rollout("SPLITTING", share=10_000, step=3)
    for session in sessions[:10]:
        assert (await stage.ask(session)).revision_id == answers[session].revision_id
    assert (await stage.ask("a new one")).revision_id == stage.new


async def test_scores_are_not_split_and_follow_the_alias(stage: Stage) -> None:
    client = stage.world.client()

    async def scored_by() -> set[str]:
        return {(await client.score([5, 6], [7], adapter="pirate")).revision_id for _ in range(4)}

    await stage.rollout("SPLITTING", share=10_000)
    assert await scored_by() == {stage.old}
    moved = cpb.CatalogAlias(tenant="acme", adapter="pirate", alias="prod", revision_id=stage.new)
    await stage.world.put(cpb.CatalogItem(alias=moved))
    await stage.rollout("RETAINING", share=10_000)
    assert await scored_by() == {stage.new}
    await client.close()


async def test_a_rollback_is_every_new_request_at_once_and_no_running_one(stage: Stage) -> None:
    await stage.rollout("SPLITTING", share=10_000)
    assert (await stage.ask("first")).revision_id == stage.new
    held = asyncio.Event()
    for executor in stage.world.executors.values():
        executor.held = held
    running = [asyncio.create_task(stage.ask(f"r{i}")) for i in range(4)]
    await eventually(lambda: sum(e.running for e in stage.world.executors.values()) == 4)
    at = time.monotonic()
    await stage.rollout("ROLLED_BACK", ended=True)
    seen_s = time.monotonic() - at
    for executor in stage.world.executors.values():
        executor.held = None
    assert (await stage.ask("r0")).revision_id == stage.old
    held.set()
    assert {(await task).revision_id for task in running} == {stage.new}
    print(f"rollback seen by the router after {seen_s * 1000:.1f} ms")


async def test_a_tenant_that_sees_the_old_revision_only_is_never_split(stage: Stage) -> None:
    """And one that sees neither gets the answer of a name that never was, and leaves nothing behind."""
    world = stage.world
    old = world.registry.revision("acme", "pirate", shared=("globex",))
    await world.put(cpb.CatalogItem(revision=old))
    await stage.rollout("SPLITTING", share=10_000)

    async def ask(tenant: str, adapter: str) -> str:
        client = world.client(tenant)
        try:
            return (await client.generate(prompt="hi", adapter=adapter, session_id="s")).revision_id
        except ClientError as error:
            return str(error).partition(" (")[0]
        finally:
            await client.close()

    name = "tenants/acme/adapters/pirate"
    assert await ask("globex", name) == stage.old
    assert (await stage.ask()).revision_id == stage.new
    hidden = world.registry.revision("acme", "pirate", shared=())
    await world.put(cpb.CatalogItem(revision=hidden))
    assert await ask("globex", name) == await ask("globex", "tenants/acme/adapters/never-was")


async def test_whoever_is_away_in_a_step_is_waited_for(stage: Stage) -> None:
    """The registry before readiness and probe are told, an executor before it is probed: told once they are back."""
    stage.desk.away = True
    await stage.rollout("PRELOADING")
    await eventually(lambda: all(e.preloaded for e in stage.world.executors.values()))
    assert not stage.desk.readiness
    stage.desk.away = False
    await eventually(lambda: {r.executor for r in stage.desk.readiness if r.ready} == {"e0", "e1"})
    await stage.world.stop_server("e1")
    stage.desk.away = True
    prompts = [rpb.RolloutPrompt(token_ids={"ids": [5, 6, 7]})]
    await stage.rollout("PROBING", golden_prompts=prompts)
    await asyncio.sleep(0.3)
    stage.desk.away = False
    await eventually(lambda: {p.executor for p in stage.desk.probes if not p.failure_reason} == {"e0"})
    await stage.world.start_executor("e1")
    await eventually(lambda: {p.executor for p in stage.desk.probes if not p.failure_reason} == {"e0", "e1"})


async def test_a_router_that_starts_anew_splits_as_before_and_goes_on(stage: Stage) -> None:
    await stage.rollout("SPLITTING", share=3000, step=1)
    sessions = [f"chat-{i}" for i in range(12)]
    before = [(await stage.ask(session)).rollout_arm for session in sessions]
    await stage.world.router.stop()
    told = len(stage.desk.seen("new"))
    assert told == before.count("new"), "what was observed is told before it ends"
    routers = {report.router for report in stage.desk.readiness}
    stage.desk.reports.clear()
    await stage.world.start_router()
    assert [(await stage.ask(session)).rollout_arm for session in sessions] == before
    await eventually(lambda: len(stage.desk.seen("new")) == told)
    assert min(stage.desk.reports) == 1
    await eventually(lambda: {report.router for report in stage.desk.readiness} > routers)


async def test_a_new_revision_that_cannot_serve_leaves_everybody_with_the_old_one(stage: Stage) -> None:
    await stage.rollout("SPLITTING", share=10_000)
    assert (await stage.ask()).revision_id == stage.new
    gone = stage.world.registry.revision("acme", "pirate", version=2, state="REVOKED")
    await stage.world.put(cpb.CatalogItem(revision=gone))
    answer = await stage.ask()
    assert (answer.revision_id, answer.rollout_arm) == (stage.old, "old")


async def test_what_is_observed_survives_a_registry_that_is_away_and_counts_once(stage: Stage) -> None:
    await stage.rollout("SPLITTING", share=10_000)
    stage.desk.away = True
    for executor in stage.world.executors.values():
        executor.load_ms = 5.0
    await stage.ask()
    for executor in stage.world.executors.values():
        executor.fail_after = 1
    with pytest.raises(ClientError):
        await stage.ask()
    await asyncio.sleep(1.2)
    assert not stage.desk.reports
    stage.desk.away, stage.desk.lose_answers = False, 2
    await eventually(lambda: len(stage.desk.seen("new")) == 2 and not stage.desk.lose_answers)
    first, second = stage.desk.seen("new")
    assert (first.ok, first.cold) == (True, True)
    assert (second.ok, second.error_reason) == (False, "NON_FINITE_LOGITS")
    await eventually(lambda: stage.desk.repeated >= 2)
    assert sorted(stage.desk.reports) == list(range(1, len(stage.desk.reports) + 1))


async def test_a_registry_that_takes_nothing_any_more_is_told_once(stage: Stage) -> None:
    """A rollout has ended there, and the router has not heard of it yet."""
    await stage.rollout("SPLITTING", share=10_000)
    stage.desk.ended = True
    await stage.ask()
    await eventually(lambda: stage.desk.calls)
    await asyncio.sleep(0.3)
    assert stage.desk.calls == 1
    stage.desk.ended = False
    await stage.ask()
    await eventually(lambda: stage.desk.seen("new"))


async def test_a_shadow_copies_only_into_spare_room_and_tells_the_caller_nothing(stage: Stage) -> None:
    await stage.rollout("SHADOWING", shadow_basis_points=10_000)
    answer = await stage.ask()
    assert answer.revision_id == stage.old
    await eventually(lambda: len(stage.desk.seen("new", -1)) == 1 and len(stage.desk.seen("control", -1)) == 1)
    asked = [ticket.revision_id for e in stage.world.executors.values() for ticket, _ in e.requests]
    assert sorted(asked) == sorted([stage.old, stage.new])
    for executor in stage.world.executors.values():
        executor.fail_after = 0
        executor.requests.clear()
    with pytest.raises(ClientError):
        await stage.ask()  # its own failure, not the copy's
    await eventually(lambda: not stage.world.router._shadows._copies)
    accounts = stage.world.router._shadows._dispatch.ledger.accounts
    assert accounts[NAME].prefill > 0, "the rollout pays for its copies"
    # No room that nobody waits for: no copy.
    view = stage.world.router._fleet.members
    flights = [view.begin(n, stage.old, tenant="acme", now=0.0) for n in ("e0", "e1") for _ in range(20)]
    for executor in stage.world.executors.values():
        executor.fail_after = -1
        executor.requests.clear()
    await stage.ask()
    assert not stage.world.router._shadows._copies
    assert [t.revision_id for e in stage.world.executors.values() for t, _ in e.requests] == [stage.old]
    for flight in flights:
        flight.release()


async def test_a_clients_word_counts_once_for_its_own_answer(stage: Stage) -> None:
    await stage.rollout("SPLITTING", share=10_000, step=1)
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])
    async with grpc.aio.secure_channel(f"127.0.0.1:{stage.world.router.user_port}", credentials) as channel:
        stub = InferenceServiceStub(channel)

        def metadata(tenant: str, request_id: str = "") -> tuple:
            return (("authorization", f"Bearer {api_key(tenant)}"), ("x-request-id", request_id or "other"))

        async def outcome(tenant: str, request_id: str, word: str = "REJECTED") -> str:
            request = ipb.ReportOutcomeRequest(
                request_id=request_id, outcome=ipb.ReportOutcomeRequest.Outcome.Value(f"OUTCOME_{word}")
            )
            try:
                await stub.ReportOutcome(request, metadata=metadata(tenant), timeout=60)
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "OK"

        ask = ipb.GenerateRequest(target=ipb.Target(adapter="pirate"), prompt="hi")
        async for _ in stub.Generate(ask, metadata=metadata("acme", "mine"), timeout=60):
            pass
        assert await outcome("acme", "mine") == "OK"
        assert await outcome("acme", "mine", "ACCEPTED") == "OK"
        unknown = await outcome("acme", "unknown")
        assert unknown.startswith("NOT_FOUND")
        assert await outcome("globex", "mine") == unknown
        assert (await outcome("acme", "mine", "UNSPECIFIED")).startswith("INVALID_ARGUMENT")
    client = stage.world.client()
    answer = await client.generate(prompt="hi", adapter="pirate")
    await client.report_outcome(answer.request_id, accepted=True)
    with pytest.raises(NotFoundError):
        await client.report_outcome("unknown", accepted=True)
    await client.close()

    def counts() -> tuple[int, int]:
        said = [o for r in stage.desk.reports.values() for o in r.outcomes if o.arm == "new"]
        return sum(o.accepted_count for o in said), sum(o.rejected_count for o in said)

    await eventually(lambda: counts() == (1, 1))
