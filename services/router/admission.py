"""From a queue to an executor: waits fairly, then holds one place on one executor.

A request that enters leaves with a `Grant`, an error or a cancellation, and a grant ends once. Requests go as soon as
there is room; nothing here polls but the sweep that does what time alone calls for.
"""

import asyncio
from collections.abc import Iterable

from services.router.dispatch import Dispatch, Grant
from services.router.fair_queue import RETRY_AFTER_S, Waiting
from services.router.placement import too_large
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.futures import result_of

SWEEP_S = 0.25


class Admission:
    """See the module's text."""

    def __init__(self, dispatch: Dispatch, *, clock: Clock, executor_wait_s: float) -> None:
        self._dispatch = dispatch
        self._clock = clock
        self._executor_wait_s = executor_wait_s
        self._waiters: dict[str, asyncio.Future[Grant]] = {}
        self._scheduled = False
        # Base model → when an executor of it was last seen serving. A base that never was counts from the start.
        self._last_served: dict[str, float] = {}
        self._started = clock.monotonic()
        self._sweeper: asyncio.Task[None] | None = None
        dispatch.on_change = self.wake

    def start(self) -> None:
        """Begins to end requests that waited too long, in the running event loop."""
        self._sweeper = asyncio.create_task(self._sweep())

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs in the background; it ends by `stop` or by a bug."""
        return (self._sweeper,) if self._sweeper is not None else ()

    async def stop(self) -> None:
        """Stops that."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def enter(self, request: Waiting) -> Grant:
        """Waits for a place.

        Raises:
            LoraportError: OVERLOADED when the queue is full or was too slow; EXECUTOR_UNAVAILABLE when no executor of
                the base model serves; POOL_TOO_SMALL when none can hold the revision.
        """
        if too_large(self._dispatch.members.view(), request.base_model, request.rank):
            raise LoraportError("POOL_TOO_SMALL", f"no executor holds revisions of rank {request.rank}")
        self._dispatch.offer(request)
        waiter: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiters[request.id] = waiter
        self._refuse_unserved((request,))
        self.wake()
        try:
            return await waiter
        except asyncio.CancelledError:
            # A grant may have come in the same turn of the loop; nobody will use it.
            if (grant := result_of(waiter)) is not None:
                grant.release()
            raise
        finally:
            self._waiters.pop(request.id, None)
            self._dispatch.queue.withdraw(request)

    def move(self, grant: Grant, excluded: frozenset[str]) -> bool:
        """Moves a granted request to an executor that is not `excluded`; False when none has room now."""
        return self._dispatch.move(grant, excluded, now=self._clock.monotonic())

    def wake(self) -> None:
        """Lets requests go in the next turn of the loop, so that those that arrive together are ordered together."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._let_go)

    def _let_go(self) -> None:
        self._scheduled = False
        while (grant := self._dispatch.next(self._clock.monotonic())) is not None:
            waiter = self._waiters.get(grant.request.id)
            if waiter is None or waiter.done():
                grant.release()
                continue
            waiter.set_result(grant)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for request in self._dispatch.sweep(self._clock.monotonic()):
                self._fail(request, LoraportError("OVERLOADED", "waited too long", retry_after_s=RETRY_AFTER_S))
            self._refuse_unserved(list(self._dispatch.queue.waiting()))
            self.wake()

    def _refuse_unserved(self, requests: Iterable[Waiting]) -> None:
        """Ends those of `requests` whose base model no executor has served for some time."""
        view, now = self._dispatch.members.view(), self._clock.monotonic()
        served = {executor.base_model for executor in view.executors if executor.serving}
        self._last_served.update(dict.fromkeys(served, now))
        for request in requests:
            since = self._last_served.get(request.base_model, self._started)
            if request.base_model not in served and now - since >= self._executor_wait_s:
                self._dispatch.queue.withdraw(request)
                self._fail(request, LoraportError("EXECUTOR_UNAVAILABLE", retry_after_s=RETRY_AFTER_S))

    def _fail(self, request: Waiting, error: LoraportError) -> None:
        waiter = self._waiters.get(request.id)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
