"""What every call passes before its handler: who calls, whether that is allowed, and until when.

The method must have a policy, the caller is authenticated on the plane of that policy and authorized, a unary call must
carry a deadline. A `LoraportError` leaves with its reason; any other exception leaves as INTERNAL with an incident id
and is logged whole.

The guard is put around a handler once, when it is registered: grpc is never given one that has none, and makes nothing
anew for each call as it does for an interceptor. Grpc takes every method for one that streams both ways, which is the
same on the wire: else it would wait for a unary call's message before anybody is asked who calls, and for its answer to
be read, both for ever.
"""

import asyncio
import contextvars
import inspect
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from opentelemetry.trace import INVALID_SPAN, Span
from structlog.contextvars import STRUCTLOG_KEY_PREFIX

from services.shared import metrics, telemetry, tracing
from services.shared.access import POLICIES, Principal, authorize
from services.shared.errors import LoraportError
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.status import clip, grpc_code, trailing_metadata
from services.shared.stall import Stall

log = structlog.get_logger()

REQUEST_ID_KEY = "x-request-id"
REQUEST_ID_LENGTH = 64
ANONYMOUS = Principal("session", "anonymous", "anonymous")
ANONYMOUS_PLANES = frozenset({"health", "session"})

# Calls that need no credential of their own go on at a time, of each method.
MAX_ANONYMOUS_CALLS = 256
# How long the one message of a call may take to come, and each message to be taken by its caller, seconds.
FIRST_S, MAX_UNREAD_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of its call besides the request."""

    principal: Principal
    request_id: str
    method: str


_CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("loraport_call")
# What `structlog.contextvars.bind_contextvars(request_id=…)` sets, without looking for it at every call.
_LOGGED_REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar(f"{STRUCTLOG_KEY_PREFIX}request_id")
_KINDS = ("unary", "stream")

UserAuthenticator = Callable[[dict[str, str]], Awaitable[Principal]]
# Hears of calls that are refused before their handler; an anonymous principal was not authenticated.
RefusalListener = Callable[[Call, LoraportError], None]


def log_as(request_id: str) -> None:
    """Log lines of the running task carry this id from now on."""
    _LOGGED_REQUEST_ID.set(request_id[:REQUEST_ID_LENGTH])


def current_call() -> Call:
    """Returns the call that the running handler serves. Raises LookupError outside a handler."""
    return _CALL.get()


class Guard:
    """Authenticates, authorizes and translates errors; see the module's text."""

    def __init__(
        self,
        authorities: CertificateAuthorities,
        authenticate_user: UserAuthenticator | None = None,
        on_refused: RefusalListener | None = None,
        *,
        max_unread_s: float = MAX_UNREAD_S,
    ) -> None:
        self._authorities = authorities
        self._max_unread_s = max_unread_s
        self._authenticate_user = authenticate_user
        self._on_refused = on_refused
        self._anonymous = Counter[str]()

    def wrap(self, method: str, handler: Any) -> Any:
        """Returns the handler that is served in the place of `handler`: its behaviour behind all that is asked here.

        A behaviour is a coroutine function, or of a method that streams an async generator of responses.

        Raises:
            KeyError: the method has no policy.
            TypeError: the behaviour streams by writing to the context, where nobody would watch whether it is read.
        """
        kind = f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"
        behaviour = getattr(handler, kind)
        if handler.response_streaming and inspect.iscoroutinefunction(behaviour):
            raise TypeError(f"{method} streams and is no generator")
        return grpc.stream_stream_rpc_method_handler(
            self._guarded(_Door.of(method, handler), behaviour),
            request_deserializer=_parsing(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, door: "_Door", behaviour: Callable[[Any, Any], Any]) -> Any:
        once = inspect.iscoroutinefunction(behaviour)

        async def call(messages: AsyncIterator[Any], context: Any) -> None:
            seen = Seen(door.method)
            try:
                with self._place(door):
                    seen.span = await self._admit(door, context)
                    request = messages if door.request_streaming else await _first(context)
                    if not once:
                        await self._send(door, behaviour(request, context), context)
                        return
                    answer = await behaviour(request, context)
                # It takes no place while it waits to be read: else unread ones would take those of everybody's probes.
                await self._send(door, _once(answer), context)
            except grpc.aio.AbortError:
                raise
            except _NotSent:
                seen.code = "CANCELLED"
                raise asyncio.CancelledError from None  # of what else reaches it grpc logs a traceback
            except Exception as error:
                await _abort(context, seen.failed(error))
            except (asyncio.CancelledError, GeneratorExit):
                seen.code = "CANCELLED"
                raise
            finally:
                seen.ended()

        return call

    async def _send(self, door: "_Door", responses: Any, context: Any) -> None:
        """Sends what an async generator yields, as long as its caller reads. However that ends, the generator has ended
        before the call does; none is left for the garbage collector."""
        # Grpc cannot be made to tell a caller that it was cut: a peer that was stopped for a while and goes on would
        # wait for the catalog's next change for ever. So peers are waited for.
        limit_s = math.inf if door.certified else self._max_unread_s
        unread = Stall(limit_s, asyncio.current_task().cancel)  # type: ignore[union-attr]
        try:
            async for response in responses:
                unread.begin()
                try:
                    await context.write(response)
                except grpc.aio.BaseError as error:
                    raise _NotSent from error
                unread.end()
        finally:
            unread.close()
            await responses.aclose()

    @contextmanager
    def _place(self, door: "_Door") -> Iterator[None]:
        """Counts a call that anybody may make, while it goes on. Raises LoraportError (OVERLOADED)."""
        if door.anonymous is None:
            yield
            return
        if self._anonymous[door.method] >= MAX_ANONYMOUS_CALLS:
            raise LoraportError("OVERLOADED", "too many calls of this kind are going on", retry_after_s=1.0)
        self._anonymous[door.method] += 1
        try:
            yield
        finally:
            self._anonymous[door.method] -= 1

    async def _admit(self, door: "_Door", context: Any) -> Span:
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        request_id = metadata.get(REQUEST_ID_KEY, "")[:REQUEST_ID_LENGTH] or os.urandom(16).hex()
        principal = ANONYMOUS
        try:
            principal = await self._authenticate(door, metadata, context)
            authorize(door.method, principal)
            _CALL.set(Call(principal, request_id, door.method))
            log_as(request_id)
            if door.needs_deadline and context.time_remaining() is None:
                raise LoraportError("DEADLINE_REQUIRED")
        except LoraportError as error:
            if self._on_refused is not None:
                self._on_refused(Call(principal, request_id, door.method), error)
            raise
        return tracing.enter(door.method, metadata, request_id=request_id, trusted=door.certified)

    async def _authenticate(self, door: "_Door", metadata: dict[str, str], context: Any) -> Principal:
        if door.anonymous is not None:
            return door.anonymous
        if door.certified:
            return self._authorities.principal(context.auth_context())
        if self._authenticate_user is None:
            raise LoraportError("NOT_ALLOWED")
        return await self._authenticate_user(metadata)


@dataclass(frozen=True, slots=True)
class _Door:
    """What a method asks of every call: all that is known of it before one comes."""

    method: str
    # Who calls where nobody has to say who it is; None elsewhere.
    anonymous: Principal | None
    # Callers are known by their certificates, and not by what their metadata says.
    certified: bool
    needs_deadline: bool
    request_streaming: bool

    @classmethod
    def of(cls, method: str, handler: Any) -> "_Door":
        planes = POLICIES[method].planes
        anonymous = None
        if "user" not in planes and planes & ANONYMOUS_PLANES:
            anonymous = Principal(next(iter(planes)), "anonymous", "anonymous")
        return cls(
            method,
            anonymous,
            certified="user" not in planes and anonymous is None,
            needs_deadline=not (handler.request_streaming or handler.response_streaming or "health" in planes),
            request_streaming=handler.request_streaming,
        )


class _NotSent(Exception):
    """A message found no way out: its caller has left, or the server has stopped."""


async def _first(context: Any) -> Any:
    """Returns the one message of a call. Raises LoraportError: it does not come, or is none."""
    try:
        async with asyncio.timeout(FIRST_S):
            message = await context.read()
    except TimeoutError:
        raise LoraportError("DEADLINE_EXCEEDED", f"no message came within {FIRST_S:g} s") from None
    if message is grpc.aio.EOF:
        raise LoraportError("INVALID_REQUEST", "the call has no message")
    return message


async def _once(answer: Any) -> AsyncIterator[Any]:
    yield answer


def _parsing(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Makes a deserializer whose refusal is a caller's fault like any other."""
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise LoraportError("INVALID_REQUEST", "the message is malformed") from None

    return parsed


class Seen:
    """What is told of one call when it has ended: its time and code, and its span if it has one."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.code = "OK"
        self.span: Span = INVALID_SPAN
        self._began = time.monotonic()

    def failed(self, error: Exception) -> LoraportError:
        """Returns what the caller is told of an error; of one that no code of ours raised on purpose, nothing."""
        if isinstance(error, NotImplementedError):
            error = LoraportError("NOT_IMPLEMENTED")
        if not isinstance(error, LoraportError):
            incident = os.urandom(6).hex()
            log.error("unexpected failure", method=self.method, incident=incident, exc_info=error)
            error = LoraportError("INTERNAL", f"internal error, incident {incident}", metadata={"incident": incident})
        self.code = error.code.name
        self.span.set_attribute("reason", error.reason)
        return error

    def ended(self) -> None:
        if self.span is not INVALID_SPAN:
            self.span.set_attribute("code", self.code)
            self.span.end()
        took_s = time.monotonic() - self._began
        telemetry.observe(metrics.RPC_DURATION, took_s, method=self.method, code=self.code)


async def _abort(context: Any, error: LoraportError) -> None:
    """Ends the call with the status of `error`."""
    await context.abort(grpc_code(error.code), clip(error.message), trailing_metadata(error))
