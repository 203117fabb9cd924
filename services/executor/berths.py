"""Brings revisions to the device: one load per revision whoever asks, a lease for everyone who waited.

    standing (signed, fresh) -> loader (sealed bytes) -> intake and staging (in a thread) -> pages (by the engine)

The standing is checked again after the bytes have come. A load that nobody waits for any more is given up. What this
device can never hold is remembered, and not fetched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from services.executor.engine.build import Device
from services.executor.engine.loads import Lease
from services.executor.engine.staging import Staged
from services.executor.measure import looked, staged
from services.executor.ports import Loader, Registry, Stage
from services.executor.request import RefusalReason, Refused
from services.executor.sealed_bytes import read_sealed
from services.executor.wire import refusal
from services.shared import metrics, telemetry, tracing
from services.shared.catalog import RevisionItem
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.futures import fault_of, result_of
from services.shared.statements import Record

log = structlog.get_logger()

_T = TypeVar("_T")

MAX_REMEMBERED = 4096
# Staged revisions in this process's memory, for each load at a time: those that wait for room hold up no others.
STAGED = 4
# The same bytes on the same device are refused for the same reason.
_FOR_EVER = (RefusalReason.ADAPTER_TOO_LARGE, RefusalReason.ADAPTER_UNSUPPORTED, RefusalReason.ADAPTER_NOT_FINITE)


@dataclass(slots=True)
class _Load:
    revision_id: str
    stages: list[Stage] = field(default_factory=list)
    waiters: list[asyncio.Future[Lease]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def note(self, stage: Stage) -> None:
        staged(stage)
        self.stages.append(stage)
        self.changed.set()


class Berths:
    """See the module's text. Owned by the event loop."""

    def __init__(
        self,
        device: Device,
        *,
        loader: Loader,
        registry: Registry,
        base_id: str,
        clock: Clock,
        max_loads: int,
        timeout_s: float,
    ) -> None:
        self._device = device
        self._loader = loader
        self._registry = registry
        self._base_id = base_id
        self._clock = clock
        self._timeout_s = timeout_s
        self._staged = asyncio.Semaphore(STAGED * max_loads)
        self._slots = asyncio.Semaphore(max_loads)
        self._loads: dict[str, _Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those of loads that were given up too
        self._never: dict[str, Refused] = {}
        self._stories: dict[str, tuple[Stage, ...]] = {}

    @property
    def loading(self) -> int:
        """Loads under way."""
        return len(self._loads)

    async def hold(self, revision_id: str) -> tuple[Lease, float]:
        """Return a lease on the revision, and how many milliseconds were spent bringing it here (0: it was here).

        Raises:
            LoraportError: why it cannot be on the device.
        """
        lease = self._device.engine.acquire(revision_id)
        looked(hit=lease is not None)
        if lease is not None:
            return lease, 0.0
        started = self._clock.monotonic()
        with tracing.part("executor.load", joined=revision_id in self._loads) as span:
            load, waiter = self._join(revision_id)
            lease = await self._wait(load, waiter)
            span.set_attributes({f"{stage.name.lower()}_ms": stage.elapsed_ms for stage in load.stages})
        return lease, (self._clock.monotonic() - started) * 1000

    async def ensure(self, revision_id: str) -> AsyncGenerator[Stage, None]:
        """Bring the revision to the device and yield the stages of its load as they end, READY last.

        Raises:
            LoraportError: as `hold`.
        """
        lease = self._device.engine.acquire(revision_id)
        if lease is not None:
            lease.release()
            yield Stage("READY", 0.0)
            return
        load, waiter = self._join(revision_id)
        try:
            shown = 0
            while not waiter.done() or shown < len(load.stages):
                while shown < len(load.stages):
                    shown += 1
                    yield load.stages[shown - 1]
                load.changed.clear()
                if shown == len(load.stages) and not waiter.done():
                    turn = asyncio.create_task(load.changed.wait())
                    await asyncio.wait({waiter, turn}, return_when=asyncio.FIRST_COMPLETED)
                    turn.cancel()
            waiter.result()
        finally:
            self._leave(load, waiter)
            _give_back(waiter)

    def stages(self, revision_id: str) -> tuple[Stage, ...]:
        """Return the stages of the load that brought (or brings) a revision here."""
        load = self._loads.get(revision_id)
        return tuple(load.stages) if load is not None else self._stories.get(revision_id, ())

    def gone(self, items: Iterable[RevisionItem]) -> None:
        """Revisions that may serve no longer: stop their loads, end their requests, erase them."""
        residents = {r.revision_id for r in self._device.engine.state().residents}
        for item in items:
            load = self._loads.get(item.revision_id)
            if load is not None:
                self._settle(load, LoraportError("REVISION_NOT_ACTIVE"))
                self._stop(load)
            self._never.pop(item.revision_id, None)
            if item.revision_id in residents:
                telemetry.count(metrics.EVICTIONS, reason="revoked")
            self._device.engine.revoke(item.revision_id, final=item.state == "REVOKED")
            log.info("revision may serve no longer", revision_id=item.revision_id, state=item.state)

    async def close(self) -> None:
        """Give up all loads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _join(self, revision_id: str) -> tuple[_Load, asyncio.Future[Lease]]:
        load = self._loads.get(revision_id)
        if load is None:
            load = self._loads[revision_id] = _Load(revision_id)
            load.task = asyncio.create_task(self._run(load))
            self._tasks.add(load.task)
            load.task.add_done_callback(self._tasks.discard)
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        load.waiters.append(waiter)
        return load, waiter

    async def _wait(self, load: _Load, waiter: asyncio.Future[Lease]) -> Lease:
        try:
            return await waiter
        except asyncio.CancelledError:
            # The answer may have come in the moment of the cancellation: then the lease is ours to give back.
            _give_back(waiter)
            raise
        finally:
            self._leave(load, waiter)

    def _leave(self, load: _Load, waiter: asyncio.Future[Lease]) -> None:
        if waiter in load.waiters:
            load.waiters.remove(waiter)
            if not load.waiters:
                self._stop(load)

    def _stop(self, load: _Load) -> None:
        """Give a load up. Whoever asks for its revision from now on gets another one."""
        if self._loads.get(load.revision_id) is load:
            del self._loads[load.revision_id]
        assert load.task is not None
        load.task.cancel()

    async def _run(self, load: _Load) -> None:
        """The load's task: ends with every waiter answered."""
        revision_id = load.revision_id
        try:
            lease = await self._bring(load)
        except Refused as error:
            if error.reason in _FOR_EVER:
                _remember(self._never, revision_id, error)
            self._settle(load, refusal(error))
        except LoraportError as error:
            self._settle(load, error)
        except asyncio.CancelledError:  # Those of a load that was given up are answered; this process ends.
            self._settle(load, LoraportError("DRAINING", "the load was stopped", retry_after_s=1.0))
            raise
        except Exception as error:
            log.error("a load failed unexpectedly", revision_id=revision_id, exc_info=error)
            self._settle(load, LoraportError("INTERNAL", "the load failed"))
        else:
            self._settle(load)
            lease.release()
        finally:
            _remember(self._stories, revision_id, tuple(load.stages))
            if self._loads.get(revision_id) is load:
                del self._loads[revision_id]

    def _settle(self, load: _Load, error: LoraportError | None = None) -> None:
        """Answer every waiter: with the error, or else with a lease of its own."""
        waiters, load.waiters = load.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            lease = self._device.engine.acquire(load.revision_id) if error is None else None
            if lease is not None:
                waiter.set_result(lease)
            else:
                waiter.set_exception(error or LoraportError("REVISION_NOT_ACTIVE"))
        load.changed.set()

    async def _bring(self, load: _Load) -> Lease:
        revision_id, started = load.revision_id, self._clock.monotonic()
        never = self._never.get(revision_id)
        if never is not None:
            raise Refused(never.reason, never.detail)
        async with self._staged:
            async with self._slots:
                await self._registry.require_fresh()
                record = (await self._registry.standing(revision_id)).record
                if record.base_id != self._base_id:
                    raise LoraportError("WRONG_BASE")
                staged = await self._stage(record, load)
                await self._registry.standing(revision_id)
            lease = await self._place(staged, record.tenant)
        if lease.times is not None:
            load.note(Stage("RESERVE", lease.times.reserve_ms))
            load.note(Stage("TRANSFER", lease.times.transfer_ms, lease.times.size_bytes))
        load.note(Stage("READY", (self._clock.monotonic() - started) * 1000, record.weights_size))
        return lease

    async def _stage(self, record: Record, load: _Load) -> Staged:
        """Get the bytes, check and arrange them; the loader's memory is held no longer than that."""
        try:
            async with asyncio.timeout(self._timeout_s):
                host = await self._loader.fetch(record.revision_id, size_bytes=record.weights_size, on_stage=load.note)
        except TimeoutError:
            raise LoraportError("LOADER_UNAVAILABLE", "the loader took too long", retry_after_s=1.0) from None
        try:
            return await _to_the_end(lambda: self._device.stage(read_sealed(record, host)))
        finally:
            # After a second cancellation the thread may still look at the bytes: the mapping is its own, and lasts.
            host.give_back()

    async def _place(self, staged: Staged, tenant: str) -> Lease:
        """Wait for the engine to write the pages; while all pages are in use, for room."""
        answer = self._device.engine.load(staged, tenant=tenant)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            _abandon(answer)
            raise LoraportError("OVERLOADED", "all pages of the adapter pool are in use", retry_after_s=1.0) from None
        except asyncio.CancelledError:
            _abandon(answer)
            raise


async def _to_the_end(work: Callable[[], Staged]) -> Staged:
    """Run it in a thread, and wait for that also when cancelled: the slot of a load is that of a thread."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        fault_of(running)  # nobody else looks at it
        raise


def _remember(known: dict[str, _T], revision_id: str, value: _T) -> None:
    if len(known) >= MAX_REMEMBERED:
        known.clear()
    known[revision_id] = value


def _give_back(waiter: asyncio.Future[Lease] | Future[Lease]) -> None:
    """Release the lease that a waiter was given, if it was."""
    if (lease := result_of(waiter)) is not None:
        lease.release()


def _abandon(answer: Future[Lease]) -> None:
    """Nobody waits for this lease: stop the wait, or give the lease back when it comes."""
    answer.cancel()
    answer.add_done_callback(_give_back)
