"""Merged mode: one revision folded into the base's weights, for an executor that serves it alone.

    GROUPED --ask--> MERGING --idle--> MERGED --back--> UNMERGING --idle--> GROUPED

Weights change only while nothing runs and nobody holds a lease: a row is computed by one arithmetic from its first
token to its last. On the way, and for other rows while merged, requests are refused with a reason that says retry.
A revision that may serve no longer leaves at once: its requests have been ended before.

The touched weights are copied before they are changed, and the copies are put back: the same bits, not a subtraction.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum

import torch

from services.executor.adapter_pool import AdapterPool, Berth
from services.executor.engine.device_pool import DevicePool
from services.executor.engine.runner import Runner
from services.executor.model.interface import HEAD_GROUP, Decoder
from services.executor.request import IllegalMove, RefusalReason, Refused


class Mode(StrEnum):
    GROUPED = "grouped"
    MERGING = "merging"
    MERGED = "merged"
    UNMERGING = "unmerging"


_MOVES = {
    (Mode.GROUPED, "ask"): Mode.MERGING,
    (Mode.MERGING, "idle"): Mode.MERGED,
    (Mode.MERGING, "leave"): Mode.GROUPED,  # taken back, refused by the weights, or gone
    (Mode.MERGED, "back"): Mode.UNMERGING,
    (Mode.MERGED, "leave"): Mode.GROUPED,  # gone
    (Mode.UNMERGING, "leave"): Mode.GROUPED,
}


class Merger:
    """Folds a bound revision of the pool into the decoder's weights, and takes it out again. Device thread only."""

    def __init__(self, decoder: Decoder, pool: DevicePool) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pristine: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def merge(self, revision_id: str) -> None:
        """Raises Refused when the merged weights would be wrong: a tied embedding, or numbers that overflow."""
        tied = not any(group.name == HEAD_GROUP for group in self._decoder.groups)
        try:
            for path, kind, delta in self._pool.deltas(revision_id):
                if tied and kind == "embedding":
                    raise Refused(RefusalReason.ADAPTER_UNSUPPORTED, f"{path} is the output head too; it cannot merge")
                weight = self._decoder.weight(path)
                self._pristine[path] = weight.clone()
                weight.copy_(weight.float().add_(delta))
                if not bool(torch.isfinite(weight).all()):
                    raise Refused(RefusalReason.ADAPTER_NOT_FINITE, f"{path}: a merged weight is not finite")
        except BaseException:
            self.unmerge()
            raise

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the weights back as they were before `merge`, bit for bit."""
        for path, weight in self._pristine.items():
            self._decoder.weight(path).copy_(weight)
        self._pristine.clear()


class Modes:
    """The mode of an engine. Guarded by the engine's lock; `advance` and `gone` run on the device thread."""

    def __init__(
        self, runner: Runner, adapters: AdapterPool, *, dedicated: bool, forget_keys: Callable[[str], object]
    ) -> None:
        """`forget_keys` drops the cached keys of a revision: after a change they are of the other arithmetic."""
        self._runner = runner
        self._merger = Merger(runner.decoder, runner.pool)
        self._adapters = adapters
        self._dedicated = dedicated
        self._forget_keys = forget_keys
        self._waiters: list[Future[None]] = []
        self.mode = Mode.GROUPED
        self.revision_id: str | None = None

    @property
    def merged(self) -> str | None:
        """The revision that is in the weights now."""
        return self.revision_id if self.mode in (Mode.MERGED, Mode.UNMERGING) else None

    @property
    def turning(self) -> bool:
        return self.mode in (Mode.MERGING, Mode.UNMERGING)

    def admit(self, revision_id: str | None) -> None:
        """Raises Refused when a request cannot join now."""
        if self.mode is Mode.GROUPED or (self.mode is Mode.MERGED and revision_id == self.revision_id):
            return
        doing = "is changing its mode" if self.turning else "serves another revision in merged mode"
        raise Refused(RefusalReason.MERGED_MODE, f"the executor {doing}")

    def ask(self, revision_id: str | None) -> Future[None]:
        """Enter merged mode for a resident revision, or leave it (None), when nothing runs any more.

        Raises:
            Refused: SHARED_EXECUTOR, NOT_RESIDENT, MERGED_MODE (for another revision, or on the way back).
        """
        waiter: Future[None] = Future()
        self._waiters.append(waiter)
        try:
            done = self._ask_back() if revision_id is None else self._ask(revision_id)
        except Refused:
            self._waiters.remove(waiter)
            raise
        if done:
            self._settle(None)
        return waiter

    def _ask(self, revision_id: str) -> bool:
        if not self._dedicated:
            raise Refused(RefusalReason.SHARED_EXECUTOR, "merged mode is for a dedicated executor")
        if self._adapters.state(revision_id) is not Berth.READY:
            raise Refused(RefusalReason.NOT_RESIDENT, f"{revision_id} is not on the device")
        if self.mode is Mode.GROUPED:
            self._move("ask")
            self.revision_id = revision_id
            self._adapters.pin(revision_id, pinned=True)
        elif self.revision_id != revision_id or self.mode is Mode.UNMERGING:
            raise Refused(RefusalReason.MERGED_MODE, f"the executor is {self.mode} for {self.revision_id}")
        return self.mode is Mode.MERGED

    def _ask_back(self) -> bool:
        if self.mode is Mode.MERGING:
            waiter = self._waiters.pop()
            self._leave(Refused(RefusalReason.MERGED_MODE, "the change was taken back"))
            self._waiters.append(waiter)
        elif self.mode is Mode.MERGED:
            self._move("back")
        return self.mode is Mode.GROUPED

    def advance(self, *, open_requests: int) -> None:
        """Change the weights if that is asked for and nothing runs or holds a lease."""
        if self.turning and not open_requests and not any(r.leases for r in self._adapters.residents()):
            revision_id = self.revision_id
            assert revision_id is not None
            if self.mode is Mode.UNMERGING:
                self._merger.unmerge()
                self._leave(None)
            else:
                self._enter(revision_id)
            self._forget_keys(revision_id)

    def _enter(self, revision_id: str) -> None:
        try:
            self._merger.merge(revision_id)
        except Refused as refusal:
            self._leave(refusal)
        else:
            self._move("idle")
            self._settle(None)

    def gone(self, revision_id: str) -> None:
        """Leave at once for a revision that may serve no longer; no request of it is open."""
        if revision_id == self.revision_id:
            if self.merged is not None:
                self._merger.unmerge()
            self._leave(Refused(RefusalReason.REVOKED, f"{revision_id} may serve no longer"))

    def _leave(self, reason: Refused | None) -> None:
        self._move("leave")
        if self.revision_id is not None and self._adapters.state(self.revision_id) is not None:
            self._adapters.pin(self.revision_id, pinned=False)
        self.revision_id = None
        self._settle(reason)

    def _move(self, event: str) -> None:
        after = _MOVES.get((self.mode, event))
        if after is None:
            raise IllegalMove(f"{self.mode} and {event}")
        self.mode = after
        self._runner.merged = self.merged

    def _settle(self, error: Refused | None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
