"""Requests, leases and pages over their whole life: cancel, revoke, evict, preempt, fail. Books return to baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.executor import measure
from services.executor.engine.device_link import CpuLink
from services.executor.engine.device_pool import POOL_DTYPE
from services.executor.engine.staging import stage
from services.executor.reporter import Reporter
from services.executor.request import FinishReason, RefusalReason, Refused, Sampling
from services.shared import metrics, telemetry
from services.shared.clock import ManualClock
from services.shared.residency import Notice
from tests.support.harness import SMALL, World, open_world
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

LONG = Sampling(max_tokens=60, ignore_eos=True)


class Nowhere:
    async def put(self, notice: Notice) -> bool:
        return False


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("life")
    base = make_base(root / "base")
    bundles = {}
    for seed, name in enumerate("PQRS"):
        make_adapter(base, root / name, seed=seed, r=8, lora_alpha=16, target_modules=ALL)
        bundles[name] = read_bundle(base, root / name)
    return root, base, bundles


@pytest.fixture
def world(family) -> World:
    return open_world(family[0] / "base")


def pages(count: int) -> int:
    """Pool bytes for `count` pages of the tiny base (8 rank rows, fp32)."""
    per_rank = 2 * ((3 * 64 + 64 + 32 + 32) + (64 + 64) + (2 * 64 + 2 * 128) + (128 + 64)) + 64 + 256
    return per_rank * 8 * 4 * count


def test_cancel_at_every_stage_frees_everything_within_two_steps(family, world: World) -> None:
    bundle = family[2]["P"]
    world.load(bundle.host())
    for stage_steps in (0, 1, 2, 3, 9):
        transcript = world.submit(f"c{stage_steps}", prompt_of(150), bundle.revision_id, sampling=LONG)
        world.step(stage_steps)
        world.engine.cancel(f"c{stage_steps}")
        world.engine.cancel(f"c{stage_steps}")
        world.step(2)
        assert [e.reason for e in transcript.ended] == [FinishReason.CANCELLED]
        world.assert_idle()
    done = world.submit("done", prompt_of(5))
    world.finish()
    world.engine.cancel("done")
    world.engine.cancel("never was")
    world.step()
    assert len(done.ended) == 1


def test_key_value_reuse_never_crosses_revisions_or_tenants(family, world: World) -> None:
    """C1: hits are 0, 0, 0, full, full for base, A, B, base, A, and every answer equals the cold one."""
    root, base, bundles = family
    for name in "PQ":
        world.load(bundles[name].host())
    p = prompt_of(65)
    cold = {None: greedy(base, p, 12)}
    cold |= {n: greedy(with_adapter(base, root / n), p, 12) for n in "PQ"}
    hits = []
    for i, name in enumerate((None, "P", "Q", None, "P")):
        transcript = world.submit(f"q{i}", p, name and bundles[name].revision_id, salt=b"acme")
        world.finish()
        hits.append(transcript.ended[0].usage.prefix_hit_tokens)
        assert transcript.tokens == cold[name]
    assert hits == [0, 0, 0, 64, 64]
    other = world.submit("other tenant", p, salt=b"globex")
    world.finish()
    assert other.ended[0].usage.prefix_hit_tokens == 0


def test_running_rows_keep_their_weights_while_others_load_and_leave(family) -> None:
    """D1: two pages, P and Q decoding; R and S must wait, and get in afterwards."""
    root, base, bundles = family
    world = open_world(root / "base", replace(SMALL, pool_bytes=pages(2)))
    for name in "PQ":
        world.load(bundles[name].host())
    runs = {n: world.submit(n, prompt_of(9), bundles[n].revision_id, sampling=LONG) for n in "PQ"}
    world.step(3)
    futures = {}
    for name in "RS":
        futures[name] = world.engine.load(stage(bundles[name].host(), world.decoder.groups, dtype=POOL_DTYPE))
    world.step(20)
    assert not any(f.done() for f in futures.values())
    world.finish()
    world.steps_until(lambda: all(f.done() for f in futures.values()))
    for future in futures.values():
        future.result().release()
    for name in "PQ":
        reference = with_adapter(base, root / name)
        assert runs[name].tokens[:20] == greedy(reference, prompt_of(9), 20)[: len(runs[name].tokens[:20])]
    assert {r.revision_id for r in world.engine.state().residents} == {bundles[n].revision_id for n in "RS"}
    for name in "RS":
        world.submit(name, prompt_of(9), bundles[name].revision_id)
    world.finish()
    assert world.transcripts["R"].tokens == greedy(with_adapter(base, root / "R"), prompt_of(9), 12)


def test_fifty_revisions_pass_through_one_page_beside_base_traffic(family) -> None:
    """D5: the base needs no page; all are served; nothing leaks."""
    root, _, bundles = family
    world = open_world(root / "base", replace(SMALL, pool_bytes=pages(1)))
    world.submit("base", prompt_of(5), sampling=replace(LONG, max_tokens=200))
    for i in range(50):
        bundle = replace(bundles["PQRS"[i % 4]], revision_id=f"sha256:{i:064x}")
        world.load(bundle.host())
        transcript = world.submit(f"q{i}", prompt_of(7), bundle.revision_id, sampling=Sampling(max_tokens=2))
        world.steps_until(lambda t=transcript: bool(t.ended))
    world.finish()
    world.assert_idle()
    assert world.engine.state().evictions == 49
    assert world.engine.state().loads_done == 50


def test_a_load_is_copied_in_bounded_pieces_while_rows_decode(family, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _, bundles = family
    monkeypatch.setattr(CpuLink, "piece_bytes", 4000)
    world = open_world(root / "base")
    world.engine._options = replace(world.engine._options, load_bytes_per_step=1)
    transcript = world.submit("base", prompt_of(5), sampling=LONG)
    world.step(2)
    future = world.engine.load(stage(bundles["P"].host(), world.decoder.groups, dtype=POOL_DTYPE))
    made = len(transcript.tokens)
    world.steps_until(future.done)
    assert len(transcript.tokens) - made >= 7, "every piece has a step of its own"
    future.result().release()


def test_one_load_for_many_askers_and_a_lease_for_each(family, world: World) -> None:
    staged = stage(family[2]["P"].host(), world.decoder.groups, dtype=POOL_DTYPE)
    futures = [world.engine.load(staged) for _ in range(50)]
    futures[7].cancel()
    world.steps_until(lambda: all(f.done() for f in futures))
    assert world.engine.state().loads_done == 1
    assert world.engine.state().residents[0].leases == 49
    for future in futures:
        if not future.cancelled():
            future.result().release()
            future.result().release()
    world.assert_idle()


def test_revocation_ends_requests_erases_pages_and_refuses_from_then_on(family, world: World) -> None:
    bundles = family[2]
    for name in "PQ":
        world.load(bundles[name].host())
    bad, good = bundles["P"].revision_id, bundles["Q"].revision_id
    runs = [world.submit(f"p{i}", prompt_of(40), bad, sampling=LONG) for i in range(2)]
    other = world.submit("q", prompt_of(40), good, sampling=LONG)
    world.step(5)
    owned = next(r.pages for r in world.engine.state().residents if r.revision_id == bad)
    done = world.engine.revoke(bad, final=True)
    world.step()
    assert done.done()
    assert [t.ended[0].reason for t in runs] == [FinishReason.REVOKED] * 2
    rows = [page * 8 + i for page in owned for i in range(8)]
    assert world.engine._runner.pool.banks["qkv"].a[:, rows].isnan().all()
    assert all(world.engine._scheduler.blocks._owner[b] != bad for b in range(world.engine.state().kv_total))
    with pytest.raises(Refused) as refused:
        world.submit("again", prompt_of(4), bad)
    assert refused.value.reason is RefusalReason.NOT_RESIDENT
    with pytest.raises(Refused) as refused:
        world.load(bundles["P"].host())
    assert refused.value.reason is RefusalReason.REVOKED
    world.finish()
    assert len(other.tokens) == 60
    world.assert_idle()


def test_evict_lets_running_requests_end_and_the_revision_can_come_back(family, world: World) -> None:
    bundle = family[2]["P"]
    world.load(bundle.host())
    run = world.submit("x", prompt_of(10), bundle.revision_id)
    world.step(2)
    answer = world.engine.evict(bundle.revision_id)
    world.step()
    assert answer.result() == 1
    again = world.engine.load(stage(bundle.host(), world.decoder.groups, dtype=POOL_DTYPE))
    world.step()
    assert not again.done()
    world.finish()
    assert run.ended[0].reason.is_answer
    world.steps_until(again.done)
    again.result().release()
    gone, unknown = world.engine.evict(bundle.revision_id), world.engine.evict("sha256:none")
    world.step()
    assert (gone.result(), unknown.result()) == (0, None)
    assert world.engine.state().residents == ()


def test_preemption_changes_no_answer(family) -> None:
    root, _, bundles = family
    sizes = replace(SMALL, kv_bytes=2 * 2 * 16 * 2 * 16 * 4 * 9)  # eight usable blocks
    world = open_world(root / "base", sizes)
    world.load(bundles["P"].host())
    prompts = [prompt_of(30 + i) for i in range(5)]
    for i, p in enumerate(prompts):
        world.submit(f"b{i}", p, sampling=replace(LONG, max_tokens=40))
        world.submit(f"a{i}", p, bundles["P"].revision_id, sampling=replace(LONG, max_tokens=40))
    world.finish()
    assert world.engine.state().preemptions > 0
    calm = open_world(root / "base")
    calm.load(bundles["P"].host())
    for i, p in enumerate(prompts):
        calm.submit(f"b{i}", p, sampling=replace(LONG, max_tokens=40))
        calm.submit(f"a{i}", p, bundles["P"].revision_id, sampling=replace(LONG, max_tokens=40))
    calm.finish()
    assert {k: t.tokens for k, t in world.transcripts.items()} == {k: t.tokens for k, t in calm.transcripts.items()}
    world.assert_idle()


def test_priority_and_deadline(world: World) -> None:
    first = [world.submit(f"low{i}", prompt_of(60)) for i in range(16)]
    urgent = world.submit("high", prompt_of(60), priority=5)
    late = world.submit("late", prompt_of(60), deadline=0.0005)
    world.step(2)
    assert urgent.started
    assert not first[-1].started
    assert late.ended[0].reason is FinishReason.DEADLINE
    world.finish()


def test_stop_tokens_minimum_and_eos(world: World) -> None:
    p = prompt_of(12)
    free = world.submit("free", p, sampling=LONG)
    world.finish()
    stop = free.tokens[4]
    cut = free.tokens.index(stop)
    stopped = world.submit("stop", p, sampling=replace(LONG, stop_token_ids=(stop,)))
    held = world.submit("held", p, sampling=replace(LONG, stop_token_ids=(stop,), min_tokens=20))
    world.finish()
    assert stopped.tokens == free.tokens[:cut]
    assert (stopped.ended[0].reason, stopped.ended[0].stop_token_id) == (FinishReason.STOP_TOKEN, stop)
    assert len(held.tokens) >= 20
    assert stop not in held.tokens[:20]
    biased = replace(LONG, ignore_eos=False, logit_bias=((2, 100.0),))
    ended = world.submit("eos", p, sampling=biased)
    world.finish()
    assert (ended.tokens, ended.ended[0].reason) == ([], FinishReason.EOS)


def test_what_cannot_be_served_is_refused_at_once(world: World) -> None:
    cases = [
        ((), Sampling(), RefusalReason.EMPTY_PROMPT),
        ((3, 256), Sampling(), RefusalReason.BAD_TOKEN),
        ((-1,), Sampling(), RefusalReason.BAD_TOKEN),
        (prompt_of(256), Sampling(), RefusalReason.PROMPT_TOO_LONG),
        (prompt_of(250), Sampling(max_tokens=7), RefusalReason.MAX_TOKENS_TOO_LARGE),
        (prompt_of(4), Sampling(temperature=-1.0), RefusalReason.BAD_SAMPLING),
        (prompt_of(4), Sampling(temperature=float("nan")), RefusalReason.BAD_SAMPLING),
        (prompt_of(4), Sampling(max_tokens=0), RefusalReason.BAD_SAMPLING),
        (prompt_of(4), Sampling(top_p=0.0), RefusalReason.BAD_SAMPLING),
        (prompt_of(4), Sampling(stop_token_ids=(999,)), RefusalReason.BAD_SAMPLING),
    ]
    for prompt, sampling, reason in cases:
        with pytest.raises(Refused) as refused:
            world.submit("x", prompt, sampling=sampling)
        assert refused.value.reason is reason
    world.submit("x", prompt_of(250), sampling=Sampling(max_tokens=6))
    with pytest.raises(Refused) as refused:
        world.submit("x", prompt_of(4))
    assert refused.value.reason is RefusalReason.DUPLICATE_REQUEST
    world.finish()


def test_an_adapter_that_overflows_fails_alone(family, world: World) -> None:
    bundle = family[2]["P"]
    wild = replace(
        bundle, modules=tuple(replace(m, scaling=1e38) for m in bundle.modules), revision_id="sha256:" + "e" * 64
    )
    world.load(wild.host())
    bad = world.submit("bad", prompt_of(40), wild.revision_id)
    good = world.submit("good", prompt_of(40))
    world.finish()
    assert bad.ended[0].reason is FinishReason.NON_FINITE_LOGITS
    assert bad.tokens == []
    assert good.tokens == greedy(family[1], prompt_of(40), 12)
    world.assert_idle()


def test_a_device_fault_ends_that_steps_requests_and_nothing_else(family, world: World) -> None:
    run, calls = world.engine._runner.run, []

    def broken(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("device fault")
        return run(plan)

    world.engine._runner.run = broken
    lost = world.submit("lost", prompt_of(40), sampling=LONG)
    for _ in range(5):
        world.engine.step()
    assert lost.ended[0].reason is FinishReason.ENGINE_FAULT
    assert len(world.faults) == 1
    world.faults.clear()
    after = world.submit("after", prompt_of(40))
    world.finish()
    assert after.ended[0].usage.prefix_hit_tokens == 0, "nothing of the failed step is trusted"
    assert after.tokens == greedy(family[1], prompt_of(40), 12)


def test_a_request_waits_from_the_moment_it_is_accepted_whoever_tells(world: World, monkeypatch) -> None:
    shown: dict[tuple[str, ...], float] = {}
    monkeypatch.setattr(
        telemetry, "gauge", lambda metric, value, **labels: shown.update({(metric.name, *labels.values()): value})
    )
    reporter = Reporter(Nowhere(), world.engine.state, executor="e", base_id="b", epoch=1, clock=ManualClock())
    for name in ("a", "b"):
        world.submit(name, prompt_of(6), sampling=LONG)
    for waiting, running in ((2, 0), (0, 2)):
        state = world.engine.state()
        assert (state.waiting, state.running) == (waiting, running)
        notice = reporter.notice(state)
        assert (notice.queued_count, notice.running_count) == (waiting, running)
        measure.sample(state, (), base_bytes=0)
        requests = metrics.EXECUTOR_REQUESTS.name
        assert (shown[requests, "waiting"], shown[requests, "running"]) == (waiting, running)
        world.step(2)


def test_a_sink_that_fails_cancels_only_its_own_request(world: World) -> None:
    def sink(event: object) -> None:
        raise ConnectionError("gone")

    spec_prompt = prompt_of(6)
    other = world.submit("other", spec_prompt)
    world.engine.submit(replace_spec("gone", spec_prompt), sink)
    for _ in range(6):
        world.engine.step()
    assert world.engine.state().open_requests == 1
    world.faults.clear()
    world.finish()
    assert other.ended[0].reason.is_answer


def replace_spec(request_id: str, prompt: tuple[int, ...]):
    from services.executor.request import RequestSpec

    return RequestSpec(request_id=request_id, prompt=prompt, sampling=LONG)
