"""Calls of which one half is missing: nobody reads the answer, no message comes, or one that is none.

None of them keeps anybody else waiting, holds anything for long, is let in without its name, or is taken for a fault
of ours. Ports have no TLS here: nothing of this depends on it, and users and strangers are not known by certificates.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraport.dev.pki import make_ca
from loraport.router.v1 import inference_service_pb2 as pb
from services.shared.access import Principal
from services.shared.errors import REASONS, LoraportError
from services.shared.metrics import RPC_DURATION
from services.shared.rpc import guard
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from tests.contract.router_world import eventually
from tests.contract.test_guard import reason
from tests.support.half_client import PREFIX_BYTES, HalfClient, half_client
from tests.support.telemetry import Seen, recording

AUTHORITIES = CertificateAuthorities({"service": make_ca("service")[0], "admin": make_ca("admin")[0]})
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
HEALTH = health_pb2.HealthCheckRequest()
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
# What never ends is the failure; how long the rest takes says how busy the machine is.
HANGS_S = 60
NEVER_S = 36_000
KEY = {"authorization": "Bearer acme"}
ANSWER, MESSAGES = b"x" * 100, 3
MALFORMED = b"\xff\xff\xff\xff"
# By kind, each under the name of a method of users; a session's needs no name at the door.
METHODS = {
    "unary_unary": "/loraport.router.v1.InferenceService/CountTokens",
    "unary_stream": "/loraport.router.v1.InferenceService/Generate",
    "stream_unary": "/loraport.router.v1.InferenceService/Score",
    "stream_stream": "/loraport.router.v1.InferenceService/ReportOutcome",
}
UNARY_REQUESTS = ("unary_unary", "unary_stream")
UPLOAD = "/loraport.loader.v1.LoaderService/Upload"


async def authenticate(metadata: dict[str, str]) -> Principal:
    if metadata.get("authorization") != KEY["authorization"]:
        raise LoraportError("INVALID_CREDENTIAL")
    return Principal("user", "acme", "acme", frozenset({"generate"}))


class Behaviours:
    """One of each kind, and what became of its calls."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self.tasks: list[asyncio.Task[Any] | None] = []
        self.requests: list[pb.GenerateRequest] = []
        # The streams that were closed, and how many calls have ended in grpc's own eyes.
        self.closed = self.done = 0

    def _come(self, context: Any) -> None:
        self.tasks.append(asyncio.current_task())
        context.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self.done += 1

    async def unary_unary(self, request: pb.GenerateRequest, context: Any) -> bytes:
        self._come(context)
        self.requests.append(request)
        await asyncio.sleep(self.pause_s)
        return ANSWER

    async def unary_stream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        self._come(context)
        self.requests.append(request)
        try:
            for _ in range(MESSAGES):
                await asyncio.sleep(self.pause_s / MESSAGES)
                yield ANSWER
        finally:
            self.closed += 1

    async def stream_unary(self, requests: AsyncIterator[pb.GenerateRequest], context: Any) -> bytes:
        self.requests += [request async for request in requests]
        return ANSWER

    async def stream_stream(self, requests: AsyncIterator[pb.GenerateRequest], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            self.requests.append(request)
            yield ANSWER


class Rig:
    """A server with a behaviour of each kind."""

    def __init__(self, **settings: float) -> None:
        self.did = Behaviours()
        self.server = Server(AUTHORITIES, authenticate_user=authenticate, **settings)  # type: ignore[arg-type]
        self.server.add(self._register, self.did)
        self.port = self.server._server.add_insecure_port("127.0.0.1:0")

    def _register(self, behaviours: Behaviours, door: Any) -> None:
        for method, kind in [*((method, kind) for kind, method in METHODS.items()), (UPLOAD, "stream_unary")]:
            service, name = method.strip("/").split("/")
            handler = getattr(grpc, f"{kind}_rpc_method_handler")(
                getattr(behaviours, kind), request_deserializer=pb.GenerateRequest.FromString
            )
            door.add_registered_method_handlers(service, {name: handler})

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=OPTIONS)

    async def check(self) -> int:
        async with self.channel() as link:
            return int((await health_pb2_grpc.HealthStub(link).Check(HEALTH, timeout=HANGS_S)).status)


@contextlib.asynccontextmanager
async def running(**settings: float) -> AsyncIterator[Rig]:
    rig = Rig(**settings)
    await rig.server.start()
    try:
        yield rig
    finally:
        async with asyncio.timeout(HANGS_S):
            await rig.server.stop(0)


@contextlib.contextmanager
def no_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing inside leaves a line at ERROR, of ours or of grpc's; asyncio's are of other tests' loops."""
    caplog.clear()
    with structlog.testing.capture_logs() as ours, caplog.at_level(logging.ERROR):
        yield
    assert [line for line in ours if line["log_level"] in ("error", "critical")] == []
    lines = [record for record in caplog.records if record.levelno >= logging.ERROR and record.name != "asyncio"]
    assert [record.getMessage() for record in lines] == []


@pytest.fixture
def seen() -> Iterator[Seen]:
    with recording() as seen:
        yield seen


def codes(seen: Seen, method: str) -> dict[str, int]:
    """Returns how many calls of a method have ended, by their codes."""
    points = [(dict(labels), number) for labels, number in seen.points(RPC_DURATION).items()]
    return {labels["code"]: int(number) for labels, number in points if labels["method"] == method}


async def answered(client: HalfClient, *streams: int) -> None:
    """Waits until these calls have been answered as far as the caller lets them."""
    await eventually(lambda: client.answered.issuperset(streams))


async def never() -> AsyncIterator[bytes]:
    await asyncio.sleep(NEVER_S)
    yield b""


def silent(link: grpc.aio.Channel, method: str, key: dict[str, str] | None = None) -> Any:
    """Begins a call by its headers alone: on the wire it does not show how many messages its caller means to send."""
    call: Any = link.stream_unary(method)
    return call(never(), metadata=tuple((key or {}).items()), timeout=NEVER_S)


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """Waits for a call to fail. Returns its code and reason."""
    with pytest.raises(grpc.RpcError) as caught:
        async with asyncio.timeout(HANGS_S):
            await call
    error: Any = caught.value
    assert dict(error.trailing_metadata()), f"not a status of ours: {error.code()}"
    return error.code(), reason(error)


# Health that nobody reads.


async def test_a_watcher_that_does_not_read_keeps_nobody_waiting() -> None:
    async with running() as rig, half_client(rig.port) as deaf, rig.channel() as link:
        await answered(deaf, deaf.ask(WATCH))
        other = health_pb2_grpc.HealthStub(link).Watch(HEALTH, timeout=2 * HANGS_S)
        async with asyncio.timeout(HANGS_S):
            assert (await other.read()).status == SERVING
            await rig.server.set_serving(False)
            assert (await other.read()).status == NOT_SERVING
            assert await rig.check() == NOT_SERVING
            await rig.server.set_serving(True)
            assert (await other.read()).status == SERVING
            await rig.server.stop(0.2)


async def test_a_watcher_that_does_not_read_hears_how_it_is_now_when_it_does() -> None:
    async with running() as rig, half_client(rig.port) as late:
        stream = late.ask(WATCH)
        await answered(late, stream)
        async with asyncio.timeout(HANGS_S):
            await rig.server.set_serving(False)
        size = PREFIX_BYTES + len(health_pb2.HealthCheckResponse(status=SERVING).SerializeToString())
        late.take(stream, 100 * size)
        # What was on its way, and the news.
        await eventually(lambda: late.received[stream] == 2 * size)


async def test_a_watcher_that_does_not_read_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_ANONYMOUS_CALLS", 1)
    async with running(max_unread_s=0.5) as rig, half_client(rig.port) as deaf, rig.channel() as link:
        await answered(deaf, deaf.ask(WATCH))
        async with asyncio.timeout(HANGS_S):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await health_pb2_grpc.HealthStub(link).Watch(HEALTH).read()).status == SERVING
                    return
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["reset", "close"])
async def test_a_watcher_that_vanishes_is_no_fault(seen: Seen, caplog: pytest.LogCaptureFixture, way: str) -> None:
    with no_fault(caplog):
        async with running() as rig, half_client(rig.port) as client:
            stream = client.ask(WATCH)
            await answered(client, stream)
            client.reset(stream) if way == "reset" else client.close()
            await eventually(lambda: codes(seen, WATCH) == {"CANCELLED": 1})


async def test_checks_whose_answers_nobody_reads_leave_room_for_others() -> None:
    async with running() as rig, half_client(rig.port) as deaf:
        await answered(deaf, *(deaf.ask(CHECK) for _ in range(guard.MAX_ANONYMOUS_CALLS + 44)))
        for _ in range(5):
            assert await rig.check() == SERVING


# Calls that send their headers and no message.


async def test_silent_calls_without_a_name_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FIRST_S", NEVER_S)
    monkeypatch.setattr(guard, "MAX_ANONYMOUS_CALLS", 8)
    async with running() as rig, rig.channel() as link:
        calls = [silent(link, WATCH) for _ in range(20)]
        await eventually(lambda: sum(call.done() for call in calls) >= 12, HANGS_S)
        for call in (call for call in calls if call.done()):
            assert await outcome(call) == (grpc.StatusCode.UNAVAILABLE, "OVERLOADED")
        assert sum(not call.done() for call in calls) == 8
        for call in calls:
            call.cancel()
        async with asyncio.timeout(HANGS_S):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await health_pb2_grpc.HealthStub(link).Watch(HEALTH).read()
                    return


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_silent_calls_without_a_name_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    monkeypatch.setattr(guard, "FIRST_S", 0.3)
    with no_fault(caplog):
        async with running() as rig, rig.channel() as link:
            for call in [silent(link, method) for _ in range(guard.MAX_ANONYMOUS_CALLS + 44)]:
                assert (await outcome(call))[1] in REASONS
            monkeypatch.setattr(guard, "FIRST_S", HANGS_S)  # a message that comes has time on a busy machine
            assert await rig.check() == SERVING


@pytest.mark.parametrize("kind", UNARY_REQUESTS)
async def test_who_calls_is_asked_before_the_message(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(guard, "FIRST_S", NEVER_S)
    async with running() as rig, rig.channel() as link:
        call = silent(link, METHODS[kind])
        assert await outcome(call) == (grpc.StatusCode.UNAUTHENTICATED, "INVALID_CREDENTIAL")


@pytest.mark.parametrize("kind", UNARY_REQUESTS)
async def test_silent_calls_with_a_name_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seen: Seen, kind: str
) -> None:
    monkeypatch.setattr(guard, "FIRST_S", 0.3)
    with no_fault(caplog):
        async with running() as rig, rig.channel() as link:
            code, why = await outcome(silent(link, METHODS[kind], KEY))
            assert REASONS[why][0].name == code.name
            await eventually(lambda: codes(seen, METHODS[kind]) == {code.name: 1})
    assert rig.did.tasks == []


@pytest.mark.parametrize("kind", UNARY_REQUESTS)
async def test_once_its_message_is_there_a_call_has_time(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(guard, "FIRST_S", 2)
    async with running() as rig:
        rig.did.pause_s = 4
        assert await ask(rig, kind, b"", KEY) == [ANSWER] * (MESSAGES if kind == "unary_stream" else 1)


# Answers that nobody reads.


@pytest.mark.parametrize("kind", UNARY_REQUESTS)
async def test_an_answer_that_nobody_reads_ends_the_call(
    seen: Seen, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with no_fault(caplog):
        async with running(max_unread_s=0.5) as rig, half_client(rig.port) as deaf:
            streams = [deaf.ask(METHODS[kind], KEY | {"grpc-timeout": "9H"}) for _ in range(3)]
            await answered(deaf, *streams)
            await eventually(lambda: rig.did.done == 3, HANGS_S)
            await eventually(lambda: all(task is not None and task.done() for task in rig.did.tasks))
            assert len(rig.did.tasks) == 3
            assert rig.did.closed == (3 if kind == "unary_stream" else 0)
            assert sum(deaf.received.values()) == 0
            await eventually(lambda: sum(codes(seen, METHODS[kind]).values()) == 3)
            assert codes(seen, METHODS[kind]) == {"CANCELLED": 3}
            # The connection goes on.
            deaf.take(check := deaf.ask(CHECK), 1000)
            await eventually(lambda: deaf.received[check] > 0)


@pytest.mark.parametrize("kind", UNARY_REQUESTS)
async def test_who_reads_slowly_is_not_cut(seen: Seen, kind: str) -> None:
    async with running(max_unread_s=4) as rig, half_client(rig.port) as slow:
        stream = slow.ask(METHODS[kind], KEY | {"grpc-timeout": "9H"})
        await answered(slow, stream)
        size = PREFIX_BYTES + len(ANSWER)
        count = MESSAGES if kind == "unary_stream" else 1
        for number in range(count):
            await asyncio.sleep(2)
            slow.take(stream, size)
            await eventually(lambda now=number + 1: slow.received[stream] == now * size)  # type: ignore[misc]
        await eventually(lambda: codes(seen, METHODS[kind]) == {"OK": 1})
        await eventually(lambda: stream in slow.ended and rig.did.done == 1)


@pytest.mark.parametrize("kind", UNARY_REQUESTS)
async def test_an_answer_that_takes_long_to_make_is_not_unread(kind: str) -> None:
    async with running(max_unread_s=2) as rig:
        rig.did.pause_s = 9 if kind == "unary_stream" else 3
        assert await ask(rig, kind, b"", KEY) == [ANSWER] * (MESSAGES if kind == "unary_stream" else 1)


def test_a_minute_is_enough_to_read() -> None:
    assert inspect.signature(Server).parameters["max_unread_s"].default == guard.MAX_UNREAD_S == 60


# Messages that are none.


async def ask(rig: Rig, kind: str, message: bytes | None, key: dict[str, str], method: str = "") -> list[bytes]:
    """Makes a call with a message as it is, or with none. Returns the answers.

    In a thread: the library's asyncio client forgets what it was told where that came while it was still sending.
    """
    # A stream of none is the same on the wire as a unary call without its message.
    way = kind if message is not None else kind.replace("unary", "stream", 1)
    said: Any = iter([]) if message is None else message if way.startswith("unary") else iter([message])

    def call() -> list[bytes]:
        with grpc.insecure_channel(f"127.0.0.1:{rig.port}", OPTIONS) as link:
            answer: Any = getattr(link, way)(method or METHODS[kind])(
                said, metadata=tuple(key.items()), timeout=HANGS_S
            )
            return [answer] if way.endswith("_unary") else list(answer)

    return await asyncio.to_thread(call)


@pytest.mark.parametrize("kind", METHODS)
async def test_a_malformed_message_is_the_callers_fault(
    seen: Seen, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with no_fault(caplog):
        async with running() as rig:
            stranger = await outcome(ask(rig, kind, MALFORMED, {}))
            assert stranger == (grpc.StatusCode.UNAUTHENTICATED, "INVALID_CREDENTIAL")
            known = await outcome(ask(rig, kind, MALFORMED, KEY))
            assert known == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
            await eventually(lambda: codes(seen, METHODS[kind]) == {"UNAUTHENTICATED": 1, "INVALID_ARGUMENT": 1})
            assert rig.did.requests == []
            assert await ask(rig, kind, b"", KEY)


@pytest.mark.parametrize("method", [UPLOAD, CHECK, WATCH])
async def test_a_malformed_message_of_nobody_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture, method: str) -> None:
    kind = {UPLOAD: "stream_unary", CHECK: "unary_unary", WATCH: "unary_stream"}[method]
    with no_fault(caplog):
        async with running() as rig:
            told = await outcome(ask(rig, kind, MALFORMED, {}, method))
    assert told == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


@pytest.mark.parametrize("kind", UNARY_REQUESTS)
async def test_no_message_at_all_is_malformed_too(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    with no_fault(caplog):
        async with running() as rig:
            stranger = await outcome(ask(rig, kind, None, {}))
            assert stranger == (grpc.StatusCode.UNAUTHENTICATED, "INVALID_CREDENTIAL")
            known = await outcome(ask(rig, kind, None, KEY))
            assert known == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert rig.did.tasks == []
