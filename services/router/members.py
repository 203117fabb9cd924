"""The books on every executor: what it last reported, and what this router has sent to it. Pure; `fleet.py` asks.

An executor serves while its `fault` is empty. That it has begun a request is its word that it has the revision, until
its next report. The books count answers from `begin` until a flight is released, its
prompt until the first token, and a load until the executor has begun the request that it is for.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from services.router.fleet_view import DRAINED, PEAK_S, ExecutorView, FleetView, newer
from services.router.working_set import WorkingSet
from services.shared.residency import Notice, Resident

UNKNOWN = "has not answered yet"
# How long a revision gives way to one that starves before that must have taken its room.
DRAIN_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What an executor says of its size; 0 for what it does not say. A page holds `page_rows` rank rows."""

    max_rank: int = 0
    max_context: int = 0
    page_rows: int = 0
    page_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Holdings:
    """What an executor holds by its own word: `pages` of each revision, `used` in all, `ready` those that are whole."""

    resident: Mapping[str, Resident]
    pages: Mapping[str, int]
    used: int
    total: int
    ready: frozenset[str]


@dataclasses.dataclass(slots=True)
class _Member:
    base_model: str
    fault: str = UNKNOWN
    drained: bool = False
    shape: Shape = Shape()
    report: Notice | None = None
    # Answers awaited, by revision and by tenant; loads under way, and for which tenants.
    in_flight: Counter[str] = dataclasses.field(default_factory=Counter)
    held: Counter[str] = dataclasses.field(default_factory=Counter)
    loading: dict[str, str] = dataclasses.field(default_factory=dict)
    # Prompts by tenant, in tokens, that were sent and are not computed yet; most answers by tenant of late, and when:
    # the oldest first.
    ahead: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    peaked: dict[str, float] = dataclasses.field(default_factory=dict)
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    # What was asked for there of late, in pages; and by tenant from when on it may take others' room again.
    recent: WorkingSet = dataclasses.field(default_factory=lambda: WorkingSet(window_s=PEAK_S))
    turns: dict[str, float] = dataclasses.field(default_factory=dict)
    # Revisions that requests were begun with since the report.
    told: set[str] = dataclasses.field(default_factory=set)
    # Leases that the report counts beyond this router's own.
    foreign: frozenset[str] = frozenset()
    # Revision → until when it gives way.
    draining: dict[str, float] = dataclasses.field(default_factory=dict)
    # These are made when they are asked for: a view with every request, holdings after reports and first uses only.
    holdings: _Holdings | None = None
    view: ExecutorView | None = None


class Flight:
    """One request of this router on one executor, counted until it is released."""

    def __init__(
        self, executor: str, *, begun: Callable[[int], None], computed: Callable[[], None], release: Callable[[], None]
    ) -> None:
        self.executor = executor
        self._begun: Callable[[int], None] | None = begun
        self._computed: Callable[[], None] | None = computed
        self._release: Callable[[], None] | None = release

    def begun(self, tokens: int) -> None:
        """Its revision is there and its prompt is next, of which so many tokens are to be computed; once is enough."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun(tokens)

    def computed(self) -> None:
        """Its prompt is computed; once is enough."""
        computed, self._computed = self._computed, None
        if computed is not None:
            computed()

    def release(self) -> None:
        """Ends the count; once is enough."""
        release, self._release = self._release, None
        if release is not None:
            self._begun = None
            release()


class Members:
    """See the module's text. `executors` maps each name to its base model; `reserve` see `ExecutorView`."""

    def __init__(self, executors: Mapping[str, str], *, window: int, reserve: int = 0) -> None:
        self._members = {name: _Member(base) for name, base in sorted(executors.items())}
        self._window = window
        self._reserve = reserve
        self._view: FleetView | None = None
        # Called after every change that may let a request of this base model go.
        self.on_change: Callable[[str], None] = lambda base_model: None

    def view(self) -> FleetView:
        """Returns the fleet as it is now."""
        if self._view is None:
            self._view = FleetView(tuple(self.executor(name) for name in self._members))
        return self._view

    def executor(self, name: str) -> ExecutorView:
        """Returns one executor as it is now. Raises KeyError."""
        member = self._members[name]
        if member.view is None:
            member.view = self._executor(name, member)
        return member.view

    def base_model(self, name: str) -> str:
        """Returns the base model of an executor. Raises KeyError."""
        return self._members[name].base_model

    def fault(self, name: str) -> str:
        """Returns why an executor does not serve, empty when it does. Raises KeyError."""
        return self._members[name].fault

    def epoch(self, name: str) -> int:
        """Returns the start counter of the executor's process, 0 before it has reported."""
        report = self._members[name].report
        return report.epoch if report is not None else 0

    def rows(self, name: str, revision_id: str) -> int:
        """Returns the answers of a revision that this router awaits from an executor."""
        return self._members[name].in_flight.get(revision_id, 0)

    def set_fault(self, name: str, fault: str) -> bool:
        """Takes an executor out, or with an empty fault back in. Returns whether that is news."""
        member = self._members[name]
        news, member.fault = member.fault != fault, fault
        self._changed(member)
        return news

    def set_drained(self, name: str, drained: bool) -> None:
        """Stops or resumes sending to an executor, by an admin's word. Raises KeyError."""
        member = self._members[name]
        member.drained = drained
        self._changed(member)

    def answered(self, name: str, report: Notice, shape: Shape) -> None:
        """Takes an executor's own answer, which counts also when a new process counts epochs from a lower number."""
        member = self._members[name]
        member.shape = shape
        self._take(member, report)

    def heard(self, name: str, notice: Notice) -> None:
        """Takes a notice of the board, unless a later one is known."""
        member = self._members[name]
        if newer(member.report, notice) is not member.report:
            self._take(member, notice)

    def begin(
        self,
        name: str,
        revision_id: str,
        *,
        tenant: str,
        now: float,
        weight: float = 1.0,
        answers: int = 1,
        tokens: int = 0,
        pages: int = 0,
        turn_s: float = 0.0,
        cold: bool = False,
    ) -> Flight:
        """Counts a request that is sent to an executor now, by its answers: each is a row there. `turn_s` see there."""
        member = self._members[name]
        member.in_flight[revision_id] += answers
        member.held[tenant] += answers
        member.weights[tenant] = weight
        _add_prompt(member.ahead, tenant, tokens)
        if pages:
            member.recent.asked(revision_id, pages, now, tenant=tenant)
        if turn_s:
            member.turns = {key: until for key, until in member.turns.items() if until > now} | {tenant: now + turn_s}
        if cold:
            member.loading[revision_id] = tenant
            member.draining.clear()  # what gave way has done so
        _peak(member, tenant, now)
        self._dirty(member)

        def loaded() -> None:
            nonlocal cold
            if cold:
                member.loading.pop(revision_id, None)
            cold = False

        def expect(count: int) -> None:
            nonlocal tokens
            _drop_prompt(member.ahead, tenant, tokens)
            _add_prompt(member.ahead, tenant, count)
            tokens = count

        def begun(count: int) -> None:
            loaded()
            expect(count)
            self._tell(member, revision_id)

        def computed() -> None:
            if tokens:
                expect(0)
                self._changed(member)

        def release() -> None:
            loaded()
            computed()
            _subtract(member.in_flight, revision_id, answers)
            _subtract(member.held, tenant, answers)
            self._changed(member)

        return Flight(name, begun=begun, computed=computed, release=release)

    def give_way(self, name: str, *, pages: int, now: float) -> str:
        """Chooses a revision on an executor that gets no further request there until its room is taken or `DRAIN_S`
        have passed, and returns it; empty when one gives way already, or none would help.

        The revision with the fewest rows there is idle soonest.
        """
        member = self._members[name]
        member.draining = {key: until for key, until in member.draining.items() if until > now}
        self._dirty(member)
        view = self.executor(name)
        if member.draining:
            return ""
        large = [
            key
            for key, resident in view.resident.items()
            if key in view.busy and self._pages(member, resident.size_bytes) >= pages
        ]
        if not large:
            return ""
        chosen = min(large, key=lambda key: (member.in_flight.get(key, 0), key))
        member.draining[chosen] = now + DRAIN_S
        self._dirty(member)
        return chosen

    def _executor(self, name: str, member: _Member) -> ExecutorView:
        shape, holdings = member.shape, member.holdings
        if holdings is None:
            holdings = member.holdings = self._holdings(member)
        busy = frozenset(member.in_flight) | member.foreign
        coming = sum(self._load_pages(member) for key in member.loading if key not in holdings.resident)
        return ExecutorView(
            name=name,
            base_model=member.base_model,
            serving=not member.fault and not member.drained,
            why_not=DRAINED if member.drained else member.fault,
            in_flight=member.in_flight.total(),
            window=self._window,
            reserve=self._reserve,
            resident=holdings.resident,
            expected=frozenset(member.in_flight),
            held=MappingProxyType(dict(member.held)),
            peaks=MappingProxyType(member.peaks.copy()),
            weights=MappingProxyType(member.weights),
            ahead=MappingProxyType(dict(member.ahead)),
            loading=MappingProxyType(dict(member.loading)),
            recent=member.recent,
            turns=MappingProxyType(dict(member.turns)),
            draining=frozenset(member.draining),
            busy=busy,
            page_rows=shape.page_rows,
            free_pages=holdings.total - holdings.used - coming,
            idle_pages=sum(map(holdings.pages.__getitem__, holdings.ready - busy)) if holdings.used else 0,
            page_count=holdings.total,
            max_rank=shape.max_rank,
            max_context=shape.max_context,
            report=member.report,
        )

    def _holdings(self, member: _Member) -> _Holdings:
        report = member.report
        resident = {key: Resident(key, "READY", 0, 0) for key in member.told}
        if report is not None:
            resident |= {r.revision_id: r for r in report.revisions}
        pages = {key: self._pages(member, held.size_bytes) for key, held in resident.items()}
        return _Holdings(
            MappingProxyType(resident),
            pages,
            sum(pages.values()),
            self._pages(member, report.pool_size_bytes) if report is not None else 0,
            frozenset(key for key, held in resident.items() if held.state == "READY"),
        )

    @staticmethod
    def _pages(member: _Member, size_bytes: int) -> int:
        return math.ceil(size_bytes / member.shape.page_bytes) if member.shape.page_bytes else 0

    @staticmethod
    def _load_pages(member: _Member) -> int:
        """A load under way takes at least a page; what it takes in full, the next report says."""
        return 1 if member.shape.page_bytes else 0

    def _take(self, member: _Member, report: Notice) -> None:
        member.report = report
        member.holdings = None
        member.told.clear()
        member.foreign = frozenset(
            r.revision_id for r in report.revisions if r.lease_count > member.in_flight.get(r.revision_id, 0)
        )
        self._changed(member)

    def _tell(self, member: _Member, revision_id: str) -> None:
        if revision_id and revision_id not in member.told:
            member.told.add(revision_id)
            member.holdings = None
        self._changed(member)

    def _dirty(self, member: _Member) -> None:
        member.view = self._view = None

    def _changed(self, member: _Member) -> None:
        self._dirty(member)
        self.on_change(member.base_model)


def _peak(member: _Member, tenant: str, now: float) -> None:
    """Notes that a tenant has as many answers as it had of late, or more, and forgets what is long past."""
    held = member.held[tenant]
    if held >= member.peaks.get(tenant, 0):
        member.peaked.pop(tenant, None)
        member.peaks[tenant], member.peaked[tenant] = held, now
    while member.peaked:
        oldest = next(iter(member.peaked))
        if member.peaked[oldest] > now - PEAK_S:
            break
        del member.peaks[oldest], member.peaked[oldest]
    if len(member.weights) > 2 * (len(member.peaks) + len(member.held)):
        member.weights = {key: w for key, w in member.weights.items() if key in member.peaks or key in member.held}


def _subtract(counter: Counter[str], key: str, count: int) -> None:
    counter[key] -= count
    if counter[key] <= 0:
        del counter[key]


def _add_prompt(ahead: dict[str, tuple[int, ...]], tenant: str, tokens: int) -> None:
    if tokens:
        ahead[tenant] = (*ahead.get(tenant, ()), tokens)


def _drop_prompt(ahead: dict[str, tuple[int, ...]], tenant: str, tokens: int) -> None:
    if not tokens:
        return
    left = list(ahead.pop(tenant))
    left.remove(tokens)
    if left:
        ahead[tenant] = tuple(left)
