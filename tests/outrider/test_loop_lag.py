"""Which silence is other people's: the time that this process' event loop ran, and not the time that it was stopped."""

from __future__ import annotations

import asyncio
import time

import pytest

from outrider.concurrency.background import end_tasks
from outrider.observability.loop_lag import (
    LONG_PAUSE_S,
    RECOVERY_S,
    TICK_S,
    LoopLag,
    ProcessorClock,
    ProcessorTime,
    keep_ticking,
    own_lag_s,
)


def ticking(until_s: float, lag: LoopLag | None = None, from_s: float = 0.0) -> LoopLag:
    """One that was told of every tick."""
    lag = lag or LoopLag()
    for index in range(round((until_s - from_s) / TICK_S) + 1):
        lag.tick(from_s + index * TICK_S)
    return lag


def test_while_the_loop_runs_silence_is_what_the_clock_says() -> None:
    assert ticking(10.0).silence_s(4.0, 10.0) == pytest.approx(6.0)
    assert LoopLag().silence_s(4.0, 1000.0) == pytest.approx(996.0), "one that nobody ticks knows of no pause"


def test_a_short_pause_is_taken_off_a_silence() -> None:
    lag = ticking(15.0, ticking(10.0), from_s=11.1)
    assert lag.silence_s(5.0, 15.0) == pytest.approx(9.0)
    assert lag.silence_s(10.6, 15.0) == pytest.approx(3.9), "only what of the pause was in it"
    assert lag.silence_s(12.0, 15.0) == pytest.approx(3.0), "a pause before it is none of its own"


def test_after_a_long_pause_everybody_has_their_whole_time_again() -> None:
    lag = ticking(75.0, ticking(10.0), from_s=70.0)
    assert lag.silence_s(1.0, 75.0) == pytest.approx(5.0)


def test_a_pause_counts_before_its_tick_has_come() -> None:
    """Timers of one moment fire in any order."""
    lag = ticking(10.0)
    assert lag.silence_s(9.0, 70.0) == 0.0
    assert lag.silence_s(9.0, 11.1) == pytest.approx(1.1)
    assert lag.is_recovering(70.0)


def test_a_tick_tells_how_late_it_is() -> None:
    lag = ticking(10.0)
    assert lag.tick(10.1) == pytest.approx(0.0, abs=1e-9)
    assert lag.tick(13.2) == pytest.approx(3.0)


def test_losses_are_put_down_to_a_long_pause_for_a_while_and_to_a_short_one_never() -> None:
    lag = ticking(10.0)
    assert not lag.is_recovering(10.0)
    lag.tick(10.0 + TICK_S + LONG_PAUSE_S / 2)
    assert not lag.is_recovering(10.0 + TICK_S + LONG_PAUSE_S / 2)
    lag.tick(30.0)
    assert lag.is_recovering(30.0)
    ticking(30.0 + RECOVERY_S, lag, from_s=30.0)
    assert not lag.is_recovering(30.0 + RECOVERY_S)


def test_pauses_without_end_do_not_fill_the_memory_nor_hide_silence() -> None:
    """A loop that is held up half of the time still finds out who is silent, in twice the time."""
    lag = LoopLag()
    for number in range(10_000):
        lag.tick(number * 2 * TICK_S)
    end_s = 9_999 * 2 * TICK_S
    assert lag.silence_s(end_s - 20.0, end_s) == pytest.approx(10.0, abs=0.5)


async def test_the_task_measures_a_loop_that_is_held_up() -> None:
    lag, seen = LoopLag(), list[float]()
    task = asyncio.create_task(keep_ticking(lag, lambda lag_s, own_s: seen.append(lag_s)))
    await asyncio.sleep(0)
    began_s = asyncio.get_running_loop().time()
    time.sleep(0.5)  # noqa: ASYNC251 - it is what is measured
    while len(seen) < 2:  # noqa: ASYNC110 - it is asked, it does not tell
        await asyncio.sleep(0.01)
    assert seen[1] >= 0.35
    now_s = asyncio.get_running_loop().time()
    assert lag.silence_s(began_s, now_s) <= now_s - began_s - 0.35
    await end_tasks(task)


@pytest.mark.parametrize(
    ("lag_s", "used_s", "waited_s", "own_s"),
    [
        (0.2, 0.25, 0.0, 0.2),  # it worked all the time
        (0.2, 0.25, 0.15, 0.05),  # mostly it waited for a processor that others had
        (0.2, 0.01, 0.0, 0.01),  # it was stopped
        (0.2, 0.3, 0.4, 0.0),  # it would have been in time
        (0.0, 0.1, 0.0, 0.0),
    ],
)
def test_a_lag_is_its_own_as_far_as_it_worked_and_did_not_wait_for_a_processor(
    lag_s: float, used_s: float, waited_s: float, own_s: float
) -> None:
    before, now = ProcessorTime(5.0, 2.0), ProcessorTime(5.0 + used_s, 2.0 + waited_s)
    assert own_lag_s(lag_s, before, now) == pytest.approx(own_s)


@pytest.mark.parametrize(("holds_up", "is_own"), [("work", True), ("sleep", False)])
async def test_the_task_tells_work_from_a_pause(holds_up: str, is_own: bool) -> None:
    seen = list[tuple[float, float]]()
    task = asyncio.create_task(keep_ticking(LoopLag(), lambda lag_s, own_s: seen.append((lag_s, own_s))))
    await asyncio.sleep(0)
    if holds_up == "work":
        until_s = time.thread_time() + 0.4
        while time.thread_time() < until_s:
            pass
    else:
        time.sleep(0.4)  # noqa: ASYNC251 - it stands for a process that is stopped
    while len(seen) < 2:  # noqa: ASYNC110 - it is asked, it does not tell
        await asyncio.sleep(0.01)
    await end_tasks(task)
    lag_s, own_s = seen[1]
    assert lag_s >= 0.25
    assert own_s >= 0.25 if is_own else own_s < 0.15


def test_a_clock_counts_what_the_process_works() -> None:
    clock = ProcessorClock()
    before = clock.read()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    now = clock.read()
    clock.close()
    assert now.used_s - before.used_s >= 0.05
    assert now.waited_s >= before.waited_s
