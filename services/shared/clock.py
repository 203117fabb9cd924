"""Time as an argument."""

import time
from typing import Protocol


class Clock(Protocol):
    """What a service knows of time."""

    def now(self) -> float:
        """Seconds since the Unix epoch: for what is written down or compared with other machines."""

    def monotonic(self) -> float:
        """Seconds that never go back: for how long something took."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that a test moves."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
