"""What takes too long is noticed once; what ends in time never."""

import asyncio
import heapq
import itertools
from collections.abc import Callable

import pytest

from services.shared.stall import Stall


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop's clock and timers. Time passes when the test says so, however busy the machine is."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Timer, Callable[[], object]]] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer()
        heapq.heappush(self._due, (when, next(self._order), timer, callback))
        return timer

    def sleep(self, seconds: float) -> None:
        """Calls back whoever is due within so many seconds, each at its time."""
        ends = self._now + seconds
        while self._due and self._due[0][0] <= ends:
            self._now, _, timer, callback = heapq.heappop(self._due)
            if not timer.cancelled:
                callback()
        self._now = ends


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


async def test_what_takes_too_long_is_told_once() -> None:
    """On a real loop."""
    told: list[str] = []
    late = asyncio.Event()
    stall = Stall(0.05, lambda: (told.append("late"), late.set()))
    stall.begin()
    async with asyncio.timeout(60):
        await late.wait()
    await asyncio.sleep(0.3)
    assert told == ["late"]


@pytest.mark.parametrize("how", ["end", "close"])
def test_what_has_ended_is_not_late(loop: Loop, how: str) -> None:
    told: list[str] = []
    stall = Stall(0.1, lambda: told.append("late"))
    stall.begin()
    loop.sleep(0.09)
    getattr(stall, how)()
    loop.sleep(0.3)
    assert not told


def test_each_has_its_own_time(loop: Loop) -> None:
    """The timer of the first finds the last one, and waits for the rest of its time."""
    told: list[float] = []
    stall = Stall(0.3, lambda: told.append(loop.time()))
    stall.begin()
    loop.sleep(0.2)
    stall.end()
    second = loop.time()
    stall.begin()
    loop.sleep(0.9)
    assert told == [second + 0.3]
