"""The engine: one device thread that repeats plan, run, commit. Everything else hands it commands.

    commands -> scrub freed pages -> advance loads (bounded) -> plan -> run -> commit -> events to their sinks

Public methods may be called from any thread. Sinks are called on the device thread and must not block. A request that
`submit` accepted ends with exactly one Ended event; its lease is released before that event is delivered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from services.executor.adapter_pool import AdapterPool
from services.executor.engine.loads import Lease, Loads
from services.executor.engine.merging import Modes
from services.executor.engine.open_requests import OpenRequests, Sink
from services.executor.engine.runner import Runner
from services.executor.engine.staging import Staged
from services.executor.engine.state import EngineState, read_state
from services.executor.engine.steps import Steps
from services.executor.kernels.threads import as_here
from services.executor.plan import Plan
from services.executor.request import Event, FinishReason, RefusalReason, Refused, RequestSpec
from services.executor.scheduler import Scheduler
from services.executor.step_meter import StepMeter

_T = TypeVar("_T")
_WHOLE = 2**62  # a budget for all there is


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """`load_bytes_per_step` bounds the erasing and writing of pages between two steps while requests run. `dedicated`
    allows merged mode.

    `check_every_step` verifies all books after every step (tests)."""

    load_bytes_per_step: int = 8 * 2**20
    dedicated: bool = False
    check_every_step: bool = False


class Engine:
    """Owns scheduler, runner and pools from `start` to `close`."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        adapters: AdapterPool,
        clock: Callable[[], float],
        options: EngineOptions | None = None,
        on_fault: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._runner = runner
        self._steps = Steps(runner, on_fault=on_fault)
        self._scheduler = scheduler
        self._adapters = adapters
        self._clock = clock
        self._options = options or EngineOptions()
        self._on_fault = on_fault
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._inbox: deque[Callable[[], None]] = deque()
        self._open = OpenRequests(self._lock, cancel=self.cancel, on_fault=on_fault)
        hold = partial(self.acquire, use=False)
        self._loads = Loads(adapters, runner.pool, lock=self._lock, make_lease=hold, clock=clock, on_fault=on_fault)
        forget = scheduler.blocks.forget
        self._modes = Modes(runner, adapters, dedicated=self._options.dedicated, forget_keys=forget)
        self._thread: threading.Thread | None = None
        self._stirred = self._working = self._stopping = self._draining = self._failed = False
        self.meter = StepMeter()
        self._tokens_out = self._turn = 0

    @property
    def max_length(self) -> int:
        """Longest prompt plus output of one request, in tokens."""
        return self._scheduler.max_length

    def start(self) -> None:
        """Start the device thread. Raises RuntimeError when it was started before."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(None, as_here(self._runner.settle, self._run), "loraport-device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End what runs with DRAINING, stop the device thread and wait for it. Idempotent."""
        with self._wake:
            self._stopping = self._draining = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def validate(self, spec: RequestSpec) -> None:
        """Raises Refused when a request could never be served, whatever the state."""
        self._scheduler.validate(spec)

    def submit(self, spec: RequestSpec, sink: Sink) -> None:
        """Accept one sequence; `sink` then gets Started?, Tokens*, Ended. Takes its own lease on the revision.

        Raises:
            Refused: an argument is out of range, or DUPLICATE_REQUEST, QUEUE_FULL, DRAINING, NOT_RESIDENT.
        """
        self._scheduler.validate(spec)
        with self._lock:
            if self._draining or self._failed:
                raise Refused(RefusalReason.DRAINING, "the executor accepts no more requests")
            self._modes.admit(spec.revision_id)
            if spec.request_id in self._open:
                raise Refused(RefusalReason.DUPLICATE_REQUEST, f"request {spec.request_id} is running")
            if len(self._open) >= self._scheduler.limits.max_waiting:
                raise Refused(RefusalReason.QUEUE_FULL, f"{len(self._open)} requests are open")
            lease = None
            if spec.revision_id is not None:
                lease = self.acquire(spec.revision_id)
                if lease is None:
                    raise Refused(RefusalReason.NOT_RESIDENT, f"{spec.revision_id} is not on the device")
            self._open.add(spec.request_id, sink, lease)
            self._post(lambda: self._scheduler.submit(spec, now=self._clock()))

    def cancel(self, request_id: str) -> None:
        """End a request with CANCELLED before the step after the running one. Unknown and ended ones are ignored."""
        self._post(lambda: self._end(request_id, FinishReason.CANCELLED))

    def acquire(self, revision_id: str, *, use: bool = True) -> Lease | None:
        """Return a lease on a READY revision, None when it must be loaded first. What a load holds is no `use` yet."""
        with self._lock:
            number = self._adapters.lease(revision_id, now=self._clock(), use=use)
            return None if number is None else Lease(revision_id, lambda: self._release(number))

    def load(self, staged: Staged, *, tenant: str = "") -> Future[Lease]:
        """Bring a revision of `tenant` to the device; the future gives a lease that its owner must release.

        Fails with Refused: ADAPTER_TOO_LARGE, REVOKED, DRAINING. Waits for room while all pages are leased; cancel the
        future to stop waiting.
        """
        waiter: Future[Lease] = Future()
        with self._lock:
            if self._draining or self._failed:
                raise Refused(RefusalReason.DRAINING, "the executor accepts no more loads")
            self._post(lambda: self._loads.add(staged, waiter, tenant=tenant))
        return waiter

    def evict(self, revision_id: str) -> Future[int | None]:
        """Allow no new leases and free the pages with the last one.

        Gives the number of leases that still hold it, 0 when it is off the device; None when it was not on it.
        """
        return self.ask(lambda: self._evict(revision_id))

    def revoke(self, revision_id: str, *, final: bool) -> Future[None]:
        """End every request of a revision with REVOKED, erase its pages and cached keys; the engine fails if it cannot.

        It is refused from now on, also while this call is under way; with `final`, for ever.
        """
        with self._lock:
            self._adapters.refuse(revision_id, final=final)
        return self.ask(lambda: self._revoke(revision_id), vital=True)

    def merge(self, revision_id: str | None) -> Future[None]:
        """Enter merged mode for a resident revision, or leave it (None), when nothing runs any more: see merging.py.

        Raises, or fails with, Refused: SHARED_EXECUTOR, MERGED_MODE, NOT_RESIDENT, ADAPTER_*, REVOKED.
        """
        with self._wake:
            waiter = self._modes.ask(revision_id)
            self._stirred = True
            self._wake.notify_all()
        return waiter

    def keep(self, revisions: Iterable[str]) -> None:
        """Keep these revisions from eviction, and no others: see `AdapterPool.keep`."""
        with self._lock:
            self._adapters.keep(revisions)

    def drain(self, on: bool = True) -> None:
        """Accept no further request and no further load, or do so again; what runs goes on."""
        with self._lock:
            self._draining = on or self._stopping

    def state(self) -> EngineState:
        """Return a snapshot of the books."""
        with self._lock:
            flags = {"failed": self._failed, "draining": self._draining, "open_requests": len(self._open)}
            made = {"totals": self.meter.totals, "tokens_out": self._tokens_out}
            return read_state(self._scheduler, self._adapters, self._loads, modes=self._modes, **flags, **made)

    def turn(self) -> int | None:
        """Return which turn the device thread is in, None between turns. No lock: a stuck turn may hold it."""
        return self._turn if self._working else None

    def give_up(self) -> None:
        """The device thread is stuck: say FAILED and take nothing more. What is open stays open. No lock."""
        self._failed = True

    def step(self) -> bool:
        """Do one turn of the loop: the device thread's, or a test's that did not `start`.

        Returns whether a plan was computed.
        """
        self._turn += 1
        self._working = True
        try:
            return self._step()
        finally:
            self._working = False

    def _step(self) -> bool:
        with self._lock:
            self._stirred = False
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()  # What stands behind one that fails is left to _shut.
        # Pages are erased and written between steps: bounded, so that no running row waits long for it.
        budget = _WHOLE if self._scheduler.idle else self._options.load_bytes_per_step
        budget = self._scrub(budget)
        budget = self._loads.advance(budget)
        self._scrub(budget)
        computed = self._compute()
        with self._lock:
            self._modes.advance(open_requests=len(self._open))
        if self._options.check_every_step:
            with self._lock:
                self._scheduler.check()
                self._adapters.check()
        return computed

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._stopping or self._inbox or self._busy()):
                        self._wake.wait()
                    if self._stopping:
                        break
                self.step()
        except BaseException as error:  # A bug in the engine: say so, and end every request rather than hang it.
            with self._lock:
                self._failed = True
            self._on_fault(error)
        self._shut(FinishReason.ENGINE_FAULT if self._failed else FinishReason.DRAINING)

    def _busy(self) -> bool:
        return not self._scheduler.idle or self._loads.writing or self._stirred

    def _compute(self) -> bool:
        if self._scheduler.idle:
            return False
        with self._lock:
            plan = self._scheduler.plan(now=self._clock())
        self._runner.cache.erase(self._scheduler.blocks.take_freed())
        self._open.deliver(self._run_plan(plan) if plan.rows else self._scheduler.take_events())
        return bool(plan.rows)

    def _run_plan(self, plan: Plan) -> tuple[Event, ...]:
        began = self._clock()
        result, whole = self._steps.run(plan)
        with self._lock:
            if whole:
                self.meter.note(plan, result, took_s=self._clock() - began, adapter_bytes=self._adapters.size_bytes)
            self._tokens_out += sum(row.token is not None for row in result.rows)
            return self._scheduler.commit(plan, result, now=self._clock())

    def _end(self, request_id: str, reason: FinishReason) -> None:
        with self._lock:
            self._scheduler.end(request_id, reason)
        self._open.deliver(self._scheduler.take_events())

    def _release(self, number: int) -> None:
        with self._wake:
            self._adapters.release(number)
            self._stirred = True  # Pages may be dirty now, or a load may have room.
            self._wake.notify_all()

    def _evict(self, revision_id: str) -> int | None:
        with self._lock:
            held = {r.revision_id: r.leases for r in self._adapters.residents()}
            if revision_id not in held:
                return None
            if revision_id == self._modes.revision_id:
                raise Refused(RefusalReason.MERGED_MODE, "the revision is merged; leave merged mode first")
            self._loads.stop(revision_id, RefusalReason.NOT_RESIDENT)
            return 0 if self._adapters.drain(revision_id) else held[revision_id]

    def _revoke(self, revision_id: str) -> None:
        self._loads.stop(revision_id, RefusalReason.REVOKED)
        with self._lock:
            self._scheduler.end_revision(revision_id, FinishReason.REVOKED)
            freed, events = self._scheduler.blocks.take_freed(), self._scheduler.take_events()
            self._open.give_back(events)
        try:
            with self._lock:
                self._modes.gone(revision_id)
                self._adapters.drain(revision_id)
            self._scrub(_WHOLE)
            self._runner.cache.clear(freed)
            self._runner.cache.erase(freed)
        finally:  # Who hears of it finds nothing left.
            self._open.deliver(events)

    def _scrub(self, budget: int) -> int:
        """Erase pages without an owner, about `budget` bytes of them; returns what is left of it."""
        with self._lock:
            dirty = self._adapters.take_dirty(budget)
        if dirty:
            self._runner.pool.scrub(dirty)
            with self._lock:
                self._adapters.scrubbed(dirty)
                self._stirred |= self._loads.pending > 0  # A load may have waited for these pages.
        return budget - len(dirty) * self._adapters.page_bytes

    def _shut(self, reason: FinishReason) -> None:
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception as error:
                self._on_fault(error)
        self._loads.stop_all(RefusalReason.DRAINING)
        with self._lock:
            self._scheduler.end_all(reason)
        self._open.deliver(self._scheduler.take_events())
        self._scrub(_WHOLE)

    def _post(self, command: Callable[[], None]) -> bool:
        """Hand a command to the device thread. Returns False when it no longer takes any."""
        with self._wake:
            if self._stopping or self._failed:
                return False
            self._inbox.append(command)
            self._wake.notify_all()
            return True

    def ask(self, question: Callable[[], _T], *, vital: bool = False) -> Future[_T]:
        """Compute something on the device thread, between two steps; fails with Refused: DRAINING when it has ended.

        It is computed also when whoever asked has gone away meanwhile. Where it is `vital`, an error fails the engine.
        """
        answer: Future[_T] = Future()
        if not self._post(lambda: _answer(answer, question, vital=vital)):
            answer.set_exception(Refused(RefusalReason.DRAINING, "the executor has stopped"))
        return answer


def _answer(waiter: Future[_T], question: Callable[[], _T], *, vital: bool) -> None:
    heard = waiter.set_running_or_notify_cancel()
    try:
        result = question()
    except Exception as error:
        if heard:
            waiter.set_exception(error)
        if vital:
            raise
    else:
        if heard:
            waiter.set_result(result)
