"""What the steps of an executor took and computed, summed since its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.executor.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sums over steps. `adapter_bytes` counts each distinct adapter of a step once."""

    steps: int = 0
    busy_ms: float = 0.0
    prefill_tokens: int = 0
    decode_rows: int = 0
    context_tokens: int = 0
    adapter_bytes: int = 0


class StepMeter:
    """See the module's text."""

    def __init__(self) -> None:
        self.totals = StepTotals()

    def note(self, plan: Plan, *, took_s: float, adapter_bytes: Callable[[str], int]) -> None:
        """Count a step that has run; `adapter_bytes` says what reading a revision takes."""
        was = self.totals
        decode = [row for row in plan.rows if row.start > 0 and len(row.tokens) == 1]
        self.totals = replace(
            was,
            steps=was.steps + 1,
            busy_ms=was.busy_ms + took_s * 1000,
            prefill_tokens=was.prefill_tokens + plan.token_count - len(decode),
            decode_rows=was.decode_rows + len(decode),
            context_tokens=was.context_tokens + sum(row.start for row in decode),
            adapter_bytes=was.adapter_bytes + sum(adapter_bytes(revision) for revision in plan.revisions),
        )
