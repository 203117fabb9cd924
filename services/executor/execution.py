"""One request: its answers run side by side in the engine, their events come together here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from services.executor.engine.loop import Engine
from services.executor.engine.open_requests import Sink
from services.executor.request import Ended, Event, Refused, RequestSpec

# How many events a batch has at most: what a slow reader let pile up is told in messages of bounded size.
MAX_BATCH = 64


class Execution:
    """Submits the answers of one request and yields their events. `close` cancels what still runs; safe to repeat."""

    def __init__(self, engine: Engine, specs: Sequence[RequestSpec]) -> None:
        self._engine = engine
        self._specs = specs
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: set[str] = set()

    def submit(self) -> None:
        """Hand all answers to the engine. Once after each `withdraw`.

        Raises:
            Refused: one was not accepted; those before it are cancelled.
        """
        for index, spec in enumerate(self._specs):
            try:
                self._engine.submit(spec, self._sink(index))
            except Refused:
                self._cancel()
                raise
            self._open.add(spec.request_id)

    async def withdraw(self) -> None:
        """Wait until what `submit` cancelled has ended: its ids may be used again, and no event of it is left."""
        async for _ in self.events():
            pass

    def _sink(self, index: int) -> Sink:
        def sink(event: Event) -> None:  # on the device thread
            try:
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
            except RuntimeError:  # The event loop has closed: nobody is there to be told.
                return

        return sink

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yield lists of what has happened since, as (answer, event), until every answer has ended."""
        while self._open:
            happened = [await self._events.get()]
            while len(happened) < MAX_BATCH and not self._events.empty():
                happened.append(self._events.get_nowait())
            for _, event in happened:
                if isinstance(event, Ended):
                    self._open.discard(event.request_id)
            yield happened

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield (answer, event) until every answer has ended."""
        async for happened in self.batches():
            for item in happened:
                yield item

    def close(self) -> None:
        """Cancel every answer that has not ended."""
        self._cancel()
        self._open.clear()

    def _cancel(self) -> None:
        for request_id in self._open:
            self._engine.cancel(request_id)
