"""One way to serve gRPC: limits, identity, access policy, deadlines, errors, health, drain.

Every call passes `Guard` before its handler: the method must have a policy, the caller is authenticated on the plane
of that policy and authorized, a unary call must carry a deadline. A `LoraportError` leaves with its reason; any other
exception leaves as INTERNAL with an incident id and is logged whole.
"""

import asyncio
import contextvars
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from opentelemetry.trace import INVALID_SPAN, Span

from services.shared import metrics, telemetry, tracing
from services.shared.access import POLICIES, Principal, authorize, require_policies
from services.shared.errors import LoraportError
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.status import clip, grpc_code, trailing_metadata

log = structlog.get_logger()

MAX_CONTROL_BYTES = 1 << 20
REQUEST_ID_KEY = "x-request-id"
REQUEST_ID_LENGTH = 64
ANONYMOUS = Principal("session", "anonymous", "anonymous")

# Milliseconds and counts. so_reuseport is off, else a second process could take the port unnoticed.
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_CONTROL_BYTES + (1 << 16)),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # grpc waits for the answer to a keepalive ping as long as for that to any ping: a minute if this is not set.
    ("grpc.http2.ping_timeout_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of its call besides the request."""

    principal: Principal
    request_id: str
    method: str


_CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("loraport_call")

UserAuthenticator = Callable[[dict[str, str]], Awaitable[Principal]]
# Hears of calls that are refused before their handler; an anonymous principal was not authenticated.
RefusalListener = Callable[[Call, LoraportError], None]


def current_call() -> Call:
    """Returns the call that the running handler serves. Raises LookupError outside a handler."""
    return _CALL.get()


class Guard(grpc.aio.ServerInterceptor):
    """Authenticates, authorizes and translates errors; see the module's text."""

    def __init__(
        self,
        authorities: CertificateAuthorities,
        authenticate_user: UserAuthenticator | None = None,
        on_refused: RefusalListener | None = None,
    ) -> None:
        self._authorities = authorities
        self._authenticate_user = authenticate_user
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method not in POLICIES:
            return None  # grpc answers UNIMPLEMENTED
        metadata = {key: value for key, value in details.invocation_metadata if isinstance(value, str)}
        kind = "stream" if handler.response_streaming else "unary"
        behaviour = getattr(handler, f"{'stream' if handler.request_streaming else 'unary'}_{kind}")
        wrap = self._streaming if handler.response_streaming else self._unary
        make = getattr(grpc, f"{'stream' if handler.request_streaming else 'unary'}_{kind}_rpc_method_handler")
        return make(
            wrap(behaviour, details.method, metadata),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, behaviour: Any, method: str, metadata: dict[str, str]) -> Any:
        async def call(request: Any, context: Any) -> Any:
            seen = _Seen(method)
            try:
                seen.span = await self._admit(
                    method, metadata, context, needs_deadline=not hasattr(request, "__aiter__")
                )
                result = behaviour(request, context)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                await _abort(context, seen.failed(error))
            except asyncio.CancelledError:
                seen.code = "CANCELLED"
                raise
            finally:
                seen.ended()

        return call

    def _streaming(self, behaviour: Any, method: str, metadata: dict[str, str]) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            seen = _Seen(method)
            try:
                seen.span = await self._admit(method, metadata, context, needs_deadline=False)
                result = behaviour(request, context)
                if inspect.isawaitable(result):  # it writes to the context, as grpc's own health service does
                    await result
                    return
                async for response in result:
                    yield response
            except Exception as error:
                await _abort(context, seen.failed(error))
            except (asyncio.CancelledError, GeneratorExit):
                seen.code = "CANCELLED"
                raise
            finally:
                seen.ended()

        return call

    async def _admit(self, method: str, metadata: dict[str, str], context: Any, *, needs_deadline: bool) -> Span:
        request_id = metadata.get(REQUEST_ID_KEY, "")[:REQUEST_ID_LENGTH] or uuid.uuid4().hex
        principal = ANONYMOUS
        try:
            principal = await self._authenticate(method, metadata, context)
            authorize(method, principal)
            _CALL.set(Call(principal, request_id, method))
            structlog.contextvars.bind_contextvars(request_id=request_id)
            if needs_deadline and principal.plane != "health" and context.time_remaining() is None:
                raise LoraportError("DEADLINE_REQUIRED")
        except LoraportError as error:
            if self._on_refused is not None:
                self._on_refused(Call(principal, request_id, method), error)
            raise
        trusted = principal.plane in ("peer", "admin")
        return tracing.enter(method, metadata, request_id=request_id, trusted=trusted)

    async def _authenticate(self, method: str, metadata: dict[str, str], context: Any) -> Principal:
        planes = POLICIES[method].planes
        if "user" in planes:
            if self._authenticate_user is None:
                raise LoraportError("NOT_ALLOWED")
            return await self._authenticate_user(metadata)
        if planes & {"health", "session"}:
            return Principal(next(iter(planes)), "anonymous", "anonymous")
        return self._authorities.principal(context.auth_context())


class _Seen:
    """What is told of one call when it has ended: its time and code, and its span if it has one."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.code = "OK"
        self.span: Span = INVALID_SPAN
        self._began = time.monotonic()

    def failed(self, error: Exception) -> Exception:
        """Returns what the caller is told of an error; of one that no code of ours raised on purpose, nothing."""
        if isinstance(error, grpc.aio.AbortError):
            return error
        if isinstance(error, NotImplementedError):
            error = LoraportError("NOT_IMPLEMENTED")
        if not isinstance(error, LoraportError):
            incident = uuid.uuid4().hex[:12]
            log.error("unexpected failure", method=self.method, incident=incident, exc_info=error)
            error = LoraportError("INTERNAL", f"internal error, incident {incident}", metadata={"incident": incident})
        self.code = error.code.name
        self.span.set_attribute("reason", error.reason)
        return error

    def ended(self) -> None:
        self.span.set_attribute("code", self.code)
        self.span.end()
        took_s = time.monotonic() - self._began
        telemetry.observe(metrics.RPC_DURATION, took_s, method=self.method, code=self.code)


async def _abort(context: Any, error: Exception) -> None:
    """Ends the call with the status of `error`."""
    if not isinstance(error, LoraportError):
        raise error
    await context.abort(grpc_code(error.code), clip(error.message), trailing_metadata(error))


class Server:
    """A gRPC server with health and graceful drain."""

    def __init__(
        self,
        authorities: CertificateAuthorities,
        *,
        authenticate_user: UserAuthenticator | None = None,
        on_refused: RefusalListener | None = None,
        options: tuple[tuple[str, int], ...] = (),
    ) -> None:
        # Each option once: which of two counts is grpc's own affair.
        wanted = {**dict(SERVER_OPTIONS), **dict(options)}
        self._server = grpc.aio.server(
            interceptors=[Guard(authorities, authenticate_user, on_refused)], options=list(wanted.items())
        )
        self._authorities = authorities
        self._health = HealthServicer()
        self._methods: list[str] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, register: Callable[[Any, Any], None], servicer: Any) -> None:
        """Registers a servicer with its generated `add_…_to_server`."""
        register(servicer, _MethodRecorder(self._server, self._methods))

    def listen(self, address: str, *, key: bytes, certificate: bytes, clients: bool) -> int:
        """Binds an address with TLS and returns the port; `clients` asks for a certificate of one of the CAs.

        Raises:
            OSError: the address is taken or not ours.
        """
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], self._authorities.bundle if clients else None, require_client_auth=clients
        )
        try:
            port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(f"cannot listen on {address}: the port is taken or the address is not of this machine")
        return int(port)

    async def start(self, *, serving: bool = True) -> None:
        """Checks that every method has a policy and starts serving; health says what `serving` says."""
        require_policies(self._methods)
        await self.set_serving(serving)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets what the health service answers."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", state)

    async def stop(self, grace_s: float) -> None:
        """Says NOT_SERVING, accepts nothing new, lets running calls end for `grace_s` seconds, then cuts them."""
        await self.set_serving(False)
        started = time.monotonic()
        await self._server.stop(grace_s)
        log.info("server stopped", drain_s=round(time.monotonic() - started, 3))

    async def wait(self) -> None:
        """Waits until the server has stopped."""
        # Cancelling grpc's own wait would cancel the shutdown that `stop` waits for.
        await asyncio.shield(self._server.wait_for_termination())


class _MethodRecorder:
    """Stands in for the server while a servicer registers, and notes the full method names."""

    def __init__(self, server: Any, methods: list[str]) -> None:
        self._server = server
        self._methods = methods

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        # Not passed on: grpc keeps a task waiting for each registered method and looks through all of them at every
        # call. The same handlers are found by their names.
        self._methods.extend(f"/{service}/{method}" for method in handlers)


async def run_blocking(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs blocking work (SQL, files, hashing) in a thread, with the call's context."""
    return await asyncio.to_thread(function, *arguments)
