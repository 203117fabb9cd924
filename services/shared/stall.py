"""Notices what takes too long, of many things that come one after the other: one timer follows them all."""

import asyncio
import math
from collections.abc import Callable


class Stall:
    """Calls `late` once, when more than `limit_s` have passed between a `begin` and its `end`; with infinity never.

    For one event loop.
    """

    __slots__ = ("_late", "_limit_s", "_loop", "_since", "_timer")

    def __init__(self, limit_s: float, late: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._late = late
        self._loop = asyncio.get_running_loop()
        # Since when something goes on, on the loop's clock.
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Something begins that must not take too long."""
        self._since = self._loop.time()
        if self._timer is None and self._limit_s < math.inf:
            self._timer = self._loop.call_at(self._since + self._limit_s, self._look)

    def end(self) -> None:
        """It has ended."""
        self._since = None

    def close(self) -> None:
        """Nothing is late any more."""
        self._since = None
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        ends = self._since + self._limit_s
        if self._loop.time() < ends:
            self._timer = self._loop.call_at(ends, self._look)
        else:
            self._late()
