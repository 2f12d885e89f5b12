import asyncio

import pytest

from outrider.background import end_tasks


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
