"""From a queue to an executor: waits fairly, then holds one place on one executor.

A request that enters leaves with a `Grant`, an error or a cancellation, and a grant ends once. Requests go as soon as
there is room; nothing here polls but the sweep that ends those that waited too long.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from services.router.fair_queue import RETRY_AFTER_S, FairQueue, Waiting
from services.router.fleet import Fleet, Flight
from services.router.fleet_view import FleetView
from services.router.placement import Wish, choose, too_large
from services.shared.clock import Clock
from services.shared.errors import LoraportError

SWEEP_S = 0.25


class Grant:
    """The right to run one request on one executor, until it is released."""

    def __init__(self, request: Waiting, flight: Flight, end: Callable[[], None]) -> None:
        self.request = request
        self.flight = flight
        self._end: Callable[[], None] | None = end

    @property
    def executor(self) -> str:
        """Name of the executor."""
        return self.flight.executor

    def release(self) -> None:
        """Gives the place back; once is enough."""
        end, self._end = self._end, None
        if end is not None:
            end()
            self.flight.release()


class Admission:
    """See the module's text."""

    def __init__(self, queue: FairQueue, fleet: Fleet, *, clock: Clock, executor_wait_s: float) -> None:
        self._queue = queue
        self._fleet = fleet
        self._clock = clock
        self._executor_wait_s = executor_wait_s
        self._waiters: dict[str, asyncio.Future[Grant]] = {}
        self._scheduled = False
        # Base model → when an executor of it was last seen serving. A base that never was counts from the start.
        self._last_served: dict[str, float] = {}
        self._started = clock.monotonic()
        self._sweeper: asyncio.Task[None] | None = None
        fleet.on_change = self.wake

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
        if too_large(self._fleet.view(), _wish(request)):
            raise LoraportError("POOL_TOO_SMALL", f"no executor holds revisions of rank {request.rank}")
        self._queue.offer(request)
        waiter: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiters[request.id] = waiter
        self._refuse_unserved((request,))
        self.wake()
        try:
            return await waiter
        except asyncio.CancelledError:
            # A grant may have come in the same turn of the loop; nobody will use it.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()
            raise
        finally:
            self._waiters.pop(request.id, None)
            self._queue.withdraw(request)

    def move(self, grant: Grant, excluded: frozenset[str]) -> bool:
        """Moves a granted request to an executor that is not `excluded`; False when none has room now."""
        decision = choose(self._fleet.view(), _wish(grant.request, excluded))
        if not decision.executor:
            return False
        old, grant.flight = grant.flight, self._begin(decision.executor, grant.request)
        old.release()
        return True

    def wake(self) -> None:
        """Lets requests go in the next turn of the loop, so that those that arrive together are ordered together."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        while True:
            view = self._fleet.view()
            request = self._queue.take(view.bases_with_room(), partial(_fits, view))
            if request is None:
                return
            flight = self._begin(choose(view, _wish(request)).executor, request)
            grant = Grant(request, flight, partial(self._queue.finish, request.id))
            waiter = self._waiters.get(request.id)
            if waiter is None or waiter.done():
                grant.release()
            else:
                waiter.set_result(grant)

    def _begin(self, executor: str, request: Waiting) -> Flight:
        return self._fleet.begin(executor, request.revision_id, answers=request.answers)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for request in self._queue.expire(self._clock.monotonic()):
                self._fail(request, LoraportError("OVERLOADED", "waited too long", retry_after_s=RETRY_AFTER_S))
            self._refuse_unserved(self._queue.waiting())

    def _refuse_unserved(self, requests: Iterable[Waiting]) -> None:
        """Ends those of `requests` whose base model no executor has served for some time."""
        view, now = self._fleet.view(), self._clock.monotonic()
        served = {executor.base_model for executor in view.executors if executor.serving}
        self._last_served.update(dict.fromkeys(served, now))
        for request in requests:
            since = self._last_served.get(request.base_model, self._started)
            if request.base_model not in served and now - since >= self._executor_wait_s:
                self._queue.withdraw(request)
                self._fail(request, LoraportError("EXECUTOR_UNAVAILABLE", retry_after_s=RETRY_AFTER_S))

    def _fail(self, request: Waiting, error: LoraportError) -> None:
        waiter = self._waiters.get(request.id)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)


def _fits(view: FleetView, request: Waiting) -> bool:
    return bool(choose(view, _wish(request)).executor)


def _wish(request: Waiting, excluded: frozenset[str] = frozenset()) -> Wish:
    return Wish(request.base_model, request.revision_id, request.rank, excluded)
