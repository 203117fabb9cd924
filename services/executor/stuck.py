"""When is a step stuck? Pure: the caller brings the clock.

Only time in which the observer itself was awake counts. A process that stood still (stopped by a signal, a machine
that slept) wakes with a step that is old by the clock and has had no time to run.
"""

from __future__ import annotations

# An observer that wakes this much later than it meant to was held up like the step itself.
SLACK = 2.0


class StuckDetector:
    """Told again and again which step runs; says when the same one has run for too long. Times in seconds."""

    def __init__(self, limit_s: float, *, poll_s: float) -> None:
        self._limit_s = limit_s
        self._most_s = poll_s * SLACK
        self._turn: int | None = None
        self._seen_at = 0.0
        self._ran_s = 0.0

    def observe(self, turn: int | None, *, now: float) -> bool:
        """Return whether the step is stuck. `turn` is None while nothing runs."""
        if turn is None or turn != self._turn:
            self._turn, self._ran_s = turn, 0.0
        else:
            self._ran_s += min(now - self._seen_at, self._most_s)
        self._seen_at = now
        return self._ran_s >= self._limit_s
