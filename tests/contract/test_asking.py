"""Questions that may be asked twice, on real connections: a peer that comes back, that never does, that breaks off."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from loraport.registry.v1 import log_service_pb2 as pb
from loraport.registry.v1 import log_service_pb2_grpc as stubs
from services.shared.errors import LoraportError
from services.shared.rpc import asking
from services.shared.rpc.asking import ask_registry
from services.shared.rpc.channels import CHANNEL_OPTIONS
from services.shared.rpc.status import trailing_metadata
from tests.support.ports import free_port

GONE = "REGISTRY_UNAVAILABLE"


class Log(stubs.LogServiceServicer):
    """Answers with its count of questions, after it has failed as `failures` say."""

    def __init__(self, *failures: LoraportError | grpc.StatusCode) -> None:
        self._failures = list(failures)
        self.asked = 0

    async def GetCheckpoint(self, request: Any, context: Any) -> pb.Checkpoint:
        self.asked += 1
        if self._failures:
            failure = self._failures.pop(0)
            if isinstance(failure, LoraportError):
                code = next(code for code in grpc.StatusCode if code.value[0] == int(failure.code))
                await context.abort(code, failure.message, trailing_metadata(failure))
            await context.abort(failure, "broken off")
        return pb.Checkpoint(tree_size=self.asked)


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
async def method(address: str) -> AsyncIterator[Any]:
    # After the first refusal it waits as long as it otherwise does after some.
    waits = {f"grpc.{which}_reconnect_backoff_ms": 2_000 for which in ("initial", "min", "max")}
    options = tuple((dict(CHANNEL_OPTIONS) | waits).items())
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield stubs.LogServiceStub(channel).GetCheckpoint


async def serve(address: str, log: Log) -> grpc.aio.Server:
    server = grpc.aio.server()
    stubs.add_LogServiceServicer_to_server(log, server)
    server.add_insecure_port(address)
    await server.start()
    return server


async def reason(method: Any, timeout_s: float = 60.0) -> str:
    try:
        await ask_registry(method, pb.GetCheckpointRequest(), timeout_s=timeout_s)
    except LoraportError as error:
        return error.reason
    return ""


async def test_a_peer_that_is_back_is_not_refused_for_having_been_away(address: str, method: Any) -> None:
    for _ in range(10):
        with pytest.raises(grpc.RpcError):
            await method(pb.GetCheckpointRequest(), timeout=60)
        server = await serve(address, Log())
        try:
            told = await plain(method)
            assert await reason(method, 60.0) == ""
        finally:
            await server.stop(0)
        if told == grpc.StatusCode.UNAVAILABLE:
            return
        # The server took longer to start than the channel waits.
    raise AssertionError("no plain call was refused, so this tests nothing")


async def plain(method: Any) -> grpc.StatusCode:
    try:
        await method(pb.GetCheckpointRequest(), timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_peer_that_never_answers_is_unavailable(method: Any) -> None:
    assert await reason(method, 0.5) == GONE


@pytest.mark.parametrize(
    ("failures", "told", "asked"),
    [
        ((grpc.StatusCode.UNAVAILABLE,), "", 2),
        ((grpc.StatusCode.UNAVAILABLE,) * 2, GONE, 2),
        ((LoraportError(GONE),), "", 2),
        ((LoraportError(GONE),) * 2, GONE, 2),
        ((LoraportError("REVISION_NOT_FOUND"),), "REVISION_NOT_FOUND", 1),
        ((grpc.StatusCode.INTERNAL,), GONE, 1),
    ],
    ids=str,
)
async def test_what_breaks_off_is_asked_once_more(
    address: str, method: Any, failures: tuple[Any, ...], told: str, asked: int
) -> None:
    log = Log(*failures)
    server = await serve(address, log)
    try:
        assert await reason(method) == told
        assert log.asked == asked
    finally:
        await server.stop(0)


async def test_each_of_the_two_tries_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times, paused = [], []

    async def breaks_off(request: Any, *, timeout: float, wait_for_ready: bool, metadata: Any) -> Any:
        times.append(timeout)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def pause(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(asking.asyncio, "sleep", pause)
    assert await reason(breaks_off, 7.0) == GONE
    assert (times, paused) == ([7.0, 7.0], [asking.PAUSE_S])
