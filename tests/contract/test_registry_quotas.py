"""Quotas that the registry keeps, and how it tells the others; keys that replace each other."""

import hashlib
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2

from loraport.registry.v1 import key_service_pb2 as key_pb
from loraport.registry.v1 import tenant_service_pb2 as pb
from loraport.registry.v1.catalog_service_pb2 import WatchRequest
from services.shared.catalog_client import from_proto
from services.shared.quotas import MAX_LIMIT, NAMES, Quota
from tests.contract.registry_rig import (
    PEPPER,
    TIMEOUT,
    Rig,
    info_of,
    manifest,
    reason_of,
    serving,
    status_of,
    write_config,
)


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        yield rig


async def set_quota(rig: Rig, tenant: str, **limits: int) -> pb.Tenant:
    request = pb.SetTenantQuotaRequest(name=f"tenants/{tenant}", quota=pb.TenantQuota(**limits))
    return await rig.tenants().SetTenantQuota(request, timeout=TIMEOUT)


async def told(rig: Rig, kind: str) -> list[Any]:
    """What a watcher hears of a kind in the full state."""
    found = []
    async for part in rig.catalog().Watch(WatchRequest(), timeout=TIMEOUT):
        found += [from_proto(item) for item in part.items if item.WhichOneof("item") == kind]
        if part.synced:
            return found
    raise AssertionError("no full state")


async def test_quotas_are_set_whole_and_told_to_peers(rig: Rig) -> None:
    assert tuple(pb.TenantQuota.DESCRIPTOR.fields_by_name) == NAMES
    made = await rig.tenant("acme", quota=pb.TenantQuota(requests_per_minute=5))
    assert (made.quota.requests_per_minute, made.quota.HasField("tokens_per_minute")) == (5, False)
    everything = {name: index for index, name in enumerate(NAMES)}
    changed = await set_quota(rig, "acme", **everything)
    assert changed.quota == pb.TenantQuota(**everything)
    assert [tenant.quota for tenant in await told(rig, "tenant")] == [Quota(**everything)]
    assert (await set_quota(rig, "acme", tokens_per_minute=7)).quota == pb.TenantQuota(tokens_per_minute=7)
    # 0 is a limit, unset is none: the two are told apart all the way.
    await set_quota(rig, "acme", queued_count=0)
    assert (await told(rig, "tenant"))[0].quota == Quota(queued_count=0)
    assert (await set_quota(rig, "acme")).quota == pb.TenantQuota()


@pytest.mark.parametrize("limit", [-1, MAX_LIMIT + 1])
async def test_quotas_are_in_range(rig: Rig, limit: int) -> None:
    await rig.tenant("acme")
    assert await reason_of(set_quota(rig, "acme", stored_bytes=limit)) == "INVALID_REQUEST"
    assert await reason_of(rig.tenant("globex", quota=pb.TenantQuota(in_flight_count=limit))) == "INVALID_REQUEST"
    assert await reason_of(set_quota(rig, "nobody", stored_bytes=1)) == "TENANT_NOT_FOUND"


async def usage(rig: Rig, tenant: str) -> tuple[int, int]:
    found = await rig.tenants().GetTenant(pb.GetTenantRequest(name=f"tenants/{tenant}"), timeout=TIMEOUT)
    return found.usage.adapter_count, found.usage.stored_bytes


async def test_adapters_and_stored_bytes_are_counted_and_refused(rig: Rig) -> None:
    await rig.base()
    await rig.tenant("acme")
    await rig.tenant("globex")
    await set_quota(rig, "acme", adapter_count=1, stored_bytes=9000)
    await rig.register("acme", manifest("acme", "bot", 1, content="a", size=4096))
    assert await usage(rig, "acme") == (1, 4096)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.register("acme", manifest("acme", "other", 1, content="b", size=10))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert info_of(refused.value).reason == "QUOTA_EXCEEDED"
    assert info_of(refused.value).metadata["quota"] == "adapter_count"
    failure = error_details_pb2.QuotaFailure()
    assert any(detail.Unpack(failure) for detail in status_of(refused.value).details)
    assert [violation.subject for violation in failure.violations] == ["tenants/acme"]
    # More versions of the adapter that is there are not more adapters.
    second = manifest("acme", "bot", 2, content="c", size=4096)
    await rig.register("acme", second)
    third = manifest("acme", "bot", 3, content="d", size=1000)
    assert await reason_of(rig.register("acme", third)) == "QUOTA_EXCEEDED"
    assert await reason_of(rig.register("acme", third, validate_only=True)) == "QUOTA_EXCEEDED"
    # The same content again takes the place of its earlier announcement, so it needs no room.
    await rig.register("acme", manifest("acme", "bot", 4, content="c", size=4096))
    # Content whose bytes failed is not kept.
    await rig.admit(manifest("acme", "bot", 4, content="c", size=4096), admitted=False)
    assert await usage(rig, "acme") == (1, 4096)
    await rig.register("acme", manifest("acme", "bot", 5, content="d", size=1000))
    assert await usage(rig, "acme") == (1, 5096)
    # Nobody else notices.
    await rig.register("globex", manifest("globex", "bot", 1, content="a", size=1 << 20))


async def make_key(rig: Rig, **settings: Any) -> key_pb.CreateApiKeyResponse:
    request = key_pb.CreateApiKeyRequest(parent="tenants/acme", api_key=key_pb.ApiKey(**settings))
    return await rig.keys().CreateApiKey(request, timeout=TIMEOUT)


async def rotate(rig: Rig, name: str, overlap_s: int = 0) -> key_pb.RotateApiKeyResponse:
    request = key_pb.RotateApiKeyRequest(name=name, overlap=Duration(seconds=overlap_s))
    return await rig.keys().RotateApiKey(request, timeout=TIMEOUT)


async def test_a_key_is_replaced_and_ends_after_the_overlap(rig: Rig) -> None:
    await rig.tenant("acme")
    end = Timestamp(seconds=4_000_000_000)
    old = await make_key(rig, scopes=["list"], expire_time=end)
    done = await rotate(rig, old.api_key.name, 3600)
    assert done.secret != old.secret
    assert (list(done.api_key.scopes), done.api_key.expire_time) == (["list"], end)
    assert done.replaced.name == old.api_key.name
    left = done.replaced.expire_time.seconds - done.api_key.create_time.seconds
    assert abs(left - 3600) <= 1
    keys = {item.key_id: item for item in await told(rig, "key")}
    new = keys[done.api_key.name.rsplit("/", 1)[1]]
    assert new.secret_hmac == hmac.digest(PEPPER, done.secret.encode(), hashlib.sha256)
    assert keys[old.api_key.name.rsplit("/", 1)[1]].expires == pytest.approx(done.replaced.expire_time.seconds, abs=1)


async def test_rotation_never_lengthens_a_keys_life(rig: Rig) -> None:
    await rig.tenant("acme")
    first = await rotate(rig, (await make_key(rig)).api_key.name, 100)
    again = await rotate(rig, first.replaced.name, 3600)
    assert again.replaced.expire_time == first.replaced.expire_time
    # Without an overlap it is dead at once, and what is dead is not replaced.
    at_once = await rotate(rig, first.api_key.name)
    assert at_once.replaced.expire_time.seconds <= at_once.api_key.create_time.seconds
    assert await reason_of(rotate(rig, first.api_key.name)) == "INVALID_STATE"
    await rig.keys().RevokeApiKey(key_pb.RevokeApiKeyRequest(name=at_once.api_key.name), timeout=TIMEOUT)
    assert await reason_of(rotate(rig, at_once.api_key.name, 5)) == "INVALID_STATE"
    assert await reason_of(rotate(rig, "tenants/acme/keys/0000000000")) == "KEY_NOT_FOUND"
    for overlap in (-1, 31 * 24 * 3600):
        assert await reason_of(rotate(rig, again.api_key.name, overlap)) == "INVALID_REQUEST"
