"""What the router tells of itself: one request as its metrics see it, and the gauges."""

from collections import Counter
from types import TracebackType
from typing import Literal, Self

from services.router.config import Objectives
from services.router.dispatch import Dispatch
from services.router.door import Job
from services.router.events import Event, Finished, Scored, Started, Tokens
from services.router.fleet_view import FleetView
from services.router.ledger import KINDS
from services.router.ports import Catalog
from services.router.working_set import WorkingSet
from services.shared import metrics, telemetry, tracing
from services.shared.catalog import TenantItem
from services.shared.checks import Finding, State
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.metrics import tenant_class


class Watched:
    """One request, from its arrival to its end, told once. Use it in a `with` statement; `end` is safe to repeat."""

    def __init__(
        self,
        kind: Literal["generate", "score"],
        weight: float,
        working_set: WorkingSet,
        *,
        objectives: Objectives,
        clock: Clock,
    ) -> None:
        self._kind = kind
        self._class = tenant_class(weight)
        self._working_set = working_set
        self._objectives = objectives
        self._clock = clock
        self._arrived = clock.monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0
        self._outcome = "CANCELLED"
        self._ended = False
        self._span = tracing.current()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._outcome = "OK"
        elif isinstance(error, LoraportError):
            self._outcome = error.reason
        elif isinstance(error, Exception):
            self._outcome = "INTERNAL"
        self.end()

    def admitted(self, job: Job) -> None:
        """The request was found to be its tenant's to make."""
        if job.revision is not None:
            self._working_set.asked(job.revision_id, job.revision.size_bytes, self._clock.monotonic())
        if self._span.is_recording():
            prompt = len(job.prompt_token_ids)
            self._span.set_attributes({"revision_id": job.revision_id or "base", "prompt_tokens": prompt})

    def saw(self, event: Event) -> None:
        """The caller is told something."""
        match event:
            case Tokens() if event.token_ids:
                self._last = self._clock.monotonic()
                self._tokens += len(event.token_ids)
            case Started():
                self._began(event.revision_id, event.executor, queue_ms=event.queue_ms, load_ms=event.load_ms)
            case Finished() if self._span.is_recording():
                self._span.set_attributes(
                    {
                        "finish_reason": event.reason,
                        "kernel_path": event.kernel_path,
                        "distinct_adapters": event.max_batch_adapter_count,
                        "cached_tokens": event.usage.cached_tokens,
                    }
                )

    def scored(self, scored: Scored) -> None:
        """The caller is told a score, all of it at once."""
        self._began(scored.revision_id, scored.executor, queue_ms=scored.queue_ms, load_ms=scored.load_ms)

    def _began(self, revision_id: str, executor: str, *, queue_ms: float, load_ms: float) -> None:
        self._first = self._last = self._clock.monotonic()
        start = ("cold" if load_ms > 0 else "warm") if revision_id else "base"
        telemetry.observe(metrics.TTFT, self._first - self._arrived, start=start, tenant_class=self._class)
        telemetry.observe(metrics.QUEUE_RESIDENCE, queue_ms / 1000, tenant_class=self._class)
        if self._span.is_recording():
            self._span.set_attributes({"executor": executor, "queue_ms": queue_ms, "load_ms": load_ms, "start": start})

    def end(self) -> None:
        """The call has ended, however it did."""
        if self._ended:
            return
        self._ended = True
        telemetry.count(metrics.REQUESTS, kind=self._kind, outcome=self._outcome, tenant_class=self._class)
        if self._span.is_recording():
            self._span.set_attributes({"outcome": self._outcome, "tokens": self._tokens})
        if self._first is None:
            return
        token_s = (self._last - self._first) / max(1, self._tokens - 1)
        if self._tokens > 1:
            telemetry.observe(metrics.TPOT, token_s, tenant_class=self._class)
        if self._outcome == "OK":
            telemetry.count(metrics.ACCEPTED, verdict=self._verdict(self._first - self._arrived, token_s))

    def _verdict(self, first_s: float, token_s: float) -> str:
        if first_s > self._objectives.first_token_s:
            return "slow_first_token"
        return "slow_tokens" if self._tokens > 1 and token_s > self._objectives.token_s else "met"


class Meter:
    """What every request's metrics share, and the router's gauges."""

    def __init__(
        self, dispatch: Dispatch, catalog: Catalog, *, objectives: Objectives, max_running: int, clock: Clock
    ) -> None:
        self._dispatch = dispatch
        self._catalog = catalog
        self._objectives = objectives
        self._max_running = max_running
        self._clock = clock
        self._working_set = WorkingSet()
        self._counted_epoch = -1

    def watch(self, kind: Literal["generate", "score"], tenant: str) -> Watched:
        """Returns what watches one request of a tenant."""
        owner = self._catalog.view.tenants.get(tenant)
        weight = owner.weight if owner is not None else 1.0
        return Watched(kind, weight, self._working_set, objectives=self._objectives, clock=self._clock)

    def sample(self) -> None:
        """Sets the gauges."""
        view, now = self._catalog.view, self._clock.monotonic()
        telemetry.gauge(metrics.CATALOG_EPOCH, view.epoch)
        _sample_queues(self._dispatch, view.tenants, max_running=self._max_running, now=now)
        _sample_executors(self._dispatch.members.view())
        active, size_bytes = self._working_set.size(now)
        telemetry.gauge(metrics.ACTIVE_REVISIONS, active)
        telemetry.gauge(metrics.WORKING_SET, size_bytes)
        if view.epoch != self._counted_epoch:  # a large catalog is counted when it has changed
            self._counted_epoch = view.epoch
            states = Counter(item.state for item in view.revisions.values())
            for state in metrics.ADAPTERS.labels["state"]:
                telemetry.gauge(metrics.ADAPTERS, states[state], state=state)

    async def check_executors(self) -> Finding:
        """A check for `loraport doctor`."""
        executors = self._dispatch.members.view().executors
        out = [f"{executor.name} {executor.why_not}" for executor in executors if not executor.serving]
        if not executors:
            return Finding("WARNING", "none are configured", "list them in the router's configuration")
        if not out:
            return Finding("GOOD", f"{len(executors)} of {len(executors)} serve")
        state: State = "BAD" if len(out) == len(executors) else "WARNING"
        return Finding(state, "; ".join(out), "see the executor's log; when drained: loraport executor undrain NAME")


def _sample_executors(fleet: FleetView) -> None:
    counts: Counter[str] = Counter()
    capacity = 0
    for executor in fleet.executors:
        counts["serving" if executor.serving else "drained" if executor.drained else "out"] += 1
        capacity += executor.report.pool_size_bytes if executor.serving and executor.report is not None else 0
    for state in metrics.EXECUTORS.labels["state"]:
        telemetry.gauge(metrics.EXECUTORS, counts[state], state=state)
    telemetry.gauge(metrics.CAPACITY, capacity)


def _sample_queues(dispatch: Dispatch, tenants: dict[str, TenantItem], *, max_running: int, now: float) -> None:
    def class_of(tenant: str) -> str:
        return tenant_class(tenants[tenant].weight) if tenant in tenants else "standard"

    queued: Counter[str] = Counter()
    running: Counter[str] = Counter()
    waiting, oldest_s = [], 0.0
    for state in dispatch.queue.states(now):
        queued[class_of(state.tenant)] += state.queued
        running[class_of(state.tenant)] += state.running
        if state.queued:
            waiting.append(dispatch.ledger.counter(state.tenant))
            oldest_s = max(oldest_s, state.oldest_wait_s)
    work: Counter[tuple[str, str]] = Counter()
    accounts = {"": dispatch.ledger.closed, **dispatch.ledger.accounts}  # rollouts are of the class that nobody set
    for tenant, account in accounts.items():
        for kind in KINDS:
            work[kind, class_of(tenant)] += getattr(account, kind) / 1000  # type: ignore[assignment]
    for name in metrics.TENANT_CLASSES:
        telemetry.gauge(metrics.QUEUED, queued[name], tenant_class=name)
        telemetry.gauge(metrics.RUNNING, running[name], tenant_class=name)
        for kind in KINDS:
            telemetry.gauge(metrics.WORK, work[kind, name], work=kind, tenant_class=name)
    telemetry.gauge(metrics.OLDEST_WAIT, oldest_s)
    bound = dispatch.ledger.bound_ms(running=max_running)
    spread = max(waiting) - min(waiting) if waiting else 0.0
    telemetry.gauge(metrics.FAIRNESS_SPREAD, spread / bound if bound else 0.0)
