"""What became of a future is asked without raising."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from services.shared.futures import fault_of, result_of

FAULT = OSError("no")
MAKERS: list[Callable[[], "Future[str] | asyncio.Future[str]"]] = [
    Future,
    lambda: asyncio.get_running_loop().create_future(),
]


@pytest.mark.parametrize("make", MAKERS, ids=["thread", "loop"])
async def test_each_end_is_told_and_raises_nothing(make: Callable[[], "Future[str] | asyncio.Future[str]"]) -> None:
    waits, given, failed, cancelled = make(), make(), make(), make()
    given.set_result("it")
    failed.set_exception(FAULT)
    cancelled.cancel()
    assert [result_of(one) for one in (waits, given, failed, cancelled)] == [None, "it", None, None]
    assert [fault_of(one) for one in (given, failed, cancelled)] == [None, FAULT, None]
