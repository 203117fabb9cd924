"""Clients that are half there, slow, oversized or gone without a word; those that behave are served meanwhile."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from services.router import service
from tests.contract.router_world import SERVICE_CA, World, api_key, eventually

SILENT, SLOW, HALF_CALLS, OVERSIZED = 100, 30, 150, 30
GENERATE = "/loraport.router.v1.InferenceService/Generate"
KEY = (("authorization", f"Bearer {api_key('acme')}"),)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    # A peer that does not answer is gone after seconds here, after forty in earnest. One that does has the time to.
    quick = {"keepalive_time_ms": 1000, "http2.ping_timeout_ms": 4000, "server_handshake_timeout_ms": 8000}
    options = tuple((dict(service.OPEN_DOOR) | {f"grpc.{name}": value for name, value in quick.items()}).items())
    monkeypatch.setattr(service, "OPEN_DOOR", options)
    world = World(tmp_path)
    world.registry.items += [world.registry.base()]
    for tenant in ("acme", "globex"):
        world.registry.items += [*world.registry.tenant(tenant), *world.registry.adapter(tenant, "pirate")]
    await world.start_registry()
    await world.start_executor("e0")
    await world.start_router()
    await eventually(lambda: world.router._fleet.view().serves("tiny"))
    yield world
    await world.stop()


def channel(port: int) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 30_000)]
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


async def drip(port: int) -> None:
    """Speaks TLS and HTTP/2, one byte at a time, and never asks for anything."""
    context = ssl.create_default_context(cadata=SERVICE_CA[0].decode())
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    with contextlib.suppress(OSError):
        for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * 4:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.5)
    writer.close()


async def never() -> AsyncIterator[bytes]:
    await asyncio.sleep(3600)
    yield b""


async def test_well_behaved_clients_are_served_in_a_flood(world: World) -> None:
    port = world.router.user_port
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(SILENT)]
    slow = [asyncio.create_task(drip(port)) for _ in range(SLOW)]
    async with channel(port) as bad, world.client("globex") as good:
        half = [bad.stream_stream(GENERATE)(never(), metadata=KEY) for _ in range(HALF_CALLS)]
        refused = 0
        for number in range(OVERSIZED):
            big = pb.GenerateRequest(target=pb.Target(adapter="pirate"), prompt="x" * (2 << 20)).SerializeToString()
            call = bad.unary_stream(GENERATE)
            metadata = KEY if number % 2 else (*KEY, ("x-padding", "p" * (64 << 10)))
            with pytest.raises(grpc.RpcError):
                async for _ in call(big if number % 2 else b"", metadata=metadata, timeout=60):
                    pass
            refused += 1
            # Each of them is served while all of that is going on.
            if number % 3 == 0:
                assert (await good.generate("the quick", adapter="pirate", max_tokens=2)).token_ids
        assert refused == OVERSIZED
        # A caller on the flooding connection's tenant is served too: half a call takes no place.
        async with world.client() as same:
            assert (await same.generate("the quick", adapter="pirate", max_tokens=2)).token_ids
        for call in half:
            call.cancel()
    # Who never said hello is shown the door.
    async with asyncio.timeout(60):
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert world.executors["e0"].running == 0


class SilentProxy:
    """Passes bytes until it is told to go silent; then it keeps both connections and moves nothing: a cut cable."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self._open.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)
                await sink.drain()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        self._server.close()


async def test_a_caller_behind_a_cut_cable_gives_its_place_back(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = [50] * 60, 2.0
    proxy = SilentProxy(world.router.user_port)
    port = await proxy.start()
    try:
        async with channel(port) as link:
            request = pb.GenerateRequest(target=pb.Target(adapter="pirate"), prompt="the")
            call = stubs.InferenceServiceStub(link).Generate(request, metadata=KEY, timeout=120)
            assert (await call.read()).events[0].HasField("started")
            assert executor.running == 1
            proxy.cut()
            # The answer would go on for two minutes.
            await eventually(lambda: executor.running == 0)
            assert executor.cancelled == 1
            call.cancel()
    finally:
        await proxy.stop()
