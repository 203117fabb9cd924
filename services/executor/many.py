"""Many prompts over one stream: each runs as a call of its own would, and none waits for another.

    begin ──> parts of its events … ──> a last part with its end          cancel, or the stream breaks: no more parts
                    hold ⇄ go on

Why: a call costs its server and its client 0.3 ms of a core each, whatever is said in it, and every message of it a
wake-up; a prompt here costs its bytes. What many prompts have to tell at one time, as at the end of a step, leaves as
one message.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from google.rpc import status_pb2

from loraport.executor.v1 import executor_service_pb2 as pb
from services.shared import tracing
from services.shared.errors import FaultList, LoraportError
from services.shared.rpc.batches import some_of
from services.shared.rpc.guard import Seen, log_as
from services.shared.rpc.status import to_status

METHOD = "/loraport.executor.v1.ExecutorService/Execute"
# Prompts that go on at a time over one stream; the engine has its own limit, for all of them together.
MAX_OPEN = 16_384
# What one message holds at most: a part may have 64 events of 20 alternatives each, and a router takes 8 MiB.
MAX_PARTS, MAX_BYTES = 256, 1 << 20
# Parts that wait to leave before prompts wait to tell more: what is not told stays with the engine's own events.
MAX_UNSENT = 1024

Events = Sequence[pb.ExecuteResponse.Event]
# Runs one prompt: (what is asked, seconds it may take) -> what is told, as it comes. Raises LoraportError.
Execute = Callable[[pb.ExecuteRequest, float], AsyncGenerator[Events, None]]


@dataclass(slots=True)
class _Prompt:
    task: asyncio.Task[None]
    # Set where the prompt may tell; None where nobody ever asked it not to.
    may_tell: asyncio.Event | None = None


class Many:
    """All streams of a process. Belongs to one event loop."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._streams: set[_Stream] = set()
        self._ending = False

    async def responses(
        self, messages: AsyncIterator[pb.ExecuteManyRequest]
    ) -> AsyncGenerator[pb.ExecuteManyResponse, None]:
        """Serves one stream; whatever still runs when this generator is closed is cancelled.

        Raises:
            LoraportError: INVALID_REQUEST, the stream's own fault.
        """
        stream = _Stream(self._execute)
        self._streams.add(stream)
        if self._ending:
            stream.ask_to_end()
        try:
            async with aclosing(stream.responses(messages)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._streams.discard(stream)

    def ask_to_end(self) -> None:
        """Asks the other end of every stream, and of those to come, to end it when it is done. Not ended from here:
        what the caller sends at that moment would break the call, and lose what is on its way to it."""
        self._ending = True
        for stream in self._streams:
            stream.ask_to_end()


class _Stream:
    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._prompts: dict[int, _Prompt] = {}
        self._last_key: int | None = None
        self._unsent: deque[pb.ExecuteManyResponse.Part] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        # The caller has ended its side, and this side has to ask for that.
        self._half_closed = self._must_ask = False
        self._fault: Exception | None = None

    def ask_to_end(self) -> None:
        self._must_ask = True
        self._news.set()

    async def responses(
        self, messages: AsyncIterator[pb.ExecuteManyRequest]
    ) -> AsyncGenerator[pb.ExecuteManyResponse, None]:
        reading = asyncio.create_task(self._read(messages))
        try:
            while True:
                while self._unsent and self._fault is None:
                    yield pb.ExecuteManyResponse(parts=some_of(self._unsent, MAX_PARTS, MAX_BYTES))
                    self._room.set()
                if self._fault is not None:
                    raise self._fault
                if self._half_closed and not self._prompts:
                    return
                if self._must_ask:
                    self._must_ask = False
                    yield pb.ExecuteManyResponse(ending=True)
                await self._news.wait()
                self._news.clear()
        finally:
            tasks = [reading, *(prompt.task for prompt in self._prompts.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[pb.ExecuteManyRequest]) -> None:
        try:
            async for message in messages:
                for item in message.items:
                    self._take(item)
        except Exception as error:
            self._fault = error
        self._half_closed = True
        self._news.set()

    def _take(self, item: pb.ExecuteManyRequest.Item) -> None:
        prompt = self._prompts.get(item.key)
        match item.WhichOneof("action"):
            case "begin":
                self._begin(item.key, item.begin)
            case "cancel":
                if prompt is not None:
                    prompt.task.cancel()
            case "hold":
                if prompt is not None:
                    _hold(prompt, item.hold)
            case _:
                raise LoraportError("INVALID_REQUEST", "an item without an action", subject="items")

    def _begin(self, key: int, begin: pb.ExecuteManyRequest.Begin) -> None:
        faults = FaultList()
        faults.require(self._last_key is None or key > self._last_key, "items.key", "must be above all before it")
        faults.require(begin.timeout_s > 0, "items.begin.timeout_s", "must be above 0")
        faults.raise_if_any()
        self._last_key = key
        if len(self._prompts) >= MAX_OPEN:
            self._end(key, to_status(LoraportError("OVERLOADED", f"{MAX_OPEN} prompts are open", retry_after_s=1.0)))
            return
        task = asyncio.create_task(self._run(key, begin))
        self._prompts[key] = _Prompt(task)
        # Not at the end of `_run`: a task that is cancelled at once never begins.
        task.add_done_callback(lambda _task: self._ended(key))

    def _ended(self, key: int) -> None:
        del self._prompts[key]
        self._news.set()

    async def _run(self, key: int, begin: pb.ExecuteManyRequest.Begin) -> None:
        seen, end = Seen(METHOD), status_pb2.Status()
        log_as(begin.request.request_id)
        try:
            trace = {tracing.TRACEPARENT: begin.traceparent} if begin.traceparent else {}
            seen.span = tracing.enter(METHOD, trace, request_id="", trusted=True)
            await self._tell(key, begin)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                seen.code = "CANCELLED"
                raise
            end = to_status(seen.failed(RuntimeError(f"cancelled by nobody: {error}")))
        except Exception as error:
            end = to_status(seen.failed(error))
        finally:
            seen.ended()
        self._end(key, end)

    async def _tell(self, key: int, begin: pb.ExecuteManyRequest.Begin) -> None:
        try:
            async with asyncio.timeout(begin.timeout_s) as limit:
                async with aclosing(self._execute(begin.request, begin.timeout_s)) as told:
                    async for events in told:
                        await self._may_tell(key)
                        self._unsent.append(pb.ExecuteManyResponse.Part(key=key, events=events))
                        self._news.set()
        except TimeoutError:
            if not limit.expired():
                raise
            raise LoraportError("DEADLINE_EXCEEDED") from None

    async def _may_tell(self, key: int) -> None:
        """Waits while this prompt's reader, or the whole stream's, is slow."""
        prompt = self._prompts[key]
        while True:
            if prompt.may_tell is not None and not prompt.may_tell.is_set():
                await prompt.may_tell.wait()
            elif len(self._unsent) >= MAX_UNSENT:
                self._room.clear()
                await self._room.wait()
            else:
                return

    def _end(self, key: int, end: status_pb2.Status) -> None:
        """Into the prompt's last part if that has not left."""
        last = self._unsent[-1] if self._unsent else None
        if last is not None and last.key == key:
            last.end.CopyFrom(end)
        else:
            self._unsent.append(pb.ExecuteManyResponse.Part(key=key, end=end))
        self._news.set()


def _hold(prompt: _Prompt, hold: bool) -> None:
    if prompt.may_tell is None:
        prompt.may_tell = asyncio.Event()
    if hold:
        prompt.may_tell.clear()
    else:
        prompt.may_tell.set()
