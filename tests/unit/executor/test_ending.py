"""What an executor runs beside its requests ends when it is told to, also where a library takes that for something else."""

import asyncio

from services.executor.service import _end


async def test_a_task_that_swallows_a_cancellation_is_told_again() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await _end(tasks)
    assert swallowed == 2
    assert all(task.cancelled() for task in tasks)
    await _end([])
