"""The simulated loop turns as asyncio's own does, and lets time pass instead of waiting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.simulation.clock import NothingLeftToDoError, SimulatedLoop, TimeStandsStillError


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    with closing(SimulatedLoop()) as loop:
        yield loop


async def wander(chance: random.Random) -> list[tuple[str, int]]:
    """Tasks that sleep, wake each other, cancel timers and each other; what each of them did, in order."""
    told: list[tuple[str, int]] = []
    loop = asyncio.get_running_loop()
    events = [asyncio.Event() for _ in range(4)]
    steps = [[chance.randrange(5) for _ in range(12)] for _ in range(6)]
    pauses = chance.sample(range(1, 200), 72)  # no two timers are due at once: asyncio does not say which is first

    async def walk(number: int) -> None:
        for index, step in enumerate(steps[number]):
            told.append(("step", number * 100 + index))
            timer = loop.call_later(1e-4 * pauses[number * 12 + index], told.append, ("timer", number))
            if step == 0:
                await asyncio.sleep(0)
            elif step == 1:
                events[number % 4].set()
            elif step == 2:
                timer.cancel()
            elif step == 3:
                tasks[(number + 1) % 6].cancel()
            else:
                await asyncio.sleep(0)
                events[number % 4].clear()

    tasks = [asyncio.create_task(walk(number)) for number in range(6)]
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.03)
    return told


@pytest.mark.parametrize("seed", range(5))
def test_callbacks_come_in_the_order_in_which_asyncio_has_them(loop: SimulatedLoop, seed: int) -> None:
    with closing(asyncio.SelectorEventLoop()) as real:
        expected = real.run_until_complete(wander(random.Random(seed)))
    got = loop.run_until_complete(wander(random.Random(seed)))
    is_step = [each for each in expected if each[0] == "step"]
    assert [each for each in got if each[0] == "step"] == is_step
    assert sorted(got) == sorted(expected)


def test_time_passes_only_when_nothing_is_due_and_a_cancelled_timer_keeps_nobody(loop: SimulatedLoop) -> None:
    told: list[float] = []
    timers = [loop.call_later(delay, lambda: told.append(loop.time())) for delay in range(300, 0, -1)]
    for timer in timers[::2] + timers[1:200:2]:
        timer.cancel()
    loop.run_until_complete(asyncio.sleep(300))
    assert told == [float(delay) for delay in range(1, 101, 2)]
    assert loop.time() == 300


def test_a_deadlock_and_an_endless_task_are_found(loop: SimulatedLoop) -> None:
    with pytest.raises(NothingLeftToDoError):
        loop.run_until_complete(loop.create_future())

    async def spin() -> None:
        while True:  # noqa: ASYNC110 - that is what is looked for
            await asyncio.sleep(0)

    with pytest.raises(TimeStandsStillError):
        loop.run_until_complete(spin())
    loop.forgive()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))


def test_an_error_in_a_callback_is_told_and_the_next_one_runs(loop: SimulatedLoop) -> None:
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(type(context["exception"])))
    loop.call_soon(lambda: 1 // 0)
    loop.call_soon(told.append, "next")
    loop.run_until_complete(asyncio.sleep(0))
    assert told == [ZeroDivisionError, "next"]


def test_a_threads_work_takes_time_and_the_loops_own_holds_it_up(loop: SimulatedLoop) -> None:
    held_up: list[float] = []
    loop.on_held_up = held_up.append

    async def compute() -> None:
        await asyncio.to_thread(loop.work, 0.25)

    loop.run_until_complete(compute())
    assert (loop.time(), held_up) == (0.25, [])
    with loop.on_thread():
        loop.work(1.0)
    assert held_up == []
    loop.call_soon(loop.work, 0.5)
    loop.run_until_complete(asyncio.sleep(0))
    assert (loop.time(), held_up) == (0.25, [0.5])
