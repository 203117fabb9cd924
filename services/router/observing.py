"""Watches requests of rollouts to their ends, for the judge."""

from types import TracebackType
from typing import Self

from services.router.door import Job
from services.router.events import Event, Started, Tokens
from services.router.observations import AnswersGiven, Outboxes, repetition
from services.router.rollout_split import Side
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.split import Observation

_LEFT = "the caller has gone away"
# A call is cancelled when its deadline passes, or shortly before.
DEADLINE_MARGIN_S = 0.05
# Ends that say nothing about a revision: the caller's own doing, a queue that was full before it was anybody's turn, an
# executor that went away with everybody on board (`rollout_losses.py` tells of that).
_NOT_ITS_DOING = frozenset(
    {
        _LEFT, "INVALID_REQUEST", "INVALID_CREDENTIAL", "PROMPT_TOO_LONG", "QUOTA_EXCEEDED", "OVERLOADED", "DRAINING",
        "REVISION_NOT_ACTIVE", "ADAPTER_NOT_FOUND", "EXECUTOR_UNAVAILABLE",
    }
)  # fmt: skip


class Observed:
    """One request. Used as a context manager around its answer; `saw` is told of every event before the caller is."""

    def __init__(
        self, side: Side | None, outboxes: Outboxes, clock: Clock, *, timeout_s: float | None, hurried: bool = False
    ) -> None:
        """`hurried`: the caller itself says how long it waits for a first token."""
        self.side = side
        self._hurried = hurried
        self._begun = False
        self._ends = None if timeout_s is None else clock.monotonic() + timeout_s - DEADLINE_MARGIN_S
        self._outboxes = outboxes
        self._clock = clock
        self._placed = clock.monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._cold = False
        self._token_ids: list[int] = []

    def saw(self, event: Event) -> None:
        """Something of the answer is here. Of several answers, the first one counts."""
        if self.side is None:
            return
        if isinstance(event, Started):
            self._begun = True
            self._cold = event.load_ms > 0
        elif isinstance(event, Tokens) and event.index == 0 and event.token_ids:
            self._last = self._clock.monotonic()
            self._first = self._last if self._first is None else self._first
            self._token_ids += event.token_ids

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = self._reason(error) if error is not None else ""
        if self.side is None or reason in _NOT_ITS_DOING:
            return
        if reason == "DEADLINE_EXCEEDED" and (not self._begun or (self._hurried and self._first is None)):
            return  # Else whoever sets a deadline that nobody meets would decide about the revision, and at no cost.
        first_ms = (self._first - self._placed) * 1000 if self._first is not None else 0.0
        further = len(self._token_ids) - 1
        observation = Observation(
            arm=self.side.arm,
            first_token_ms=first_ms,
            per_token_ms=(self._last - self._first) * 1000 / further
            if self._first is not None and further > 0
            else 0.0,
            ok=error is None,
            error_reason=reason,
            output_tokens=len(self._token_ids),
            repetition=repetition(self._token_ids),
            cold=self._cold,
            bucket=self.side.bucket,
        )
        self._outboxes.of(self.side.rollout).add(self.side.step, observation)

    def _reason(self, error: BaseException) -> str:
        """A caller that goes away says nothing of the revision; one whose deadline has passed has waited for it."""
        if isinstance(error, LoraportError):
            return error.reason
        if isinstance(error, Exception):
            return "INTERNAL"
        late = self._ends is not None and self._clock.monotonic() >= self._ends
        return "DEADLINE_EXCEEDED" if late else _LEFT


class Observer:
    """What the requests of a router's rollouts have come to."""

    def __init__(self, *, clock: Clock) -> None:
        self.outboxes = Outboxes()
        self._answers = AnswersGiven()
        self._clock = clock

    def watch(self, job: Job, *, timeout_s: float | None = None) -> Observed:
        """Returns what watches an admitted request that has `timeout_s` left."""
        hurried = job.first_token_timeout_s is not None
        return Observed(job.side, self.outboxes, self._clock, timeout_s=timeout_s, hurried=hurried)

    def answered(self, tenant: str, request_id: str, job: Job) -> None:
        """The caller has begun to get an answer, which it may have a word on."""
        self._answers.given(tenant, request_id, job.side, now=self._clock.monotonic())

    def outcome(self, tenant: str, request_id: str, *, accepted: bool) -> None:
        """Takes a caller's word on an answer; the first one counts.

        Raises:
            LoraportError: REQUEST_NOT_FOUND.
        """
        known, side = self._answers.judged(tenant, request_id, now=self._clock.monotonic())
        if not known:
            raise LoraportError("REQUEST_NOT_FOUND")
        if side is not None:
            self.outboxes.of(side.rollout).outcome(side.step, side.arm, accepted=accepted)
