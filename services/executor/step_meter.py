"""What the steps of an executor took and computed, summed since its start, and the newest of them one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.executor.plan import Plan, StepResult

# Steps that are kept until somebody takes them; more are forgotten, the oldest first.
MAX_NOTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sums over steps. `adapter_bytes` counts each distinct adapter of a step once, `models` each distinct model: the
    adapters, and the base alone where a row has none. `shortest_ms` is of the steps that only made further tokens, 0
    before there was one."""

    steps: int = 0
    busy_ms: float = 0.0
    prefill_tokens: int = 0
    decode_rows: int = 0
    context_tokens: int = 0
    adapter_bytes: int = 0
    models: int = 0
    shortest_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StepNote:
    """One step: what kind, `prefill`, `decode` or `mixed`, how long it took, how many rows and distinct adapters,
    and what computed the adapters (`kernels/dispatch.py`)."""

    kind: str
    took_s: float
    rows: int
    adapters: int
    kernel_path: str


class StepMeter:
    """See the module's text. `note` and `take` may be called from two threads."""

    def __init__(self) -> None:
        self.totals = StepTotals()
        self._notes: deque[StepNote] = deque(maxlen=MAX_NOTES)

    def note(self, plan: Plan, result: StepResult, *, took_s: float, adapter_bytes: Callable[[str], int]) -> None:
        """Count a step that has run; `adapter_bytes` says what reading a revision takes."""
        was = self.totals
        decode = [row for row in plan.rows if row.decodes]
        revisions = plan.revisions
        kind = "prefill" if not decode else "decode" if len(decode) == len(plan.rows) else "mixed"
        took_ms = took_s * 1000
        self.totals = replace(
            was,
            steps=was.steps + 1,
            busy_ms=was.busy_ms + took_ms,
            prefill_tokens=was.prefill_tokens + plan.token_count - len(decode),
            decode_rows=was.decode_rows + len(decode),
            context_tokens=was.context_tokens + sum(row.start for row in decode),
            adapter_bytes=was.adapter_bytes + sum(adapter_bytes(revision) for revision in revisions),
            models=was.models + len(revisions) + any(row.revision_id is None for row in plan.rows),
            shortest_ms=min(was.shortest_ms or took_ms, took_ms) if kind == "decode" else was.shortest_ms,
        )
        self._notes.append(StepNote(kind, took_s, len(plan.rows), len(revisions), result.kernel_path))

    def take(self) -> list[StepNote]:
        """Return the steps since the last call, oldest first."""
        return [self._notes.popleft() for _ in range(len(self._notes))]
