"""What takes too long is noticed once; what ends in time never."""

import asyncio

import pytest

from services.shared.stall import Stall


async def test_what_takes_too_long_is_told_once() -> None:
    told: list[str] = []
    stall = Stall(0.05, lambda: told.append("late"))
    stall.begin()
    await asyncio.sleep(0.3)
    assert told == ["late"]


@pytest.mark.parametrize("how", ["end", "close"])
async def test_what_has_ended_is_not_late(how: str) -> None:
    told: list[str] = []
    stall = Stall(0.1, lambda: told.append("late"))
    stall.begin()
    getattr(stall, how)()
    await asyncio.sleep(0.3)
    assert not told


async def test_each_has_its_own_time() -> None:
    """The timer of the first finds the last one, and waits for the rest of its time."""
    told: list[float] = []
    loop = asyncio.get_running_loop()
    stall = Stall(0.3, lambda: told.append(loop.time()))
    stall.begin()
    await asyncio.sleep(0.2)
    stall.end()
    second = loop.time()
    stall.begin()
    await asyncio.sleep(0.9)
    assert len(told) == 1
    assert told[0] >= second + 0.29
