"""A bounded queue per tenant, served by the ledger's counters.

A request that was accepted is in exactly one place until it ends: waiting, or running. It leaves `waiting` by `take`
(it runs), `withdraw` (the client left), or `expire` (it waited too long); it leaves `running` by `finish`.

The tenant with the least counter goes next. Within a tenant, higher priority goes first, then the older request; but a
request whose revision is on a device passes one that needs a load, until the head was passed `MAX_PASSED` times or for
`MAX_PASSED_S`: then the head goes next, or nobody of this tenant does.

Counters only rise, so a heap of them may hold old values: what comes up with an old one goes back with its new one. A
tenant that cannot be served now is parked, and looked at again when something that it may wait for has happened. So an
admission costs the logarithm of the number of tenants.
"""

import bisect
import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from services.router.ledger import Ledger
from services.shared.errors import LoraportError

RETRY_AFTER_S = 1.0
# How far behind a tenant's head a request that needs no load is looked for.
LOOK_AHEAD = 16
MAX_PASSED, MAX_PASSED_S = 16, 1.0
# Parked tenants that are looked at again after an event: one event makes room for one request, seldom for more.
WAKE = 8


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
    # Tokens of the prompt and the longest answer together; 0 goes anywhere.
    length: int = 0
    # Rows that it takes in an executor's batch.
    answers: int = 1
    # Size of the adapter.
    mib: float = 0.0
    # Names of the prompt's blocks, see services/router/locality.py.
    prefix: tuple[object, ...] = ()
    session: str = ""
    # The one executor that it is for; empty for any.
    only: str = ""


class Place(Protocol):
    """Where a request could go now; `cold` says that a load must begin for it."""

    @property
    def cold(self) -> bool: ...


P = TypeVar("P", bound=Place)


@dataclass(frozen=True, slots=True)
class Turn(Generic[P]):
    """A request whose turn it is, where it goes, and why it: its tenant's counter, the least counter of another tenant
    that waits and may run (None when there is none), and whether it passed an older request of its tenant."""

    request: Waiting
    place: P
    counter_ms: float
    next_ms: float | None
    passed: bool


@dataclass(frozen=True, slots=True)
class QueueState:
    """One tenant's queue as the admin plane shows it."""

    tenant: str
    queued: int
    running: int
    oldest_wait_s: float


# (-priority, arrival number): unique, so requests are never compared.
_Key = tuple[int, int]


@dataclass(slots=True)
class _Lane:
    """One tenant's requests for one base model. `listing` names its valid entry in a heap."""

    tenant: str
    base_model: str
    rows: list[tuple[_Key, Waiting]] = field(default_factory=list)
    state: Literal["listed", "parked", "capped"] = "listed"
    listing: int = -1
    passed: int = 0
    passed_since: float | None = None


_Entry = tuple[float, str, int, _Lane]


class FairQueue:
    """See the module's text. Pure: the caller brings the clock."""

    def __init__(self, ledger: Ledger, *, max_queued: int, max_running: int, residence_s: float) -> None:
        self._ledger = ledger
        self._max_queued = max_queued
        self._max_running = max_running
        self._residence_s = residence_s
        # Tenant → base model → its lane; a tenant without requests has no entry, and no lane is empty.
        self._lanes: dict[str, dict[str, _Lane]] = {}
        self._listed: dict[str, list[_Entry]] = {}
        self._parked: dict[str, list[_Entry]] = {}
        # What waits, the oldest first.
        self._waiting: dict[str, tuple[_Key, Waiting]] = {}
        self._running: dict[str, str] = {}
        self._running_count: dict[str, int] = {}
        self._arrivals = self._listings = 0
        self._last_left = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, request: Waiting) -> None:
        """Accepts a request into its tenant's queue.

        Raises:
            LoraportError: OVERLOADED when the tenant's queue is full; nothing was kept.
        """
        lanes = self._lanes.get(request.tenant, {})
        queued = sum(len(lane.rows) for lane in lanes.values())
        if queued >= self._max_queued:
            raise LoraportError("OVERLOADED", f"{queued} requests of this tenant wait already", retry_after_s=1.0)
        self._ledger.set_weight(request.tenant, request.weight)
        if not lanes:
            self._lift(request.tenant)
        key = (-request.priority, self._arrivals)
        self._arrivals += 1
        self._waiting[request.id] = (key, request)
        lane = self._lanes.setdefault(request.tenant, lanes).get(request.base_model)
        if lane is None:
            lane = lanes[request.base_model] = _Lane(request.tenant, request.base_model)
            self._list(lane)
        elif lane.state == "parked":
            # What came may be what can go.
            self._list(lane)
        bisect.insort(lane.rows, (key, request))

    def take(self, bases: Collection[str], place: Callable[[Waiting], P | None], *, now: float) -> Turn[P] | None:
        """Moves the next request to running; None when nothing that waits may run. The caller charges it.

        `bases` are the base models with room on some executor; `place` says where a request could go now.
        """
        while (lane := self._least(bases)) is not None:
            counter = self._ledger.counter(lane.tenant)
            found = self._pick(lane, place, now)
            if found is None:
                self._park(lane)
                continue
            request, where, passed = found
            following = self._peek(bases)
            self._remove(request)
            if lane.rows:
                self._list(lane)
            self._running[request.id] = lane.tenant
            self._running_count[lane.tenant] = self._running_count.get(lane.tenant, 0) + 1
            return Turn(request, where, counter, following, passed)
        return None

    def wake(self, base_model: str, count: int = WAKE) -> None:
        """Lets parked tenants of a base model be looked at again, those with the least counters first: something that
        they may wait for has happened."""
        heap = self._parked.get(base_model, [])
        while heap and count > 0:
            entry = heapq.heappop(heap)
            if self._valid(entry, "parked"):
                self._list(entry[3])
                count -= 1

    def longest_parked(self, base_model: str) -> Waiting | None:
        """Returns the head of the parked tenant with the least counter, None when nobody is parked."""
        heap = self._parked.get(base_model, [])
        while heap and not self._valid(heap[0], "parked"):
            heapq.heappop(heap)
        return heap[0][3].rows[0][1] if heap else None

    def withdraw(self, request: Waiting) -> bool:
        """Removes a waiting request; False when it does not wait (any more)."""
        return self._remove(request)

    def expire(self, now: float) -> list[Waiting]:
        """Removes and returns the requests that waited longer than a queue may keep them."""
        over = []
        for _, request in self._waiting.values():
            if now - request.arrived < self._residence_s:
                break
            over.append(request)
        for request in over:
            self._remove(request)
        return over

    def finish(self, request_id: str) -> None:
        """Ends a running request; ending it again, or one that never ran, changes nothing."""
        tenant = self._running.pop(request_id, None)
        if tenant is None:
            return
        self._running_count[tenant] -= 1
        if not self._running_count[tenant]:
            del self._running_count[tenant]
        for lane in self._lanes.get(tenant, {}).values():
            if lane.state == "capped":
                self._list(lane)

    def waiting(self) -> Iterator[Waiting]:
        """Yields every waiting request."""
        for lanes in self._lanes.values():
            for lane in lanes.values():
                for _, request in lane.rows:
                    yield request

    def waits(self, tenant: str) -> bool:
        """Says whether a request of this tenant waits."""
        return tenant in self._lanes

    def bases(self) -> tuple[str, ...]:
        """Returns the base models that somebody waits for."""
        return tuple({base for lanes in self._lanes.values() for base in lanes})

    def states(self, now: float) -> list[QueueState]:
        """Returns the queues of all tenants that have requests waiting or running, in order of tenant."""
        states = []
        for tenant in sorted({*self._lanes, *self._running_count}):
            queue = [request for lane in self._lanes.get(tenant, {}).values() for _, request in lane.rows]
            oldest = max((now - request.arrived for request in queue), default=0.0)
            states.append(QueueState(tenant, len(queue), self._running_count.get(tenant, 0), oldest))
        return states

    def knows(self, tenant: str) -> bool:
        """Whether a tenant has something waiting or running, or was the last that waited: its counter matters."""
        return tenant in self._lanes or tenant in self._running_count or tenant == self._last_left

    def _pick(self, lane: _Lane, place: Callable[[Waiting], P | None], now: float) -> tuple[Waiting, P, bool] | None:
        """Returns the tenant's request that goes next, where, and whether it passes its head."""
        strict = lane.passed >= MAX_PASSED or (lane.passed_since is not None and now - lane.passed_since > MAX_PASSED_S)
        chosen: tuple[int, Waiting, P] | None = None
        tried: dict[tuple[str, int], tuple[Waiting, P | None]] = {}
        for index, (_, request) in enumerate(lane.rows[: 1 if strict else LOOK_AHEAD]):
            kind = (request.revision_id, request.answers)
            other, where = tried.get(kind, (None, None))
            # A shorter one may go where a longer one may not.
            if (
                other is None
                or request.prompt_tokens < other.prompt_tokens
                or request.length < other.length
                or request.prefix
                or request.session
                or request.only
            ):
                where = place(request)
                tried[kind] = request, where
            if where is not None and (chosen is None or not where.cold):
                chosen = index, request, where
                if not where.cold:
                    break
        if chosen is None:
            return None
        index, request, where = chosen
        if index == 0:
            lane.passed, lane.passed_since = 0, None
        else:
            lane.passed += 1
            lane.passed_since = now if lane.passed_since is None else lane.passed_since
        return request, where, index > 0

    def _list(self, lane: _Lane) -> None:
        self._ledger.catch_up(lane.tenant)
        lane.state = "listed"
        heapq.heappush(self._listed.setdefault(lane.base_model, []), self._entry(lane))

    def _park(self, lane: _Lane) -> None:
        lane.state = "parked"
        heapq.heappush(self._parked.setdefault(lane.base_model, []), self._entry(lane))

    def _entry(self, lane: _Lane) -> _Entry:
        self._listings += 1
        lane.listing = self._listings
        return (self._ledger.counter(lane.tenant), lane.tenant, lane.listing, lane)

    @staticmethod
    def _valid(entry: _Entry, state: str) -> bool:
        lane = entry[3]
        return lane.listing == entry[2] and lane.state == state and bool(lane.rows)

    def _top(self, base_model: str) -> _Entry | None:
        """Returns the least entry of a base model's heap, with its counter as it is now."""
        heap = self._listed.get(base_model, [])
        while heap:
            entry = heap[0]
            if not self._valid(entry, "listed"):
                heapq.heappop(heap)
            elif self._running_count.get(entry[1], 0) >= self._max_running:
                heapq.heappop(heap)[3].state = "capped"
            elif entry[0] < self._ledger.counter(entry[1]):
                heapq.heapreplace(heap, self._entry(entry[3]))
            else:
                return entry
        return None

    def _least(self, bases: Collection[str]) -> _Lane | None:
        """Takes the lane of the tenant with the least counter off its heap."""
        tops = [top for base in bases if (top := self._top(base)) is not None]
        if not tops:
            return None
        least = min(tops)
        return heapq.heappop(self._listed[least[3].base_model])[3]

    def _peek(self, bases: Collection[str]) -> float | None:
        return min((top[0] for base in bases if (top := self._top(base)) is not None), default=None)

    def _lift(self, tenant: str) -> None:
        """Applied to a tenant that had nothing waiting. One at its running limit does not hold the others back, nor
        does one that waits for a load."""
        least = self._peek(self._listed)
        if least is not None:
            self._ledger.lift(tenant, least)
        elif self._waiting:
            self._ledger.lift(tenant, self._ledger.served_ms)
        elif self._last_left:
            self._ledger.lift(tenant, self._ledger.counter(self._last_left))

    def _remove(self, request: Waiting) -> bool:
        found = self._waiting.pop(request.id, None)
        if found is None:
            return False
        key, _ = found
        lanes = self._lanes[request.tenant]
        lane = lanes[request.base_model]
        index = bisect.bisect_left(lane.rows, key, key=lambda row: row[0])
        del lane.rows[index]
        if index == 0:
            lane.passed, lane.passed_since = 0, None
        if not lane.rows:
            del lanes[request.base_model]
            if not lanes:
                del self._lanes[request.tenant]
                self._last_left = request.tenant
        return True
