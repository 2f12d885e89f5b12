import asyncio

import pytest

from outrider.concurrency.background import end_tasks, until_ended


async def stubborn(num_swallowed: int) -> None:
    """As a call of grpc.aio that is cancelled while it is being set up."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if num_swallowed == 0:
                raise
            num_swallowed -= 1


async def test_a_task_that_swallows_cancellations_is_ended_all_the_same() -> None:
    tasks = [asyncio.create_task(stubborn(num)) for num in (0, 2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await end_tasks(*tasks, None)
    assert all(task.cancelled() for task in tasks)


async def test_what_a_task_had_failed_with_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="broken"):
        await end_tasks(task)


async def test_no_tasks_are_no_work() -> None:
    await end_tasks(None)
    await end_tasks()


async def test_a_waiter_that_is_cancelled_waits_for_the_end_all_the_same() -> None:
    ended: list[bool] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(True)

    working = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    working.cancel()
    waiting = asyncio.create_task(until_ended(working))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended
