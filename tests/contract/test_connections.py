"""What whoever can reach a port may hold there: so many connections, for so long, and so many calls without a name."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraport.dev.pki import make_ca, make_leaf
from services.shared.rpc import guard
from services.shared.rpc import server as serving
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from tests.contract.router_world import eventually
from tests.contract.test_guard import reason

SERVICE_CA, ADMIN_CA = make_ca("service"), make_ca("admin")
HEALTH = health_pb2.HealthCheckRequest()
# Nothing is closed for being slow or old unless a test says so.
PATIENT = {"server_handshake_timeout_ms": 600_000, "max_connection_idle_ms": 600_000}


@contextlib.asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, **options: int) -> AsyncIterator[list[str]]:
    """Runs a server with a port for strangers and one for peers, and yields their addresses."""
    changed = {f"grpc.{name}": value for name, value in (PATIENT | options).items()}
    monkeypatch.setattr(serving, "SERVER_OPTIONS", tuple((dict(serving.SERVER_OPTIONS) | changed).items()))
    server = Server(CertificateAuthorities({"service": SERVICE_CA[0], "admin": ADMIN_CA[0]}))
    certificate, key = make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/loader")
    ports = [
        server.listen("127.0.0.1:0", key=key, certificate=certificate, clients=clients) for clients in (False, True)
    ]
    await server.start()
    yield [f"127.0.0.1:{port}" for port in ports]
    await server.stop(0)


def channel(address: str) -> grpc.aio.Channel:
    certificate, key = make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/router")
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
    return grpc.aio.secure_channel(address, credentials, options=[("grpc.use_local_subchannel_pool", 1)])


async def check(address: str) -> bool:
    async with channel(address) as link:
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await health_pb2_grpc.HealthStub(link).Check(HEALTH, timeout=60)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False


async def come(condition: Callable[[], object]) -> None:
    await eventually(condition, 300)


async def test_strangers_fill_their_own_port_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)
    async with running(monkeypatch) as (strangers, peers):
        host, port = strangers.split(":")
        silent = [await asyncio.open_connection(host, port) for _ in range(10)]
        ends = [asyncio.create_task(reader.read(1)) for reader, _ in silent]
        await come(lambda: sum(end.done() for end in ends) == 6)
        assert await check(peers)
        assert not await check(strangers)
        assert sum(end.done() for end in ends) == 6, "those that were let in stay"
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)
        async with asyncio.timeout(300):
            while not await check(strangers):
                await asyncio.sleep(0.05)


async def test_calls_without_a_name_are_few_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_ANONYMOUS_CALLS", 2)
    async with running(monkeypatch) as (address, _), channel(address) as link:
        stub = health_pb2_grpc.HealthStub(link)
        watches = [stub.Watch(HEALTH) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(HEALTH).read()
        assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.UNAVAILABLE, "OVERLOADED")
        for _ in range(5):
            assert await check(address), "other calls go on, and those that have ended do not count"
        watches[0].cancel()
        async with asyncio.timeout(300):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.Watch(HEALTH).read()
                    return


async def test_a_connection_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, max_connection_idle_ms=1000) as (_, peers), channel(peers) as link:
        await health_pb2_grpc.HealthStub(link).Check(HEALTH, timeout=60)
        await come(lambda: link.get_state() != grpc.ChannelConnectivity.READY)


async def test_no_connection_is_for_ever_and_its_calls_have_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    age = {"max_connection_age_ms": 200, "max_connection_age_grace_ms": 200}
    async with running(monkeypatch, **age) as (_, peers), channel(peers) as link:
        watch = health_pb2_grpc.HealthStub(link).Watch(HEALTH)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in watch:
                pass
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(300):
            while not await check(peers):  # the next one is as good, for as long
                pass


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(1024, 256), (16_384, 4096), (10**6, 4096), (resource.RLIM_INFINITY, 4096)]
)
def test_connections_leave_descriptors_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert serving.most_connections() == connections
