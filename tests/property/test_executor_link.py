"""A router's link and an executor's many prompts, joined in memory: whatever prompts, callers and executor do, each prompt
is told all that is its own, in order, and ends once; and nothing is left of it."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraport.executor.v1 import executor_service_pb2 as pb
from services.executor import many
from services.executor.many import Many
from services.router import executor_link
from services.router.config import LifeLimits
from services.router.executor_link import HOLD_AT, Link, LinkedRequest
from services.shared.errors import LoraportError
from services.shared.rpc.server import GRACE_S


class Wire:
    """A call of `ExecuteMany` whose other end is a `Many`; a message goes when its reader takes it."""

    def __init__(self, server: Many) -> None:
        self._asked: asyncio.Queue[Any] = asyncio.Queue(2)
        self._told: asyncio.Queue[Any] = asyncio.Queue(2)
        self._serving = asyncio.create_task(self._serve(server))
        self.sizes: list[int] = []

    async def _serve(self, server: Many) -> None:
        error: Any = grpc.aio.EOF
        try:
            async for response in server.responses(self._messages()):
                self.sizes.append(response.ByteSize())
                await self._told.put(pb.ExecuteManyResponse.FromString(response.SerializeToString()))
        except LoraportError as failure:
            error = failure
        await self._told.put(error)

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self._asked.get()) is not None:
            yield pb.ExecuteManyRequest.FromString(message.SerializeToString())

    async def write(self, message: Any) -> None:
        assert message.items
        await self._asked.put(message)

    async def done_writing(self) -> None:
        await self._asked.put(None)

    async def read(self) -> Any:
        told = await self._told.get()
        if isinstance(told, LoraportError):
            raise told
        return told

    def cancel(self) -> None:
        self._serving.cancel()

    async def closed(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


@dataclass
class World:
    """An executor that answers a request of `n` tokens and priority `how` with `n` events, and then as `how` says."""

    begun: int = 0
    ended: int = 0

    async def execute(self, request: pb.ExecuteRequest, timeout_s: float) -> AsyncIterator[many.Events]:
        self.begun += 1
        try:
            for number in range(request.sampling.max_tokens):
                await asyncio.sleep(0)
                tokens = pb.ExecuteResponse.Tokens(token_ids=[number, *request.prompt_token_ids])
                yield [pb.ExecuteResponse.Event(tokens=tokens)]
            if request.priority == 1:
                raise LoraportError("NON_FINITE_LOGITS")
            if request.priority == 2:
                raise RuntimeError("a bug")
            if request.priority == 3:
                await asyncio.Event().wait()
        finally:
            self.ended += 1


REASONS = {1: "NON_FINITE_LOGITS", 2: "INTERNAL", 3: "DEADLINE_EXCEEDED"}


async def ask(link: Link, number: int, tokens: int, how: int, patience: int | None, slow: int) -> None:
    """One caller: reads to the end, or cancels when it has heard `patience` tokens; `slow` turns pass between reads."""
    request = pb.ExecuteRequest(prompt_token_ids=[number], priority=how)
    request.sampling.max_tokens = tokens
    linked = link.begin(request, timeout_s=0.2 if how == 3 else 30.0, traceparent="")
    heard, failure = 0, ""
    try:
        while events := await linked.next():
            for event in events:
                assert list(event.tokens.token_ids) == [heard, number], "its own, in order, none missing"
                heard += 1
            if patience is not None and heard >= patience:
                linked.cancel()
                linked.cancel()
                return
            for _ in range(slow):
                await asyncio.sleep(0)
    except LoraportError as error:
        failure = error.reason
    # One that never ends has its time, in which a slow machine may not tell all.
    assert heard == tokens or (how == 3 and heard < tokens)
    assert failure == REASONS.get(how, "")


requests = st.tuples(
    st.integers(0, 60), st.sampled_from([0, 0, 0, 1, 2, 3]), st.none() | st.integers(1, 40), st.integers(0, 30)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 5))
def test_every_prompt_is_told_its_own_and_ends_once(orders: list[Any], parts: int, unsent: int) -> None:
    async def run() -> None:
        world = World()
        server = Many(world.execute)
        wires: list[Wire] = []

        def opened() -> Wire:
            wires.append(Wire(server))
            return wires[-1]

        link = Link(opened)
        await asyncio.gather(*(ask(link, number, *order) for number, order in enumerate(orders)))
        stream = link._stream
        assert stream is not None
        assert not stream._requests
        async with asyncio.timeout(5):
            while world.begun != world.ended or any(s._prompts or s._unsent for s in server._streams):
                await asyncio.sleep(0)
        assert len(wires) == 1
        stream.end_when_idle()
        async with asyncio.timeout(5):
            while not stream._reading.done():
                await asyncio.sleep(0)
        await wires[0].closed()
        assert not server._streams

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many, "MAX_PARTS", parts)
        patch.setattr(many, "MAX_UNSENT", unsent)
        asyncio.run(run())


async def joined(world: World) -> tuple[Many, Link, list[Wire]]:
    server, wires = Many(world.execute), []

    def opened() -> Wire:
        wires.append(Wire(server))
        return wires[-1]

    return server, Link(opened), wires


def asked(link: Link, tokens: int, how: int = 0, *, timeout_s: float = 30.0) -> LinkedRequest:
    request = pb.ExecuteRequest(prompt_token_ids=[7], priority=how)
    request.sampling.max_tokens = tokens
    return link.begin(request, timeout_s=timeout_s, traceparent="")


async def turns(count: int = 300) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_nobody_reads_stays_with_the_executor() -> None:
    world = World()
    _server, link, wires = await joined(world)
    slow, other = asked(link, 500), asked(link, 50)
    heard = 0
    while events := await other.next():
        heard += len(events)
    assert heard == 50, "a slow reader is nobody else's affair"
    await turns()
    assert HOLD_AT <= len(slow._events) < HOLD_AT + 16, "a few parts that were on their way"
    assert world.ended == 1
    heard = 0
    while events := await slow.next():
        heard += len(events)
    assert (heard, world.ended) == (500, 2)
    await wires[0].closed()


async def test_a_stream_that_breaks_ends_its_prompts_and_the_next_has_another() -> None:
    _server, link, wires = await joined(World())
    first, second = asked(link, 3, how=3), asked(link, 0, how=3)
    assert await first.next()
    wires[0]._told.put_nowait(grpc.aio.EOF)
    for request in (first, second):
        with pytest.raises(LoraportError) as caught:
            while await request.next():
                pass
        assert caught.value.reason == "EXECUTOR_UNAVAILABLE"
    again = asked(link, 2)
    assert len(wires) == 2
    assert next(list(event.tokens.token_ids) for event in await again.next()) == [0, 7]
    again.cancel()
    for wire in wires:
        await wire.closed()


async def test_an_executor_that_has_told_everything_ends_it_or_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_link, "END_S", 0.05)
    world = World()
    _server, link, wires = await joined(world)
    done, lingering = asked(link, 1), asked(link, 1, how=3)
    await done.next()
    await lingering.next()
    done.leave()
    lingering.leave()
    async with asyncio.timeout(5):
        while world.ended < 2:
            await asyncio.sleep(0.01)
    assert not link._stream._requests  # type: ignore[union-attr]
    await wires[0].closed()


async def test_a_caller_that_is_cancelled_while_it_waits_can_still_cancel() -> None:
    world = World()
    _server, link, wires = await joined(world)
    request = asked(link, 0, how=3)
    waiting = asyncio.create_task(request.next())
    await turns()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    request.cancel()
    await turns()
    assert (world.begun, world.ended) == (1, 1)
    with pytest.raises(asyncio.CancelledError):
        await request.next()
    await wires[0].closed()


async def test_a_stream_that_cannot_be_written_to_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _server, link, wires = await joined(World())
    first = asked(link, 0, how=3)
    await turns()

    async def broken(message: pb.ExecuteManyRequest) -> None:
        raise TypeError("no bytes")

    monkeypatch.setattr(wires[0], "write", broken)
    monkeypatch.setattr(wires[0], "cancel", lambda: wires[0]._told.put_nowait(grpc.aio.EOF))
    second = asked(link, 0, how=3)
    for request in (first, second):
        with pytest.raises(LoraportError) as caught:
            await request.next()
        assert caught.value.reason == "EXECUTOR_UNAVAILABLE"
    assert (await asked(link, 2).next())[0].tokens.token_ids == [0, 7]
    for wire in wires:
        await wire.closed()


async def test_failed_requests_keep_nothing_alive() -> None:
    _server, link, wires = await joined(World())
    gc.collect()
    gc.disable()
    try:
        for how in (1, 2):
            request = asked(link, 0, how=how)
            reason = ""
            try:
                await request.next()
            except LoraportError as error:
                reason = error.reason
            assert reason == REASONS[how]
            del request
        assert not [kept for kept in gc.get_objects() if type(kept) is LinkedRequest]
    finally:
        gc.enable()
    await wires[0].closed()


async def test_a_late_request_is_cancelled_at_the_executor_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _server, link, wires = await joined(World())
    sent: list[Any] = []
    request = asked(link, 0, how=3)
    write = wires[0].write

    async def noted(message: pb.ExecuteManyRequest) -> None:
        sent.extend((item.key, item.WhichOneof("action")) for item in message.items)
        await write(message)

    monkeypatch.setattr(wires[0], "write", noted)
    await turns()
    request._late()
    with pytest.raises(LoraportError) as caught:
        await request.next()
    await turns()
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    assert sent == [(1, "begin"), (1, "cancel")]
    await wires[0].closed()


async def test_a_process_that_stops_asks_routers_to_end_their_streams() -> None:
    server, link, wires = await joined(World())
    first = asked(link, 3)
    server.ask_to_end()
    heard = 0
    while events := await first.next():
        heard += len(events)
    await turns()
    assert heard == 3
    assert link._stream._reading.done()  # type: ignore[union-attr]
    # The next one has a stream of its own, which is asked at once, and ends with it.
    second = asked(link, 2)
    assert len(wires) == 2
    while await second.next():
        pass
    await turns()
    assert link._stream._reading.done()  # type: ignore[union-attr]
    assert not server._streams


async def test_prompts_have_a_bound_and_know_how_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[str] = []

    class Seen(many.Seen):
        def ended(self) -> None:
            codes.append(self.code)

    monkeypatch.setattr(many, "Seen", Seen)
    monkeypatch.setattr(many, "MAX_OPEN", 2)
    world = World()
    _server, link, wires = await joined(world)
    held = [asked(link, 1, how=3), asked(link, 1, how=3)]
    await held[1].next()
    with pytest.raises(LoraportError) as caught:
        await asked(link, 1).next()
    assert caught.value.reason == "OVERLOADED"
    held.pop().cancel()
    await turns()
    third = asked(link, 1, how=1)
    assert await third.next()
    with pytest.raises(LoraportError):
        await third.next()
    assert codes == ["CANCELLED", "INTERNAL"]
    await wires[0].closed()


async def test_a_cancellation_that_nobody_asked_for_is_a_fault() -> None:
    async def execute(request: pb.ExecuteRequest, timeout_s: float) -> AsyncIterator[many.Events]:
        yield [pb.ExecuteResponse.Event()]
        raise asyncio.CancelledError

    wires: list[Wire] = []
    server = Many(execute)

    def opened() -> Wire:
        wires.append(Wire(server))
        return wires[-1]

    request = asked(Link(opened), 1)
    assert await request.next()
    with pytest.raises(LoraportError) as caught:
        await request.next()
    assert caught.value.reason == "INTERNAL"
    await wires[0].closed()


async def test_a_stream_ends_at_its_age_though_nobody_asks_for_another() -> None:
    _server, link, wires = await joined(World())
    request = asked(link, 2)
    while await request.next():
        pass
    stream = link._stream
    assert stream is not None
    stream._age()
    await turns()
    assert stream._reading.done()
    assert asked(link, 1)._stream is not stream
    await turns()
    for wire in wires:
        await wire.closed()


def test_a_stream_and_its_last_request_are_over_before_their_connection() -> None:
    assert executor_link.MAX_AGE_S + LifeLimits().max_request_s < GRACE_S


async def test_a_part_that_says_nothing_ends_its_prompt() -> None:
    server, link, wires = await joined(World())
    request = asked(link, 0, how=3)
    await turns()
    wires[0]._told.put_nowait(pb.ExecuteManyResponse(parts=[pb.ExecuteManyResponse.Part(key=1)]))
    with pytest.raises(LoraportError) as caught:
        await request.next()
    assert caught.value.reason == "INTERNAL"
    await turns()
    assert not any(stream._prompts for stream in server._streams)
    await wires[0].closed()


async def test_messages_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_link, "MAX_BYTES", 3000)
    monkeypatch.setattr(many, "MAX_BYTES", 500)
    _server, link, wires = await joined(World())
    requests = [asked(link, 5) for _ in range(30)]
    for item in requests[0]._stream._unsent:
        item.begin.request.prompt_token_ids.extend([1 << 20] * 200)  # 600 bytes
    sent: list[int] = []
    write = wires[0].write

    async def counted(message: pb.ExecuteManyRequest) -> None:
        sent.append(message.ByteSize())
        await write(message)

    monkeypatch.setattr(wires[0], "write", counted)
    for request in requests:
        heard = 0
        while events := await request.next():
            heard += len(events)
        assert heard == 5
    assert len(sent) == 8, "four of them fit"
    assert max(sent) <= 3000 + 4 * 10
    assert max(wires[0].sizes) < 500 + 810, "a part that is more than the bound by itself goes alone"
    await wires[0].closed()
