"""Whatever is registered is served behind the guard, in every kind of call and in no other way."""

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraport.dev.pki import make_ca, make_leaf
from services.shared.errors import LoraportError
from services.shared.metrics import RPC_DURATION
from services.shared.rpc import guard
from services.shared.rpc import server as serving
from services.shared.rpc.guard import Call, Guard
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from tests.contract.test_guard import reason
from tests.support.telemetry import Seen, recording

SERVICE_CA, ADMIN_CA = make_ca("service"), make_ca("admin")
AUTHORITIES = CertificateAuthorities({"service": SERVICE_CA[0], "admin": ADMIN_CA[0]})
ADMIN = make_leaf(ADMIN_CA, uri="spiffe://loraport.local/admin/ops")
PEER = make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/router")
SERVICE = "loraport.registry.v1.TenantService"
SECRET = "prompt of a tenant"


class Behaviours:
    """One of each kind. A request says what happens: it is answered, refused, breaks, or waits for ever."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.ended: list[str] = []
        self.logged: list[dict[str, Any]] = []

    async def _do(self, name: str, request: bytes) -> bytes:
        self.ran.append(name)
        # What is put into every line of a log, see `telemetry.setup`.
        self.logged.append(dict(structlog.contextvars.merge_contextvars(None, "", {})))
        if request == b"refuse":
            raise LoraportError("TENANT_NOT_FOUND")
        if request == b"break":
            raise RuntimeError(SECRET)
        if request == b"wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.append(name)
        return request

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        return await self._do("unary_unary", request)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return await self._do("stream_unary", b"".join([request async for request in requests]))

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self._do("unary_stream", request)

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        async for request in requests:
            yield await self._do("stream_stream", request)


# Each under the name of a method that admins may call.
METHODS = {
    "unary_unary": "CreateTenant",
    "stream_unary": "GetTenant",
    "unary_stream": "ListTenants",
    "stream_stream": "SetTenantQuota",
}


def handler(behaviours: Behaviours, name: str) -> Any:
    return getattr(grpc, f"{name}_rpc_method_handler")(getattr(behaviours, name))


def by_name(handlers: dict[str, Any]) -> Callable[[Any, Any], None]:
    return lambda _, server: server.add_registered_method_handlers(SERVICE, handlers)


def by_generic(handlers: dict[str, Any]) -> Callable[[Any, Any], None]:
    generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
    return lambda _, server: server.add_generic_rpc_handlers((generic,))


REGISTERING = {"add_registered_method_handlers": by_name, "add_generic_rpc_handlers": by_generic}


class Running:
    """A server with one port that asks for certificates and one that does not."""

    def __init__(self) -> None:
        self.refused: list[tuple[Call, str]] = []
        self.server = Server(AUTHORITIES, on_refused=lambda call, error: self.refused.append((call, error.reason)))
        certificate, key = make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/registry")
        self._ports = {
            clients: self.server.listen("127.0.0.1:0", key=key, certificate=certificate, clients=clients)
            for clients in (False, True)
        }

    def channel(self, leaf: tuple[bytes, bytes] | None) -> grpc.aio.Channel:
        certificate, key = leaf or (None, None)
        credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(f"127.0.0.1:{self._ports[leaf is not None]}", credentials, options=options)

    async def ask(
        self,
        kind: str,
        leaf: tuple[bytes, bytes] | None,
        request: bytes = b"x",
        timeout: float | None = 60,
        **rest: Any,
    ) -> list[bytes]:
        """Makes a call of this kind and returns the responses."""
        async with self.channel(leaf) as link:
            call = begin(link, kind, request, timeout=timeout, **rest)
            return [await call] if kind.endswith("_unary") else [response async for response in call]


def begin(link: grpc.aio.Channel, kind: str, request: bytes, **rest: Any) -> Any:
    call = getattr(link, kind)(f"/{SERVICE}/{METHODS[kind]}")
    return call([request] if kind.startswith("stream") else request, **rest)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    running = Running()
    yield running
    await running.server.stop(0)


@pytest.fixture
def seen() -> Iterator[Seen]:
    with recording() as seen:
        yield seen


async def codes(seen: Seen, count: int) -> list[str]:
    """Returns the codes of so many calls once they have all ended, which is after their callers know."""
    async with asyncio.timeout(300):
        while True:
            found = seen.points(RPC_DURATION).items()
            ended = sorted(dict(labels)["code"] for labels, number in found for _ in range(int(number)))
            if len(ended) >= count:
                return ended
            await asyncio.sleep(0.01)


async def refusal(asked: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked
    return caught.value.code(), reason(caught.value)


def test_grpc_has_no_other_way_to_register() -> None:
    ways = {name for name in dir(grpc.aio.Server) if name.startswith("add_") and not name.endswith("_port")}
    assert ways == set(REGISTERING)


@pytest.mark.parametrize("way", REGISTERING)
@pytest.mark.parametrize("kind", METHODS)
async def test_no_way_of_registering_leads_past_the_guard(running: Running, way: str, kind: str) -> None:
    behaviours = Behaviours()
    register = REGISTERING[way]({METHODS[kind]: handler(behaviours, kind)})
    if way == "add_generic_rpc_handlers":
        with pytest.raises(ValueError, match="by its name"):
            running.server.add(register, None)
    else:
        running.server.add(register, None)
    await running.server.start()
    for leaf in (None, PEER):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.ask(kind, leaf)
        assert caught.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
    assert behaviours.ran == []


async def test_both_ways_at_once_are_one(running: Running) -> None:
    """As generated code registers."""
    behaviours = Behaviours()
    handlers = {METHODS["unary_unary"]: handler(behaviours, "unary_unary")}

    def register(_: Any, server: Any) -> None:
        by_generic(handlers)(None, server)
        by_name(handlers)(None, server)

    running.server.add(register, None)
    await running.server.start()
    assert await refusal(running.ask("unary_unary", None)) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED")
    assert behaviours.ran == []
    assert await running.ask("unary_unary", ADMIN) == [b"x"]


async def test_a_method_without_a_policy_is_never_served(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviours = Behaviours()
    running.server.add(by_name({"DropEverything": handler(behaviours, "unary_unary")}), None)
    with pytest.raises(ValueError, match="DropEverything"):
        await running.server.start()
    monkeypatch.setattr(serving, "require_policies", lambda _: None)
    await running.server.start()
    async with running.channel(ADMIN) as link:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.unary_unary(f"/{SERVICE}/DropEverything")(b"", timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert behaviours.ran == []


async def test_health_is_what_its_policies_say(running: Running) -> None:
    await running.server.start()
    async with running.channel(None) as link:
        stub = health_pb2_grpc.HealthStub(link)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.List(health_pb2.HealthListRequest(), timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", METHODS)
async def test_every_kind_of_behaviour_is_guarded(running: Running, seen: Seen, kind: str) -> None:
    behaviours = Behaviours()
    running.server.add(by_name({METHODS[kind]: handler(behaviours, kind)}), None)
    await running.server.start()
    for leaf in (None, PEER):
        assert await refusal(running.ask(kind, leaf)) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED")
    assert behaviours.ran == []
    first = [] if kind.endswith("_unary") else [b"first"]
    assert await running.ask(kind, ADMIN) == [*first, b"x"]
    if kind == "unary_unary":
        assert (await refusal(running.ask(kind, ADMIN, timeout=None)))[1] == "DEADLINE_REQUIRED"
    else:
        assert await running.ask(kind, ADMIN, timeout=None) == [*first, b"x"]
    assert [reason for _, reason in running.refused] == ["NOT_ALLOWED"] * 2 + ["DEADLINE_REQUIRED"] * (
        kind == "unary_unary"
    )
    assert {call.method for call, _ in running.refused} == {f"/{SERVICE}/{METHODS[kind]}"}
    assert await refusal(running.ask(kind, ADMIN, b"refuse")) == (grpc.StatusCode.NOT_FOUND, "TENANT_NOT_FOUND")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.ask(kind, ADMIN, b"break")
    assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "incident" in str(caught.value.details())
    assert SECRET not in caught.value.debug_error_string()
    late = "INVALID_ARGUMENT" if kind == "unary_unary" else "OK"
    assert await codes(seen, 6) == sorted(["PERMISSION_DENIED"] * 2 + ["OK", late, "NOT_FOUND", "INTERNAL"])


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
def test_what_streams_without_being_watched_is_not_served(running: Running, kind: str) -> None:
    async def writer(request: Any, context: Any) -> None:
        await context.write(b"first")

    made = getattr(grpc, f"{kind}_rpc_method_handler")(writer)
    with pytest.raises(TypeError, match="is no generator"):
        running.server.add(by_name({METHODS[kind]: made}), None)


@pytest.mark.parametrize("kind", METHODS)
async def test_a_caller_that_leaves_ends_the_behaviour(running: Running, seen: Seen, kind: str) -> None:
    behaviours = Behaviours()
    running.server.add(by_name({METHODS[kind]: handler(behaviours, kind)}), None)
    await running.server.start()
    async with running.channel(ADMIN) as link:
        call = begin(link, kind, b"wait", timeout=600)
        async with asyncio.timeout(300):
            while not behaviours.ran:
                await asyncio.sleep(0.01)
        call.cancel()
        assert await codes(seen, 1) == ["CANCELLED"]
    assert behaviours.ended == [kind]


async def test_log_lines_carry_the_request_id(running: Running) -> None:
    behaviours = Behaviours()
    running.server.add(by_name({METHODS["unary_unary"]: handler(behaviours, "unary_unary")}), None)
    await running.server.start()
    await running.ask("unary_unary", ADMIN, metadata=((guard.REQUEST_ID_KEY, "mine" * 20), ("secret-bin", b"\x00")))
    for _ in range(2):
        await running.ask("unary_unary", ADMIN)
    given, *made = [logged.get("request_id", "") for logged in behaviours.logged]
    assert given == ("mine" * 20)[: guard.REQUEST_ID_LENGTH]
    assert [len(bytes.fromhex(text)) for text in made] == [16, 16]
    assert len(set(made)) == 2
    assert "request_id" not in structlog.contextvars.get_contextvars()


class Broken(types.SimpleNamespace):
    """The context of an admin's call whose messages find no way out."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_spiffe_id": [b"spiffe://loraport.local/admin/ops"], "x509_pem_cert": [ADMIN[0]]}

    async def read(self) -> bytes:
        return b""

    async def write(self, message: bytes) -> None:
        raise self.error


async def send_in_vain(error: BaseException) -> list[str]:
    """Sends into a broken call; returns what became of the generator."""
    told: list[str] = []

    async def behaviour(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            told.append("went on")
        finally:
            await asyncio.sleep(0)
            told.append("closed")

    wrapped = Guard(AUTHORITIES).wrap(f"/{SERVICE}/ListTenants", grpc.unary_stream_rpc_method_handler(behaviour))
    with pytest.raises(asyncio.CancelledError):
        await wrapped.stream_stream(None, Broken(error=error))
    return told


class Slow(Broken):
    """One that takes its time for each message."""

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0.3)


async def test_a_caller_with_a_certificate_is_waited_for(seen: Seen) -> None:
    """It would not hear that it was cut, and wait for ever: a peer that was stopped for a while hears of everything."""

    async def behaviour(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield b"second"

    handler = grpc.unary_stream_rpc_method_handler(behaviour)
    await Guard(AUTHORITIES, max_unread_s=0.05).wrap(f"/{SERVICE}/ListTenants", handler).stream_stream(None, Slow())
    assert await codes(seen, 1) == ["OK"]


@pytest.mark.parametrize("error", [grpc.aio.InternalError("the connection broke"), asyncio.CancelledError()])
async def test_what_cannot_be_sent_is_no_fault_and_ends_the_generator_at_once(seen: Seen, error: BaseException) -> None:
    with structlog.testing.capture_logs() as logs:
        assert await send_in_vain(error) == ["closed"]
    assert (await codes(seen, 1), logs) == (["CANCELLED"], [])


async def test_a_message_that_is_none_is_a_bug_of_ours(running: Running) -> None:
    async def behaviour(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""

    def serializer(_: bytes) -> bytes:
        raise TypeError(SECRET)

    made = grpc.unary_stream_rpc_method_handler(behaviour, response_serializer=serializer)
    running.server.add(by_name({"ListTenants": made}), None)
    await running.server.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.ask("unary_stream", ADMIN)
    assert reason(caught.value) == "INTERNAL"
    assert SECRET not in caught.value.debug_error_string()
