"""Executors that went away while they had work of a revision that a rollout tries.

    executor gone ──> who was on board? ──> a loss of every rollout whose new revision was ──> told to the registry

An executor that goes away says who was on board, not who it was. So it is told, and the registry decides: it takes the
share back after the first loss and rolls back after the second. Until its word has come, nothing more goes to that
revision here. It is told once it is certain: when another process answers in its place, when it says itself that it has
failed, or when it has stayed out for `SURE_S` while others answered. If the same process answers again, there was no
loss; it was the way there that failed.

No request of a revision that is on trial is tried on a second executor, and until one has had its first token they go
one by one: so what kills whatever computes it takes down one executor.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from services.shared.catalog import CatalogView, RolloutItem
from services.shared.errors import LoraportError

# How long a revision is suspected once the registry has been told and makes no move.
SUSPECT_S = 30.0
# How long an executor stays out before its process is taken for lost.
SURE_S = 10.0
# How long a request waits for the first one of its revision, which may wait itself.
ALONE_S = 5.0


ON_TRIAL = "the executor went away with a revision that is on trial; ask again"


@dataclass(slots=True)
class Loss:
    """One executor's process that went away in one rollout; `told` is when the registry took it, None before that;
    `since` is from when on it stayed out while others answered. Times in seconds on the caller's monotonic clock."""

    rollout: str
    revision_id: str
    executor: str
    epoch: int
    generation: int
    told: float | None = None
    since: float | None = None
    certain: bool = False


@dataclass(slots=True)
class Losses:
    """See the module's text. Belongs to one event loop."""

    _rollouts: dict[str, RolloutItem] = field(default_factory=dict)
    _losses: dict[tuple[str, str, int], Loss] = field(default_factory=dict)
    # How many losses each revision on trial has had, those that were none included.
    _counts: Counter[str] = field(default_factory=Counter)
    # What is done for rollouts themselves: (executor, revision) → how often.
    _aboard: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Revisions on trial that have had a first token, and the turns of those that have not.
    _proven: set[str] = field(default_factory=set)
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)

    def follow(self, view: CatalogView) -> None:
        """Takes the rollouts that run; what is known of others is dropped."""
        self._rollouts = {item.name: item for item in view.rollouts.values()}
        self._losses = {key: loss for key, loss in self._losses.items() if key[0] in self._rollouts}
        tried = {item.to_revision_id for item in self._rollouts.values()}
        self._proven &= tried
        self._counts = Counter({key: count for key, count in self._counts.items() if key in tried})
        self._turns = {key: lock for key, lock in self._turns.items() if key in tried}

    @contextmanager
    def boarding(self, executor: str, revision_id: str) -> Iterator[None]:
        """Says that an executor has work of a revision that no request's book knows of: a load, a probe."""
        self._aboard[executor, revision_id] += 1
        try:
            yield
        finally:
            self._aboard[executor, revision_id] -= 1
            self._aboard += Counter()  # drops what is zero

    def lost(self, executor: str, epoch: int, on_board: Collection[str]) -> None:
        """An executor has gone away, with requests of the revisions `on_board`."""
        for item in self._rollouts.values():
            key = (item.name, executor, epoch)
            revision = item.to_revision_id
            if key not in self._losses and (revision in on_board or self._aboard[executor, revision]):
                self._losses[key] = Loss(item.name, revision, executor, epoch, item.generation)
                self._proven.discard(revision)
                self._counts[revision] += 1

    def answered(self, executor: str, epoch: int, failed: bool) -> None:
        """An executor's process has answered, which says what has become of the one that was lost."""
        for key, loss in list(self._losses.items()):
            if loss.executor != executor or loss.told is not None:
                continue
            if loss.epoch == epoch and not failed:
                del self._losses[key]
            else:
                loss.certain = True

    def untold(self, now: float, *, answering: bool) -> list[Loss]:
        """Returns what is certain and the registry has not taken yet. `answering`: some executor answers; while none
        does, no time counts."""
        untold = [loss for loss in self._losses.values() if loss.told is None]
        for loss in untold:
            if not answering:
                loss.since = None
            elif loss.since is None:
                loss.since = now
            loss.certain = loss.certain or (loss.since is not None and now - loss.since >= SURE_S)
        return [loss for loss in untold if loss.certain]

    def on_trial(self, revision_id: str) -> bool:
        """Says whether a rollout tries this revision."""
        return any(item.to_revision_id == revision_id for item in self._rollouts.values())

    @asynccontextmanager
    async def in_turn(self, revision_id: str) -> AsyncIterator[None]:
        """Around the way of a request to its first token.

        Raises:
            LoraportError: EXECUTOR_UNAVAILABLE, an executor went away with the request before it.
        """
        if revision_id in self._proven or not self._unproven(revision_id):
            yield
            return
        turn, known = self._turns.setdefault(revision_id, asyncio.Lock()), self._counts[revision_id]
        taken = False
        try:
            async with asyncio.timeout(ALONE_S):
                taken = await turn.acquire()
        except TimeoutError:
            pass  # It goes all the same: a first one that waits in a queue must not keep everybody waiting.
        try:
            if self._counts[revision_id] > known and revision_id not in self._proven:
                raise LoraportError("EXECUTOR_UNAVAILABLE", ON_TRIAL, retry_after_s=1.0)
            if revision_id in self._proven and taken:
                turn.release()
                taken = False
            yield
            self._proven.add(revision_id)
        finally:
            if taken:
                turn.release()

    def _unproven(self, revision_id: str) -> bool:
        """Once it is everybody's, it has been proven elsewhere."""
        return any(item.to_revision_id == revision_id and item.state != "RETAINING" for item in self._rollouts.values())

    def suspects(self, item: RolloutItem, now: float) -> bool:
        """Says whether a rollout's new revision gets nothing for now. Once it is everybody's, only the registry takes
        it back."""
        return item.state != "RETAINING" and any(
            loss.rollout == item.name
            and item.generation == loss.generation
            and (loss.told is None or now < loss.told + SUSPECT_S)
            for loss in self._losses.values()
        )
