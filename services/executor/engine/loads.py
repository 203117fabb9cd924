"""Loads in progress: pages reserved, then written in bounded pieces between steps, so that no running row waits.

Owned by the device thread, except that the pool's accounting is guarded by the engine's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from services.executor.adapter_pool import AdapterPool, Berth
from services.executor.engine.device_pool import DevicePool
from services.executor.engine.staging import Staged
from services.executor.request import RefusalReason, Refused


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """How long a load waited for pages and took to be copied, in milliseconds, and the bytes copied."""

    reserve_ms: float
    transfer_ms: float
    size_bytes: int


class Lease:
    """Keeps a revision on the device until `release`, which counts once however often it is called.

    `times` are those of the load that the lease came from, None for one that found the revision there.
    """

    __slots__ = ("_release", "revision_id", "times")

    def __init__(self, revision_id: str, release: Callable[[], None]) -> None:
        self.revision_id = revision_id
        self.times: LoadTimes | None = None
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(slots=True)
class _Load:
    staged: Staged
    tenant: str
    asked_at: float
    waiters: list[Future[Lease]] = field(default_factory=list)
    pages: tuple[int, ...] | None = None
    reserved_at: float = 0.0
    copied: int = 0
    writer: Iterator[int] | None = None


class Loads:
    """One load per revision whoever asks. Whichever comes first is tried first; who needs more room than there is lets
    later ones pass. What fails on the device fails its load alone."""

    def __init__(
        self,
        adapters: AdapterPool,
        device: DevicePool,
        *,
        lock: threading.RLock,
        make_lease: Callable[[str], Lease | None],
        clock: Callable[[], float],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._adapters = adapters
        self._device = device
        self._lock = lock
        self._make_lease = make_lease
        self._clock = clock
        self._on_fault = on_fault
        self._queue: dict[str, _Load] = {}
        self.done = 0

    @property
    def pending(self) -> int:
        return len(self._queue)

    @property
    def writing(self) -> bool:
        """A load has its pages: there is copying to do."""
        return any(load.writer is not None for load in self._queue.values())

    def add(self, staged: Staged, waiter: Future[Lease], *, tenant: str) -> None:
        """Queue a load, or join the one in progress. A resident revision is leased at once."""
        lease = self._make_lease(staged.revision_id)
        if lease is not None:
            _answer(waiter, lease)
            return
        load = self._queue.setdefault(staged.revision_id, _Load(staged, tenant, self._clock()))
        load.waiters.append(waiter)

    def advance(self, budget_bytes: int) -> int:
        """Reserve pages for loads that can have them, then copy up to about `budget_bytes`; returns what is left."""
        for revision_id, load in list(self._queue.items()):
            if load.pages is None:
                with self._alone(revision_id, load):
                    self._reserve(revision_id, load)
        for revision_id, load in list(self._queue.items()):
            if load.writer is None or budget_bytes <= 0:
                continue
            with self._alone(revision_id, load):
                for copied in load.writer:
                    budget_bytes -= copied
                    load.copied += copied
                    if budget_bytes <= 0 or copied == 0:  # 0: the device still copies, there is nothing to do
                        break
                else:
                    self._finish(revision_id, load)
        return budget_bytes

    @contextmanager
    def _alone(self, revision_id: str, load: _Load) -> Iterator[None]:
        """Let what goes wrong with a load end it and nothing else; its pages are erased, as any that lost their owner.

        A device that is gone fails that, and with it the engine.
        """
        try:
            yield
        except Refused as refusal:
            self._fail(revision_id, refusal)
        except Exception as error:
            if load.pages is not None:
                with self._lock:
                    self._adapters.abort(revision_id)
            if isinstance(error, torch.OutOfMemoryError):
                error = Refused(RefusalReason.ADAPTER_POOL_FULL, "the device has no memory left for the adapter")
            else:
                self._on_fault(error)
            self._fail(revision_id, error)

    def _reserve(self, revision_id: str, load: _Load) -> None:
        if all(waiter.cancelled() for waiter in load.waiters):
            del self._queue[revision_id]
            return
        with self._lock:
            if self._adapters.state(revision_id) is Berth.DRAINING:
                return
            staged = load.staged
            load.pages = self._adapters.reserve(
                revision_id, rank=staged.rank, beside=staged.beside_bytes, tenant=load.tenant
            )
        if load.pages is not None:
            load.reserved_at = self._clock()
            self._device.prepare(load.pages)
            load.writer = self._device.write(load.staged, load.pages)

    def _finish(self, revision_id: str, load: _Load) -> None:
        assert load.pages is not None
        self._device.bind(load.staged, load.pages)
        now = self._clock()
        with self._lock:
            self._adapters.ready(revision_id, now=now, load_ms=(now - load.asked_at) * 1000.0)
        del self._queue[revision_id]
        self.done += 1
        reserve_ms, transfer_ms = (load.reserved_at - load.asked_at) * 1000, (now - load.reserved_at) * 1000
        for waiter in load.waiters:
            lease = self._make_lease(revision_id)
            if lease is None:
                _answer(waiter, Refused(RefusalReason.REVOKED, f"{revision_id} may serve no longer"))
                continue
            lease.times = LoadTimes(reserve_ms, transfer_ms, load.copied)
            _answer(waiter, lease)

    def _fail(self, revision_id: str, error: Exception) -> None:
        for waiter in self._queue.pop(revision_id).waiters:
            _answer(waiter, error)

    def stop(self, revision_id: str, reason: RefusalReason) -> None:
        """Give up a queued or half-written load; its waiters get Refused(reason)."""
        load = self._queue.get(revision_id)
        if load is None:
            return
        if load.pages is not None:
            with self._lock:
                self._adapters.abort(revision_id)
        self._fail(revision_id, Refused(reason, f"the load of {revision_id} was stopped"))

    def stop_all(self, reason: RefusalReason) -> None:
        """Give up every load."""
        for revision_id in list(self._queue):
            self.stop(revision_id, reason)


def _answer(waiter: Future[Lease], answer: Lease | Exception) -> None:
    """Give a waiter its lease, or the error; the lease of one that has gone away is released."""
    heard = waiter.set_running_or_notify_cancel()
    if not isinstance(answer, Lease):
        if heard:
            waiter.set_exception(answer)
    elif heard:
        waiter.set_result(answer)
    else:
        answer.release()
