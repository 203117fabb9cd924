"""Who may call the registry: every method with every identity."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from services.shared.access import POLICIES
from tests.contract.registry_rig import IDENTITIES, SERVICE_CA, TIMEOUT, Rig, info_of, serving, write_config

METHODS = sorted(method for method in POLICIES if method.startswith("/loraport.registry.v1."))
STREAMS = {"/loraport.registry.v1.CatalogService/Watch", "/loraport.registry.v1.RolloutService/WatchRollout"}


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        yield rig


async def call(channel: grpc.aio.Channel, method: str) -> None:
    """Calls a method with an empty request."""
    if method in STREAMS:
        stream = channel.unary_stream(method)(b"", timeout=TIMEOUT)
        async for _ in stream:
            stream.cancel()
            return
    else:
        await channel.unary_unary(method)(b"", timeout=TIMEOUT)


async def outcome(rig: Rig, identity: str, method: str) -> tuple[str, str]:
    try:
        await call(rig.channel(identity), method)
    except grpc.aio.AioRpcError as error:
        return error.code().name, info_of(error).reason
    return "OK", ""


def may_call(identity: str, method: str) -> bool:
    policy = POLICIES[method]
    return "admin" in policy.planes if identity == "admin" else "peer" in policy.planes and identity in policy.roles


async def test_every_method_refuses_every_identity_that_its_policy_does_not_name(rig: Rig) -> None:
    for method in METHODS:
        for identity in IDENTITIES:
            found = await outcome(rig, identity, method)
            if may_call(identity, method):
                assert found[1] != "NOT_ALLOWED", (method, identity)
            else:
                assert found == ("PERMISSION_DENIED", "NOT_ALLOWED"), (method, identity)


async def test_nobody_comes_in_without_a_certificate(rig: Rig) -> None:
    credentials = grpc.ssl_channel_credentials(SERVICE_CA.certificate)
    async with grpc.aio.secure_channel(rig.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, METHODS[0])
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_an_empty_request_is_a_typed_error_everywhere(rig: Rig) -> None:
    for method in METHODS:
        identity = next(identity for identity in IDENTITIES if may_call(identity, method))
        assert (await outcome(rig, identity, method))[0] not in ("INTERNAL", "UNKNOWN"), method
