"""Who gets what from a real router: keys, hiding, freshness, the admin plane, and starting with nothing up."""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraport import InvalidArgumentError, NotFoundError, UnauthenticatedError, UnavailableError
from loraport.bundle.envelope import SigningKey
from loraport.registry.v1 import catalog_service_pb2 as cpb
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from loraport.router.v1 import router_admin_service_pb2 as apb
from loraport.router.v1 import router_admin_service_pb2_grpc as admin_stubs
from services.executor.many import Events
from services.router import admin_servicer
from services.router.placement import choose
from tests.contract.router_world import PEPPER, SERVICE_CA, World, api_key, digest, eventually

PIRATE = digest("acme/pirate/1")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.registry.items += [
        world.registry.base(),
        *world.registry.tenant("acme"),
        *world.registry.tenant("globex", base_allowed=False),
        *world.registry.adapter("acme", "pirate"),
    ]
    await world.start_registry()
    await world.start_executor("e0", resident=[PIRATE])
    await world.start_router()
    await eventually(lambda: world.router._catalog.view.synced)
    await eventually(lambda: world.router._fleet.view().serves("tiny"))
    yield world
    await world.stop()


def user_channel(world: World) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(f"127.0.0.1:{world.router.user_port}", grpc.ssl_channel_credentials(SERVICE_CA[0]))


async def failure(call) -> tuple:
    """Returns everything that the caller can see of a failed call."""
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in call:
            pass
    error = caught.value
    return error.code(), error.details(), tuple(error.initial_metadata()), tuple(error.trailing_metadata())


async def test_unknown_foreign_hidden_and_malformed_are_the_same_bytes(world: World) -> None:
    foreign_shared = world.registry.revision("acme", "later", state="VERIFIED", shared=("globex",))
    await world.put(cpb.CatalogItem(revision=foreign_shared))
    targets = {
        "unknown adapter": pb.Target(adapter="nothing"),
        "foreign adapter": pb.Target(adapter="pirate"),
        "foreign adapter by alias": pb.Target(adapter="pirate", alias="prod"),
        "unknown alias": pb.Target(adapter="nothing", alias="beta"),
        "empty adapter": pb.Target(adapter=""),
        "other case": pb.Target(adapter="Pirate"),
        "no name at all": pb.Target(adapter="../../etc/passwd"),
        "unknown revision": pb.Target(revision_id=digest("nothing")),
        "foreign revision": pb.Target(revision_id=PIRATE),
        "shared but not active": pb.Target(revision_id=foreign_shared.revision_id),
        "no revision id": pb.Target(revision_id="sha256:zz"),
        "base that the tenant may not use": pb.Target(),
        "unknown base": pb.Target(base_model="nothing"),
    }
    seen = {}
    async with user_channel(world) as channel:
        stub = stubs.InferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {api_key('globex')}"),)
        for name, target in targets.items():
            request = pb.GenerateRequest(target=target, prompt="x")
            seen[name] = await failure(stub.Generate(request, timeout=60, metadata=metadata))
    assert len(set(seen.values())) == 1, seen
    assert next(iter(seen.values()))[0] == grpc.StatusCode.NOT_FOUND
    assert not world.executors["e0"].requests


async def test_get_adapter_hides_the_same_way(world: World) -> None:
    async with world.client("globex") as client:
        errors = []
        for name in ("tenants/acme/adapters/pirate", "tenants/globex/adapters/pirate", "tenants/nobody/adapters/x"):
            with pytest.raises(NotFoundError) as caught:
                await client.get_adapter(name)
            errors.append((str(caught.value), caught.value.metadata))
    assert errors.count(errors[0]) == 3


async def test_a_miss_makes_the_view_as_new_as_the_registry(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(NotFoundError):
            await client.generate("x", adapter="fresh")
        # The change is on its way while the request arrives.
        world.registry.held = True
        await world.registry.put(*world.registry.adapter("acme", "fresh"))
        asyncio.get_running_loop().call_later(0.5, lambda: asyncio.ensure_future(world.registry.release()))
        done = await client.generate("x", adapter="fresh")
        assert done.revision_id == digest("acme/fresh/1")
        # The same goes for a key.
        await world.registry.put(*world.registry.tenant("initech"))
    async with world.client("initech") as client:
        assert await client.list_adapters() == []


async def test_a_shared_revision_is_used_by_its_id(world: World) -> None:
    shared = world.registry.revision("acme", "common", shared=("globex",))
    await world.put(cpb.CatalogItem(revision=shared))
    async with world.client("globex") as client:
        assert (await client.generate("x", revision_id=shared.revision_id)).revision_id == shared.revision_id
    assert world.executors["e0"].requests[0][0].tenant == "globex"


async def test_a_record_that_the_registry_did_not_sign_never_serves(world: World) -> None:
    await world.put(*world.registry.adapter("acme", "forged", signed_by=SigningKey.generate()))
    async with world.client() as client:
        with pytest.raises(Exception, match="REVISION_NOT_ACTIVE"):
            await client.generate("x", adapter="forged")
    assert not world.executors["e0"].requests


async def test_keys_that_do_not_open_the_door(world: World) -> None:
    good = api_key("acme")
    revoked, expired, listing = api_key("acme", 1), api_key("acme", 2), api_key("acme", 3)
    for secret, change in (
        (revoked, {"revoked": True}),
        (expired, {"expire_time": {"seconds": 1}}),
        (listing, {"scopes": ["list"]}),
    ):
        item = world.registry.tenant("acme")[1]
        key = cpb.CatalogKey(**change)
        item.key.key_id = secret.split("_")[1]
        item.key.secret_hmac = _hmac(secret)
        if change.get("scopes"):
            del item.key.scopes[:]
        item.key.MergeFrom(key)
        await world.put(item)
    wrong = good[:-1] + ("a" if good[-1] != "a" else "b")
    bad = {"wrong": wrong, "revoked": revoked, "expired": expired, "unknown": api_key("nobody"), "no key": "hello"}
    answers = set()
    for key in bad.values():
        async with world.client(key=key) as client:
            with pytest.raises(UnauthenticatedError) as caught:
                await client.generate("x")
            answers.add(str(caught.value))
    assert answers == {"INVALID_CREDENTIAL: The credential is missing, malformed, expired or revoked."}
    async with world.client(key=listing) as client:
        assert [adapter.adapter for adapter in await client.list_adapters()] == ["pirate"]
        with pytest.raises(Exception, match="NOT_ALLOWED"):
            await client.generate("x")


def _hmac(secret: str) -> bytes:
    return hmac.new(PEPPER, secret.encode(), hashlib.sha256).digest()


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_a_running_stream_ends_with_its_key(world: World, end: str) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = [50] * 60, 0.2
    item = world.registry.tenant("acme")[1]
    async with user_channel(world) as channel:
        metadata = (("authorization", f"Bearer {api_key('acme')}"),)
        request = pb.GenerateRequest(target=pb.Target(adapter="pirate"), prompt="the")
        call = stubs.InferenceServiceStub(channel).Generate(request, metadata=metadata, timeout=60)
        with pytest.raises(grpc.RpcError) as ended:
            async for response in call:
                if response.events[0].HasField("started"):
                    if end == "revoked":
                        item.key.revoked = True
                    else:
                        item.key.expire_time.FromSeconds(1)
                    await world.registry.put(item)
    assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED
    await eventually(lambda: executor.running == 0)


@pytest.mark.parametrize("at_once", [True, False])
async def test_what_has_happened_is_told_in_one_message(
    world: World, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.at_once = [50, 51], at_once
    read, answer = asyncio.Event(), executor._answer

    async def one_by_one(*given: Any) -> AsyncIterator[Events]:
        count = 0
        async for events in answer(*given):
            if count == 1 and not at_once:
                await read.wait()
            count += 1
            yield events

    monkeypatch.setattr(executor, "_answer", one_by_one)
    async with user_channel(world) as channel:
        metadata = (("authorization", f"Bearer {api_key('acme')}"),)
        request = pb.GenerateRequest(target=pb.Target(adapter="pirate"), prompt="the")
        call = stubs.InferenceServiceStub(channel).Generate(request, metadata=metadata, timeout=60)
        told = []
        async for response in call:
            told.append([event.WhichOneof("event") for event in response.events])
            read.set()
    if at_once:
        assert told == [["started", "tokens", "tokens", "finished"]]
    else:
        # Nobody waits for a second token to be told of the first.
        assert told[0] == ["started", "tokens"]
        assert [event for message in told[1:] for event in message] == ["tokens", "finished"]


async def test_listing_pages_and_their_tokens(world: World) -> None:
    for number in range(5):
        await world.put(*world.registry.adapter("acme", f"a{number}"))
    await world.put(*world.registry.adapter("globex", "own"))
    async with user_channel(world) as channel:
        stub = stubs.InferenceServiceStub(channel)
        acme, globex = ((("authorization", f"Bearer {api_key(name)}"),) for name in ("acme", "globex"))
        names, token = [], ""
        while True:
            request = pb.ListAdaptersRequest(page_size=2, page_token=token)
            page = await stub.ListAdapters(request, timeout=60, metadata=acme)
            names += [adapter.name.rsplit("/", 1)[-1] for adapter in page.adapters]
            stolen, token = token, page.next_page_token
            if not token:
                break
        assert names == ["a0", "a1", "a2", "a3", "a4", "pirate"]
        for forged in (stolen, stolen[:-4] + "AAAA", "x"):
            with pytest.raises(grpc.RpcError) as caught:
                await stub.ListAdapters(pb.ListAdaptersRequest(page_token=forged), timeout=60, metadata=globex)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    async with world.client() as client:
        adapter = await client.get_adapter("pirate")
        assert [(a.alias, a.revision_id, a.version) for a in adapter.aliases] == [("prod", PIRATE, 1)]
        assert (await client.count_tokens("the quick")).token_count == len(world.ids("the quick"))
        with pytest.raises(InvalidArgumentError):
            await client.count_tokens("")


async def test_the_admin_plane_shows_and_drains(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = world.leaf("admin/ops")
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
    async with (
        grpc.aio.secure_channel(f"127.0.0.1:{world.router.admin_port}", credentials) as channel,
        world.client() as client,
    ):
        stub = admin_stubs.RouterAdminServiceStub(channel)
        await client.generate("x y z", adapter="pirate")
        residency = await stub.ListResidency(apb.ListResidencyRequest(), timeout=60)
        (executor,) = residency.executors
        (held,) = executor.revisions
        assert (executor.executor, executor.serving, held.revision_id) == ("e0", True, PIRATE)
        assert (held.adapter, held.version, held.state) == ("tenants/acme/adapters/pirate", 1, "READY")
        fairness = await stub.GetFairness(apb.GetFairnessRequest(), timeout=60)
        assert [(work.tenant, work.decode_ms > 0, work.prefill_ms > 0) for work in fairness.tenants] == [
            ("tenants/acme", True, True)
        ]
        assert fairness.bound_ms > 0
        assert not (await stub.ListQueues(apb.ListQueuesRequest(), timeout=60)).queues
        wishes = []
        monkeypatch.setattr(
            admin_servicer, "choose", lambda view, wish, prices: wishes.append(wish) or choose(view, wish, prices)
        )
        heavy = cpb.CatalogItem(tenant=cpb.CatalogTenant(tenant="acme", weight=3.0, base_allowed=True))
        await world.registry.put(heavy)
        await eventually(lambda: world.router._catalog.view.tenants["acme"].weight == 3.0)
        before = world.router._clock.monotonic()
        explained = await stub.ExplainPlacement(apb.ExplainPlacementRequest(revision_id=PIRATE), timeout=60)
        assert (wishes[0].tenant, wishes[0].weight, wishes[0].now >= before) == ("acme", 3.0, True)
        assert (explained.executor, explained.candidates[0].reasons[-1]) == ("e0", "revision is resident: 0 ms")
        drained = await stub.DrainExecutor(apb.DrainExecutorRequest(executor="e0"), timeout=60)
        assert not drained.serving
        with pytest.raises(UnavailableError):
            await client.generate("x", adapter="pirate")
        assert (await stub.DrainExecutor(apb.DrainExecutorRequest(executor="e0", undrain=True), timeout=60)).serving
        assert (await client.generate("x", adapter="pirate")).executor == "e0"
        with pytest.raises(grpc.RpcError, match="No such executor"):
            await stub.DrainExecutor(apb.DrainExecutorRequest(executor="e9"), timeout=60)


async def test_a_router_starts_with_nothing_up_and_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.registry.items += [world.registry.base(), *world.registry.tenant("acme")]
    await world.start_registry()
    await world.start_executor("e0")
    await world.stop_server("e0")
    await world.stop_server("registry")
    world.overrides = {"valkey_url": "redis://127.0.0.1:1"}
    await world.start_router()
    try:
        async with world.client() as client:
            with pytest.raises(UnavailableError) as caught:
                await client.generate("x")
            assert caught.value.reason == "REGISTRY_UNAVAILABLE"
            await world.start_registry()
            await eventually(lambda: world.router._catalog.view.synced)
            with pytest.raises(UnavailableError) as caught:
                await client.generate("x")
            assert caught.value.reason == "EXECUTOR_UNAVAILABLE"
            await world.start_executor("e0")
            await eventually(lambda: world.router._fleet.view().serves("tiny"))
            assert (await client.generate("x")).executor == "e0"
            # The registry goes away again: what is known keeps serving.
            await world.stop_server("registry")
            assert (await client.generate("x")).executor == "e0"
            with pytest.raises(NotFoundError):
                await client.generate("x", adapter="unknown")
    finally:
        await world.stop()


async def test_another_tokenizer_than_the_registered_one_is_not_served(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.registry.items += [world.registry.base(), *world.registry.tenant("acme")]
    await world.start_registry()
    await world.start_executor("e0")
    tokenizer = tmp_path / "base" / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    await world.start_router()
    try:
        await eventually(lambda: world.router._catalog.view.synced)
        async with world.client() as client:
            with pytest.raises(UnavailableError, match="not served here"):
                await client.generate("x")
    finally:
        await world.stop()


async def test_a_router_whose_background_work_died_does_not_look_alive(world: World) -> None:
    failing = asyncio.create_task(world.router.failed())
    await asyncio.sleep(0)
    assert not failing.done()

    async def explode(timeout_s: float) -> None:
        raise RuntimeError("a bug")

    world.router._fleet.executor("e0").state = explode
    await asyncio.wait_for(failing, 60)
