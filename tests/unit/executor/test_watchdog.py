"""A stuck step is told from one that works, and from a process that merely stood still; the last resort is not spared."""

from __future__ import annotations

import threading
import time

from services.executor import watchdog
from services.executor.stuck import StuckDetector
from services.executor.watchdog import Watchdog


def test_only_one_and_the_same_step_for_too_long_is_stuck() -> None:
    detector, now = StuckDetector(10.0, poll_s=1.0), 0.0
    for turn in (*[None] * 30, *range(30), *[5] * 9, 6, *[7] * 9, None, *[7] * 9):
        now += 1
        assert not detector.observe(turn, now=now)
    assert [detector.observe(8, now=now + i) for i in range(1, 13)] == [False] * 10 + [True, True]


def test_a_process_that_stood_still_is_not_stuck() -> None:
    detector = StuckDetector(10.0, poll_s=1.0)
    assert not detector.observe(1, now=1.0)
    assert not detector.observe(1, now=100_000.0)
    assert not detector.observe(1, now=100_001.0)
    assert all(not detector.observe(1, now=100_001.0 + i) for i in range(1, 7))
    assert detector.observe(1, now=100_008.0)


class Resort:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.ended = threading.Event()

    def wind(self, seconds: float) -> None:
        self.did.append("wind")

    def unwind(self) -> None:
        self.did.append("unwind")

    def show(self) -> None:
        self.did.append("show")

    def end(self) -> None:
        self.did.append("end")
        self.ended.set()


def test_a_stuck_step_is_said_first_and_ends_the_process_after_the_grace(monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    resort = Resort()
    dog = Watchdog(lambda: 1, limit_s=0.2, on_stuck=lambda: resort.did.append("said"), last_resort=resort)
    dog.start()
    assert resort.ended.wait(60)
    dog.stop()
    assert resort.did.count("wind") >= 2
    assert [w for w in resort.did if w != "wind"] == ["show", "said", "end", "unwind"]


def test_a_process_that_ends_by_itself_is_not_killed(monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 600.0)
    resort, said = Resort(), threading.Event()
    dog = Watchdog(lambda: 1, limit_s=0.2, on_stuck=said.set, last_resort=resort)
    dog.start()
    assert said.wait(60)
    dog.stop()
    assert "end" not in resort.did
    assert resort.did[-1] == "unwind"


def test_steps_that_go_on_are_left_alone() -> None:
    resort, turn = Resort(), iter(range(10**9))
    dog = Watchdog(lambda: next(turn), limit_s=0.05, on_stuck=lambda: resort.did.append("said"), last_resort=resort)
    dog.start()
    while resort.did.count("wind") < 40:
        time.sleep(0.005)
    dog.stop()
    assert set(resort.did) == {"wind", "unwind"}
