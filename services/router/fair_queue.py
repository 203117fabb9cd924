"""A bounded queue per tenant, served by the ledger's counters.

A request that was accepted is in exactly one place until it ends: waiting, or running. It leaves `waiting` by `take`
(it runs), `withdraw` (the client left), or `expire` (it waited too long); it leaves `running` by `finish`.

Within a tenant, higher priority goes first, then the older request. A request that no executor has room for may be
overtaken by the tenant's next few, else one base model without room would hold up the others.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from services.router.ledger import Ledger
from services.shared.errors import LoraportError

RETRY_AFTER_S = 1.0
# How far behind a tenant's head a request that fits is looked for.
LOOK_AHEAD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in a queue. `arrived` is on the monotonic clock, in seconds; a higher `priority` goes first."""

    id: str
    tenant: str
    base_model: str
    revision_id: str
    rank: int
    prompt_tokens: int
    priority: int
    arrived: float
    weight: float = 1.0
    # Rows that it takes in an executor's batch.
    answers: int = 1


@dataclass(frozen=True, slots=True)
class QueueState:
    """One tenant's queue as the admin plane shows it."""

    tenant: str
    queued: int
    running: int
    oldest_wait_s: float


class FairQueue:
    """See the module's text. Pure: the caller brings the clock."""

    def __init__(self, ledger: Ledger, *, max_queued: int, max_running: int, residence_s: float) -> None:
        self._ledger = ledger
        self._max_queued = max_queued
        self._max_running = max_running
        self._residence_s = residence_s
        # Rows of (-priority, arrival number, request) in order; a tenant without requests has no entry.
        self._waiting: dict[str, list[tuple[int, int, Waiting]]] = {}
        self._running: dict[str, str] = {}
        self._running_count: dict[str, int] = {}
        self._arrivals = 0
        self._last_left = ""

    def offer(self, request: Waiting) -> None:
        """Accepts a request into its tenant's queue.

        Raises:
            LoraportError: OVERLOADED when the tenant's queue is full; nothing was kept.
        """
        queue = self._waiting.get(request.tenant, [])
        if len(queue) >= self._max_queued:
            raise LoraportError(
                "OVERLOADED", f"{len(queue)} requests of this tenant wait already", retry_after_s=RETRY_AFTER_S
            )
        self._ledger.set_weight(request.tenant, request.weight)
        if not queue:
            self._lift(request.tenant)
        bisect.insort(self._waiting.setdefault(request.tenant, queue), (-request.priority, self._arrivals, request))
        self._arrivals += 1

    def take(self, bases: frozenset[str], fits: Callable[[Waiting], bool]) -> Waiting | None:
        """Moves the next request to running and charges its prompt; None when nothing that waits may run.

        `bases` are the base models with room on some executor; `fits` says whether one of them takes this request.
        """
        for tenant in sorted(self._schedulable(), key=lambda name: (self._ledger.counter(name), name)):
            for row in self._waiting[tenant][:LOOK_AHEAD]:
                request = row[2]
                if request.base_model in bases and fits(request):
                    self._remove(request)
                    self._running[request.id] = tenant
                    self._running_count[tenant] = self._running_count.get(tenant, 0) + 1
                    self._ledger.charge_prefill(tenant, request.prompt_tokens)
                    return request
        return None

    def withdraw(self, request: Waiting) -> bool:
        """Removes a waiting request; False when it does not wait (any more)."""
        return self._remove(request)

    def expire(self, now: float) -> list[Waiting]:
        """Removes and returns the requests that waited longer than a queue may keep them."""
        over = [
            row[2] for queue in self._waiting.values() for row in queue if now - row[2].arrived >= self._residence_s
        ]
        for request in over:
            self._remove(request)
        return over

    def finish(self, request_id: str) -> None:
        """Ends a running request; ending it again, or one that never ran, changes nothing."""
        tenant = self._running.pop(request_id, None)
        if tenant is not None:
            self._running_count[tenant] -= 1
            if not self._running_count[tenant]:
                del self._running_count[tenant]

    def waiting(self) -> list[Waiting]:
        """Returns every waiting request."""
        return [row[2] for queue in self._waiting.values() for row in queue]

    def states(self, now: float) -> list[QueueState]:
        """Returns the queues of all tenants that have requests waiting or running, in order of tenant."""
        return [
            QueueState(
                tenant,
                queued=len(queue := self._waiting.get(tenant, [])),
                running=self._running_count.get(tenant, 0),
                oldest_wait_s=max((now - row[2].arrived for row in queue), default=0.0),
            )
            for tenant in sorted({*self._waiting, *self._running_count})
        ]

    def _schedulable(self) -> list[str]:
        return [name for name in self._waiting if self._running_count.get(name, 0) < self._max_running]

    def _lift(self, tenant: str) -> None:
        """Applied to a tenant that had nothing waiting. A tenant at its running limit does not hold the others back."""
        if self._waiting:
            self._ledger.lift(tenant, self._schedulable() or self._waiting)
        elif self._last_left:
            self._ledger.lift(tenant, (self._last_left,))

    def _remove(self, request: Waiting) -> bool:
        queue = self._waiting.get(request.tenant, [])
        for index, row in enumerate(queue):
            if row[2].id == request.id:
                del queue[index]
                if not queue:
                    del self._waiting[request.tenant]
                    self._last_left = request.tenant
                return True
        return False
