"""The executor's calls on a running service: tickets, loads, streams, revocation, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from loraport.bundle.envelope import SigningKey
from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.types.v1 import types_pb2
from services.router.executor_link import Link
from tests.contract.executor_rig import Peers, Rig, State, running, slowly
from tests.loader_rig import reason, until
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of, with_adapter

P = prompt_of(33)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("family")
    base = make_base(root / "base")
    (root / "base" / "tokenizer.json").write_text("{}")
    for seed, (name, rank) in enumerate({"pirate": 8, "terse": 4}.items()):
        make_adapter(base, root / name, seed=seed, r=rank, lora_alpha=16, target_modules=ALL)
    answers = {None: greedy(base, P, 12)}
    answers |= {name: greedy(with_adapter(base, root / name), P, 12) for name in ("pirate", "terse")}
    return root, answers


@pytest.fixture(params=["a call each", "one stream"])
async def rig(tmp_path: Path, family, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    root, _ = family
    peers = Peers()
    for name in ("pirate", "terse"):
        peers.publish(root / "base", root / name, tenant="acme" if name == "pirate" else "globex")
    async with running(tmp_path, root / "base", peers) as rig:
        if request.param == "one stream":
            rig.link = Link(rig.stub.ExecuteMany)
        yield rig
        assert not rig.service._device.engine.state().failed


def revision(rig: Rig, name: str) -> str:
    return next(p.revision_id for p in rig.peers.published.values() if p.name == name)


async def idle(rig: Rig) -> None:
    engine = rig.service._device.engine
    await until(lambda: not engine.state().open_requests and not any(r.leases for r in engine.state().residents))


async def test_two_tenants_and_the_base_in_one_batch(rig: Rig, family) -> None:
    _, answers = family
    pirate, terse = revision(rig, "pirate"), revision(rig, "terse")
    got = await asyncio.gather(
        rig.answer(P),
        rig.answer(P, pirate),
        rig.answer(P, terse, ticket=rig.ticket(terse, tenant="globex")),
    )
    assert [a.tokens[0] for a in got] == [answers[None], answers["pirate"], answers["terse"]]
    assert [a.started.revision_id for a in got] == ["", pirate, terse]
    assert {a.started.base_id for a in got} == {rig.peers.base}
    assert got[0].started.load_ms == 0
    assert got[1].started.load_ms > 0
    assert got[0].finished[0].kernel_path == "base"
    assert got[1].finished[0].kernel_path.startswith("cpu-")
    usage = got[1].finished[0].usage
    assert (usage.prompt_token_count, usage.completion_token_count) == (33, len(answers["pirate"]))
    warm = await rig.answer(P, pirate)
    assert warm.tokens[0] == answers["pirate"]
    assert warm.started.load_ms == 0
    assert warm.started.cached_token_count == 32
    assert warm.finished[0].usage.cached_token_count == 32
    await idle(rig)
    assert sorted(rig.peers.released) == sorted([pirate, terse])


async def test_only_a_routers_ticket_for_this_very_request_opens(rig: Rig) -> None:
    pirate, terse = revision(rig, "pirate"), revision(rig, "terse")
    cases = {
        "foreign key": rig.ticket(pirate, key=SigningKey.generate()),
        "other revision": rig.ticket(terse),
        "base": rig.ticket(""),
        "expired": rig.ticket(pirate, expires=1),
        "for ever": rig.ticket(pirate, expires=2**40),
        "garbage": b"{}",
        "empty": b"",
    }
    for name, ticket in cases.items():
        assert await reason(rig.call(P, pirate, ticket=ticket)) == "INVALID_TICKET", name
    wrong = rig.ticket(pirate, base_id="sha256:" + "0" * 64)
    assert await reason(rig.call(P, pirate, ticket=wrong)) == "WRONG_BASE"
    # A router may know of a share that is no more: its ticket is as good as any.
    assert await reason(rig.call(P, pirate, ticket=rig.ticket(pirate, tenant="globex"))) == "REVISION_NOT_ACTIVE"
    assert rig.peers.served == {}, "nothing was loaded for them"


async def test_a_share_that_the_executor_has_not_heard_of_yet_opens_all_the_same(rig: Rig, family) -> None:
    pirate = revision(rig, "pirate")
    await rig.answer(P, pirate)
    rig.peers.published[pirate].shared = ("globex",)
    rig.peers.epoch += 1  # nobody is told
    assert (await rig.answer(P, pirate, ticket=rig.ticket(pirate, tenant="globex"))).tokens[0] == family[1]["pirate"]


async def test_fifty_requests_share_one_load(rig: Rig, family) -> None:
    pirate = revision(rig, "pirate")
    rig.peers.hold.clear()
    calls = [asyncio.create_task(rig.answer(P, pirate, max_tokens=3)) for _ in range(50)]
    await until(lambda: rig.peers.served)
    assert (await rig.answer(P)).tokens[0] == family[1][None], "the base is served meanwhile"
    calls[3].cancel()
    rig.peers.hold.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(a, asyncio.CancelledError) for a in done) == 1
    assert all(a.tokens[0] == family[1]["pirate"][:3] for a in done if not isinstance(a, BaseException))
    assert rig.peers.served == {pirate: 1}
    await idle(rig)


async def test_a_load_that_nobody_waits_for_is_given_up(rig: Rig) -> None:
    pirate = revision(rig, "pirate")
    rig.peers.hold.clear()
    call = rig.call(P, pirate)
    waiting = asyncio.create_task(reason(call))
    await until(lambda: rig.peers.served)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not rig.service._berths._loads)
    rig.peers.hold.set()
    assert (await rig.answer(P, pirate)).started.load_ms > 0
    assert rig.peers.served[pirate] == 2


@pytest.mark.parametrize("fault", ["weights", "size", "manifest", "refused", "room"])
async def test_a_bad_load_fails_its_requests_only(rig: Rig, family, fault: str) -> None:
    pirate, terse = revision(rig, "pirate"), revision(rig, "terse")
    good = rig.peers.published[pirate]
    changed = {
        "weights": replace(good, weights=good.weights[:-1] + bytes([good.weights[-1] ^ 1])),
        "size": replace(good, weights=good.weights + b"\0"),
        "manifest": replace(good, manifest=rig.peers.published[terse].manifest),
    }
    running_base = asyncio.create_task(rig.answer(P, max_tokens=100, ignore_eos=True))
    expected = "DIGEST_MISMATCH"
    if fault == "refused":
        rig.peers.refuse = expected = "HOST_TIER_FULL"
    elif fault == "room":
        engine, expected = rig.service._device.engine, "POOL_TOO_SMALL"
        engine._adapters.page_count, engine._adapters._clean = 0, []
    else:
        rig.peers.published[pirate] = changed[fault]
    assert await reason(rig.call(P, pirate)) == expected
    assert len((await running_base).tokens[0]) == 100
    if fault != "room":
        rig.peers.refuse, rig.peers.published[pirate] = "", good
        assert (await rig.answer(P, pirate)).tokens[0] == family[1]["pirate"]
    await idle(rig)


async def test_revocation_ends_streams_and_empties_the_device(rig: Rig) -> None:
    slowly(rig)
    pirate = revision(rig, "pirate")
    stream = rig.call(P, pirate, max_tokens=200, ignore_eos=True)
    await anext(aiter(stream))
    assert [r.revision_id for r in (await rig.state()).revisions] == [pirate]
    rig.peers.published[pirate].state = State.STATE_REVOKED
    await rig.peers.tell()
    assert await reason(stream) == "REVISION_NOT_ACTIVE"
    assert list((await rig.state()).revisions) == []
    assert await reason(rig.call(P, pirate)) == "REVISION_NOT_ACTIVE"
    assert await reason(rig.stub.EnsureDevice(pb.EnsureDeviceRequest(revision_id=pirate))) == "REVISION_NOT_ACTIVE"
    await idle(rig)


async def test_revocation_stops_a_load(rig: Rig) -> None:
    pirate = revision(rig, "pirate")
    rig.peers.hold.clear()
    waiting = asyncio.create_task(reason(rig.call(P, pirate)))
    await until(lambda: rig.peers.served)
    rig.peers.published[pirate].state = State.STATE_REVOKED
    await rig.peers.tell()
    assert await waiting == "REVISION_NOT_ACTIVE"
    await until(lambda: not rig.service._berths._loads)


async def test_an_executor_that_hears_of_no_revocation_any_more_does_not_look_alive(rig: Rig, monkeypatch) -> None:
    pirate = revision(rig, "pirate")
    await rig.answer(P, pirate)

    def broken(items: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(rig.service._berths, "gone", broken)
    failed = asyncio.create_task(rig.service.failed())
    await asyncio.sleep(0)
    rig.peers.published[pirate].state = State.STATE_REVOKED
    await rig.peers.tell()
    await asyncio.wait_for(failed, 60)


async def test_a_record_that_the_registry_did_not_sign_is_not_believed(rig: Rig) -> None:
    pirate = revision(rig, "pirate")
    other = Peers()
    other.key = SigningKey.generate()
    rig.peers.published[pirate].record = rig.peers.published[revision(rig, "terse")].record
    await rig.peers.tell()
    await until(lambda: rig.service._registry._catalog.view.epoch == rig.peers.epoch)
    assert await reason(rig.call(P, pirate)) == "REVISION_NOT_ACTIVE"
    assert await reason(rig.call(P, "sha256:" + "0" * 64)) == "REVISION_NOT_ACTIVE"


async def test_a_client_that_leaves_frees_its_rows(rig: Rig) -> None:
    pirate = revision(rig, "pirate")
    streams = [rig.call(P, pirate, max_tokens=200, ignore_eos=True, n=2) for _ in range(5)]
    for stream in streams:
        await anext(aiter(stream))
        stream.cancel()
    await idle(rig)


async def test_several_answers_seeds_and_logprobs(rig: Rig) -> None:
    options = {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 2, "max_tokens": 6, "ignore_eos": True}
    one, two = await rig.answer(P, **options), await rig.answer(P, **options)
    assert one.tokens == two.tokens
    assert sorted(one.finished) == [0, 1, 2]
    assert len({tuple(t) for t in one.tokens.values()}) > 1
    assert [lp.chosen.token_id for lp in one.logprobs[1]] == one.tokens[1]
    assert all(len(lp.top) == 2 and lp.top[0].logprob >= lp.top[1].logprob for lp in one.logprobs[1])
    assert {f.finish_reason for f in one.finished.values()} == {types_pb2.FINISH_REASON_LENGTH}


async def test_a_stop_token_is_named_and_never_emitted(rig: Rig, family) -> None:
    whole = family[1][None]
    got = await rig.answer(P, stop_token_ids=[whole[4]])
    assert got.tokens[0] == whole[: whole.index(whole[4])]
    assert got.finished[0].finish_reason == types_pb2.FINISH_REASON_STOP
    assert got.finished[0].stop_token_id == whole[4]


async def test_bad_input_is_refused_with_its_reason(rig: Rig) -> None:
    cases = [
        ((), {}, "INVALID_REQUEST"),
        ((999,), {}, "INVALID_REQUEST"),
        (P, {"temperature": -1.0}, "INVALID_REQUEST"),
        (P, {"n": 17}, "INVALID_REQUEST"),
        (P, {"n": 0}, "INVALID_REQUEST"),
        (P, {"seed": -1}, "INVALID_REQUEST"),
        (P, {"priority": 11}, "INVALID_REQUEST"),
        (P, {"logprobs": 21}, "INVALID_REQUEST"),
        (P, {"max_tokens": 0}, "INVALID_REQUEST"),
        (P, {"max_tokens": 10_000}, "PROMPT_TOO_LONG"),
        (prompt_of(256), {}, "PROMPT_TOO_LONG"),
    ]
    for prompt, options, expected in cases:
        assert await reason(rig.call(prompt, **options)) == expected, (len(prompt), options)
    slowly(rig)
    for wrong in ("", "a" * 65, "a/0", "a b", "\u00e4"):
        assert await reason(rig.call(P, request_id=wrong)) == "INVALID_REQUEST", wrong
    ticket = rig.ticket()
    first = rig.call(P, ticket=ticket, request_id="r1", max_tokens=200, ignore_eos=True)
    await anext(aiter(first))
    assert await reason(rig.call(P, ticket=ticket, request_id="r1")) == "REQUEST_EXISTS", "an id is of one that runs"
    assert len((await rig.answer(P, ticket=ticket, request_id="r2", max_tokens=1)).tokens[0]) == 1
    first.cancel()
    default = await rig.answer(prompt_of(200), max_tokens=None, ignore_eos=True)
    assert len(default.tokens[0]) == 56, "what the context leaves"


async def test_the_callers_deadline_ends_the_request(rig: Rig) -> None:
    rig.peers.hold.clear()
    assert await reason(rig.call(P, revision(rig, "pirate"), timeout=0.3)) == "DEADLINE_EXCEEDED"
    await idle(rig)


async def test_ensure_device_streams_stages_and_evict_undoes_it(rig: Rig) -> None:
    pirate = revision(rig, "pirate")
    call = rig.stub.EnsureDevice(pb.EnsureDeviceRequest(revision_id=pirate))
    stages = [types_pb2.LoadStage.Name(r.stage.stage)[11:] async for r in call]
    assert stages == ["FETCH", "RESERVE", "TRANSFER", "READY"]
    again = [r.stage.stage async for r in rig.stub.EnsureDevice(pb.EnsureDeviceRequest(revision_id=pirate))]
    assert again == [types_pb2.LOAD_STAGE_READY]
    slowly(rig)
    shown = (await rig.state()).revisions[0]
    assert (shown.revision_id, shown.state, shown.lease_count, len(shown.stages)) == (pirate, "READY", 0, 4)
    stream = rig.call(P, pirate, max_tokens=200, ignore_eos=True)
    await anext(aiter(stream))
    held = await rig.stub.Evict(pb.EvictRequest(revision_id=pirate), timeout=60)
    assert (held.evicted, held.lease_count) == (False, 1)
    stream.cancel()
    await until(lambda: not rig.service._device.engine.state().residents)
    assert await reason(rig.stub.Evict(pb.EvictRequest(revision_id=pirate), timeout=60)) == "REVISION_NOT_RESIDENT"
    assert await reason(rig.stub.Evict(pb.EvictRequest(revision_id="x"), timeout=60)) == "INVALID_REQUEST"


async def test_state_counts(rig: Rig) -> None:
    state = await rig.state()
    assert (state.executor, state.base_id, state.state) == ("executor-0", rig.peers.base, "SERVING")
    assert (state.dtype, state.max_context_tokens, state.kv_used_block_count) == ("float32", 256, 0)
    assert state.pool_size_bytes > state.pool_used_bytes == 0


async def test_drain_lets_requests_end_and_refuses_more(rig: Rig) -> None:
    stream = rig.call(P, max_tokens=100, ignore_eos=True)
    await anext(aiter(stream))
    draining = rig.stub.Drain(pb.DrainRequest(), timeout=60)
    await until(lambda: rig.service._device.engine.state().draining)
    assert await reason(rig.call(P)) == "DRAINING"
    assert await reason(stream) == ""
    assert (await draining).running_count == 0
    assert (await rig.state()).state == "DRAINING"
    assert (await rig.stub.Drain(pb.DrainRequest(undrain=True), timeout=60)).running_count == 0
    assert (await rig.state()).state == "SERVING"
    assert await reason(rig.call(P)) == ""


async def test_a_drain_that_answers_at_once_leaves_what_runs(rig: Rig) -> None:
    stream = rig.call(P, max_tokens=100, ignore_eos=True)
    await anext(aiter(stream))
    await rig.stub.Drain(pb.DrainRequest(at_once=True), timeout=60)
    assert (await rig.state()).state == "DRAINING"
    assert await reason(stream) == ""


async def test_loader_away(tmp_path: Path, family) -> None:
    root, answers = family
    peers = Peers()
    pirate = peers.publish(root / "base", root / "pirate").revision_id
    async with running(tmp_path, root / "base", peers, loader_address="127.0.0.1:1") as rig:
        assert await reason(rig.call(P, pirate)) == "LOADER_UNAVAILABLE"
        assert (await rig.answer(P)).tokens[0] == answers[None]


async def test_only_a_router_may_execute(rig: Rig, tmp_path: Path) -> None:
    credentials = grpc.ssl_channel_credentials(
        (tmp_path / "ca.pem").read_bytes(),
        (tmp_path / "executor.key").read_bytes(),
        (tmp_path / "executor.pem").read_bytes(),
    )
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{rig.service.port}", credentials, options=options) as channel:
        stub = type(rig.stub)(channel)
        call = stub.Execute(pb.ExecuteRequest(ticket=rig.ticket(), prompt_token_ids=P, request_id="r1"), timeout=60)
        assert await reason(call) == "NOT_ALLOWED"
