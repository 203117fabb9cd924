"""What one engine step may take, what it computes, and what came of it: frozen values.

The scheduler makes a Plan, the runner turns it into numbers, the scheduler takes the StepResult back. Nothing
else passes between policy and device.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.executor.request import FinishReason, Logprob, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`max_context` and `max_step_tokens` count tokens; `max_waiting` counts requests without a row."""

    max_rows: int = 64
    max_step_tokens: int = 512
    max_context: int = 2048
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        if min(self.max_rows, self.max_step_tokens, self.max_context, self.max_waiting) < 1:
            raise ValueError("all limits are at least 1")
        if self.max_step_tokens < self.max_rows:
            raise ValueError("max_step_tokens must hold one token of every row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's share of a step.

    Computes positions [start, start + len(tokens)). `blocks` is the block table covering [0, start + len(tokens)).
    With `sample` the last position's logits give a token; `generated` counts the outputs before it.
    `history` is (prompt, output) where penalties need it, else None. `targets` are the tokens to be scored, each by the
    position before it: they belong to the last len(targets) positions of the row; `top` alternatives go with each.
    """

    request_id: str
    revision_id: str | None
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool
    sampling: Sampling
    generated: int
    history: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    targets: tuple[int, ...] = ()
    top: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def decodes(self) -> bool:
        """Says whether it makes a further token; else it computes a part of a prompt."""
        return self.generated > 0 and len(self.tokens) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rows of one step: base rows first, then grouped by revision. `fresh_blocks` were just allocated."""

    step: int
    rows: tuple[Row, ...]
    fresh_blocks: tuple[int, ...]

    @property
    def token_count(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def revisions(self) -> tuple[str, ...]:
        """Distinct revisions in row order."""
        return tuple(dict.fromkeys(row.revision_id for row in self.rows if row.revision_id is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Exactly one of `token` and `failure` is set for a sampling row; both are None otherwise, but a row with
    targets may fail. `scores` is parallel to the row's targets."""

    request_id: str
    token: int | None = None
    logprob: Logprob | None = None
    failure: FinishReason | None = None
    scores: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results parallel to the plan's rows, and the kernel path that made them."""

    step: int
    rows: tuple[RowResult, ...]
    kernel_path: str
