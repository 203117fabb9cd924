"""Every request to one executor over one stream, which is opened when it is wanted and renewed in good time.

    begin ──> parts ──> its end            cancelled, out of time, or the stream breaks: nothing more is heard of it

A caller that is slow to read is nobody else's affair: what it has not taken stays here up to a few parts, then the
executor is asked to hold it back. The other half, and why there is one stream, is `services/executor/many.py`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial
from itertools import count
from typing import Any

import grpc
import structlog
from google.protobuf.empty_pb2 import Empty

from loraport.executor.v1 import executor_service_pb2 as pb
from services.shared.errors import LoraportError
from services.shared.rpc.batches import some_of
from services.shared.rpc.server import MAX_CONTROL_BYTES
from services.shared.rpc.status import from_rpc_error, from_status

# A stream takes no new request at this age. A connection that has reached its own age ends in `GRACE_S` of
# `services.shared.rpc.server`: by then the last request of a stream on it has to be over too.
MAX_AGE_S = 240.0
# How long an executor that has told everything may take to end the request.
END_S = 1.0
# Parts that nobody has taken, from which on an executor is asked to hold a request back.
HOLD_AT = 16
# What one message asks at most, but for a single request of up to MAX_CONTROL_BYTES: at a larger message executors end
# the stream.
MAX_ITEMS, MAX_BYTES = 64, 1 << 19

log = structlog.get_logger()

Item = pb.ExecuteManyRequest.Item
Events = list[pb.ExecuteResponse.Event]


def _gone() -> LoraportError:
    return LoraportError("EXECUTOR_UNAVAILABLE", "the executor ended the stream early", retry_after_s=1.0)


class Link:
    """`open_stream` begins a call of `ExecuteMany`. Belongs to one event loop."""

    def __init__(self, open_stream: Callable[[], Any], *, max_age_s: float = MAX_AGE_S) -> None:
        self._open_stream = open_stream
        self._max_age_s = max_age_s
        self._stream: _Stream | None = None

    def begin(self, request: pb.ExecuteRequest, *, timeout_s: float, traceparent: str) -> "LinkedRequest":
        """Sends a request, which ends with DEADLINE_EXCEEDED in `timeout_s`.

        Raises:
            LoraportError: PROMPT_TOO_LONG, for any executor.
        """
        if request.ByteSize() > MAX_CONTROL_BYTES:
            raise LoraportError("PROMPT_TOO_LONG", f"a request is {MAX_CONTROL_BYTES} bytes at most")
        # To one whose executor stops requests go on: it says why it refuses them, which a new call would not hear.
        if self._stream is None or self._stream.closed or self._stream.aged:
            self._stream = _Stream(self._open_stream(), self._max_age_s)
        begin = pb.ExecuteManyRequest.Begin(request=request, timeout_s=timeout_s, traceparent=traceparent)
        return self._stream.begin(begin)


class LinkedRequest:
    """One request; whoever has it ends it by `cancel` or `leave`, or hears its end."""

    __slots__ = ("_events", "_failure", "_held", "_key", "_over", "_stream", "_timer", "_unread", "_waiter")

    def __init__(self, stream: "_Stream", key: int, timeout_s: float) -> None:
        self._stream = stream
        self._key = key
        self._events: Events = []
        self._unread = 0
        self._held = False
        self._over = False
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._late)

    async def next(self) -> Events:
        """Returns all that was told since, nothing at the end. Raises LoraportError: why it ended without an answer;
        CancelledError: by `cancel`."""
        while not self._events and not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._events:
            events, self._events, self._unread = self._events, [], 0
            if self._held and not self._over:
                self._held = False
                self._stream.ask(Item(key=self._key, hold=False))
            return events
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # it knows this frame, which would keep it
        return []

    def cancel(self) -> None:
        """Ends the request; harmless when it has ended."""
        if not self._over:
            self._stream.ask(Item(key=self._key, cancel=Empty()))
            self.end(asyncio.CancelledError())

    def leave(self) -> None:
        """Takes no more interest: the executor ends the request in a moment, or is made to."""
        if not self._over:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(END_S, self.cancel)

    def hear(self, part: pb.ExecuteManyResponse.Part) -> None:
        """Takes what the executor told."""
        self._events += part.events
        if part.HasField("end"):
            self.end(from_status(part.end, unavailable="EXECUTOR_UNAVAILABLE") if part.end.code else None)
            return
        if not part.events:
            self._stream.ask(Item(key=self._key, cancel=Empty()))
            self.end(LoraportError("INTERNAL", "the executor sent an empty part"))
            return
        self._unread += 1
        if self._unread >= HOLD_AT and not self._held:
            self._held = True
            self._stream.ask(Item(key=self._key, hold=True))
        self._wake()

    def end(self, failure: BaseException | None) -> None:
        """It has ended; `failure` says why without an answer. What came before is still told."""
        self._over, self._failure = True, failure
        self._timer.cancel()
        self._stream.forget(self._key)
        self._wake()

    def _late(self) -> None:
        self._stream.ask(Item(key=self._key, cancel=Empty()))
        self.end(LoraportError("DEADLINE_EXCEEDED"))

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Stream:
    """One call of `ExecuteMany`. Its two tasks end with it."""

    def __init__(self, call: Any, max_age_s: float) -> None:
        self._call = call
        self._keys = count(1)
        self._requests: dict[int, LinkedRequest] = {}
        self._unsent: deque[Item] = deque()
        self._news = asyncio.Event()
        self._ends_when_idle = False
        # Nothing can be asked any more; nothing should be.
        self.closed = self.aged = False
        self._aging = asyncio.get_running_loop().call_later(max_age_s, self._age)
        # Not in the context of the request that happened to open the stream.
        self._writing = asyncio.create_task(self._write(), context=Context())
        self._reading = asyncio.create_task(self._read(), context=Context())

    def begin(self, begin: pb.ExecuteManyRequest.Begin) -> LinkedRequest:
        key = next(self._keys)
        request = self._requests[key] = LinkedRequest(self, key, begin.timeout_s)
        self.ask(Item(key=key, begin=begin))
        return request

    def ask(self, item: Item) -> None:
        self._unsent.append(item)
        self._news.set()

    def forget(self, key: int) -> None:
        self._requests.pop(key, None)
        if self._ends_when_idle:
            self._news.set()

    def end_when_idle(self) -> None:
        self._ends_when_idle = True
        self._news.set()

    def _age(self) -> None:
        self.aged = True
        self.end_when_idle()

    async def _write(self) -> None:
        try:
            while True:
                while self._unsent:
                    await self._call.write(pb.ExecuteManyRequest(items=some_of(self._unsent, MAX_ITEMS, MAX_BYTES)))
                if self._ends_when_idle and not self._requests:
                    self.closed = True
                    await self._call.done_writing()
                    return
                await self._news.wait()
                self._news.clear()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the call has ended: who reads it learns why
        except Exception as error:
            log.error("a stream to an executor is given up", exc_info=error)
            self._call.cancel()

    def _hear(self, part: pb.ExecuteManyResponse.Part) -> None:
        request = self._requests.get(part.key)
        if request is not None:
            request.hear(part)

    async def _read(self) -> None:
        failed = _gone
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                for part in message.parts:
                    self._hear(part)
                if message.ending:
                    self.end_when_idle()
        except grpc.RpcError as error:
            failed = partial(from_rpc_error, error, unavailable="EXECUTOR_UNAVAILABLE")
        finally:
            self.closed = True
            self._aging.cancel()
            self._writing.cancel()
            self._call.cancel()
            for request in list(self._requests.values()):
                request.end(failed())
