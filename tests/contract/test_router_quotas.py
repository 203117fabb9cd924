"""Quotas at a real router: refused before anything is looked up, counted, shown, shared."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from loraport import ResourceExhaustedError
from loraport.registry.v1 import catalog_service_pb2 as cpb
from loraport.registry.v1.tenant_service_pb2 import TenantQuota
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from loraport.router.v1 import router_admin_service_pb2 as apb
from loraport.router.v1 import router_admin_service_pb2_grpc as admin_stubs
from tests.contract.router_world import SERVICE_CA, World, api_key, digest, eventually

PIRATE = digest("acme/pirate/1")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.registry.items += [
        world.registry.base(),
        *world.registry.tenant("acme"),
        *world.registry.tenant("globex"),
        *world.registry.adapter("acme", "pirate"),
        *world.registry.adapter("acme", "cold"),
        *world.registry.adapter("acme", "colder"),
        *world.registry.adapter("globex", "other"),
    ]
    await world.start_registry()
    await world.start_executor("e0", resident=[PIRATE])
    await world.start_router()
    await eventually(lambda: world.router._fleet.view().serves("tiny"))
    yield world
    await world.stop()


async def limit(world: World, tenant: str = "acme", **limits: int) -> None:
    item = cpb.CatalogTenant(tenant=tenant, weight=1.0, base_allowed=True, quota=TenantQuota(**limits))
    await world.put(cpb.CatalogItem(tenant=item))
    assert world.router._catalog.view.tenants[tenant].quota.given() == limits


async def usage(world: World, tenant: str = "acme") -> apb.QuotaUsage:
    certificate, key = world.leaf("admin/ops")
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{world.router.admin_port}", credentials) as channel:
        request = apb.GetQuotaUsageRequest(tenant=f"tenants/{tenant}")
        return await admin_stubs.RouterAdminServiceStub(channel).GetQuotaUsage(request, timeout=60)


def line(shown: apb.QuotaUsage, quota: str) -> apb.QuotaLine:
    return next(row for row in shown.quotas if row.quota == quota)


async def none_in_flight(world: World) -> None:
    """Waits until every call has been given up; a caller that leaves does not wait for that itself."""
    async with asyncio.timeout(60):
        while line(await usage(world), "in_flight_count").used:
            await asyncio.sleep(0.01)


async def test_a_refusal_is_typed_and_comes_before_any_look_at_names(world: World) -> None:
    await limit(world, requests_per_minute=1)
    async with world.client() as client:
        await client.generate("x", adapter="pirate")
    targets = [
        pb.Target(adapter="pirate"),
        pb.Target(adapter="nothing"),
        pb.Target(adapter="tenants/globex/adapters/other"),
        pb.Target(revision_id=digest("globex/other/1")),
        pb.Target(adapter="x", base_model="contradiction"),
    ]
    seen = set()
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])
    async with grpc.aio.secure_channel(f"127.0.0.1:{world.router.user_port}", credentials) as channel:
        stub = stubs.InferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {api_key('acme')}"),)
        for target in targets:
            with pytest.raises(grpc.RpcError) as caught:
                async for _ in stub.Generate(
                    pb.GenerateRequest(target=target, prompt="x"), timeout=60, metadata=metadata
                ):
                    pass
            status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
            seen.add((caught.value.code(), caught.value.details(), len(status.details)))
        for method, request in (
            (stub.Score, pb.ScoreRequest(target=targets[1])),
            (stub.CountTokens, pb.CountTokensRequest(target=targets[1], prompt="x")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await method(request, timeout=60, metadata=metadata)
            seen.add((caught.value.code(), caught.value.details(), 3))
    assert seen == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "the quota requests_per_minute of 1 is used up", 3)}
    found = {name: getattr(error_details_pb2, name)() for name in ("ErrorInfo", "QuotaFailure", "RetryInfo")}
    assert all(any(detail.Unpack(kind) for detail in status.details) for kind in found.values())
    assert found["QuotaFailure"].violations[0].subject == "tenants/acme"
    assert 0 < found["RetryInfo"].retry_delay.seconds <= 60
    # Another tenant does not notice, and the admin sees what was used and refused.
    async with world.client("globex") as client:
        await client.generate("x", adapter="other")
    shown = await usage(world)
    row = line(shown, "requests_per_minute")
    assert (row.limit, row.used, row.total, row.refused_count) == (1, 1, 1, 7)
    assert not line(shown, "tokens_per_minute").HasField("limit")
    assert [use.key for use in shown.keys] == [api_key("acme").split("_")[1]]
    assert (shown.router_count, shown.shared) == (1, True)


async def test_calls_at_a_time_and_that_wait(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = [50] * 40, 0.5
    await limit(world, in_flight_count=1)
    async with world.client() as client:
        stream = client.stream("the", adapter="pirate", max_tokens=40)
        await anext(stream)
        with pytest.raises(ResourceExhaustedError, match="in_flight_count"):
            await client.generate("x", adapter="pirate")
        assert line(await usage(world), "in_flight_count").used == 1
        await stream.aclose()
        await eventually(lambda: executor.running == 0)
        await none_in_flight(world)
        executor.reply, executor.pause_s = [50, 51], 0.0
        assert (await client.generate("the", adapter="pirate", max_tokens=2)).token_ids
        await limit(world, queued_count=0)
        with pytest.raises(ResourceExhaustedError, match="queued_count"):
            await client.generate("x", adapter="pirate")
    shown = await usage(world)
    assert (line(shown, "in_flight_count").used, line(shown, "queued_count").used) == (0, 0)


async def test_calls_that_fail_or_are_left_are_not_in_flight(world: World) -> None:
    await limit(world, in_flight_count=2)
    async with world.client() as client:
        for _ in range(6):
            with pytest.raises(Exception, match="ADAPTER_NOT_FOUND"):
                await client.generate("x", adapter="nothing")
        world.executors["e0"].pause_s = 60.0
        for _ in range(3):
            task = asyncio.create_task(client.generate("x", adapter="pirate"))
            await eventually(lambda: world.executors["e0"].running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: world.executors["e0"].running == 0)
            await none_in_flight(world)


async def test_tokens_of_prompts_and_answers_count(world: World) -> None:
    prompt = world.ids("the quick brown fox")
    await limit(world, tokens_per_minute=len(prompt) + 3)
    async with world.client() as client:
        await client.generate("the quick brown fox", adapter="pirate", max_tokens=3)
        assert line(await usage(world), "tokens_per_minute").total == len(prompt) + 3
        with pytest.raises(ResourceExhaustedError, match="tokens_per_minute") as caught:
            await client.generate("x", adapter="pirate")
    assert caught.value.retry_after > 0


async def test_cold_loads_and_bytes_in_use(world: World) -> None:
    await limit(world, cold_loads_per_minute=1)
    async with world.client() as client:
        await client.generate("x", adapter="cold")
        with pytest.raises(ResourceExhaustedError, match="cold_loads_per_minute"):
            await client.generate("x", adapter="colder")
        # What is on a device needs no load; a name that is not the tenant's is still not there.
        await client.generate("x", adapter="pirate")
        with pytest.raises(Exception, match="ADAPTER_NOT_FOUND"):
            await client.generate("x", adapter="tenants/globex/adapters/other")
        await limit(world, resident_bytes=15)
        world.executors["e0"].reply, world.executors["e0"].pause_s = [50] * 40, 0.5
        stream = client.stream("the", adapter="pirate", max_tokens=40)
        await anext(stream)
        with pytest.raises(ResourceExhaustedError, match="resident_bytes"):
            await client.generate("x", adapter="cold")
        assert line(await usage(world), "resident_bytes").used == 10
        await stream.aclose()


async def test_only_admins_see_usage_of_tenants_that_are_there(world: World) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await usage(world, "nobody")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
