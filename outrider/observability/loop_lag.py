"""Measures the lag of an event loop, and how much of a peer's silence was the loop's own pause.

A process may be stopped for seconds (a virtual machine that moves, SIGSTOP, a processor given to others) or block its
own loop. When it resumes, its timers fire first and report that every peer has been silent, although the peers'
messages are only waiting to be read. So a peer is judged by the time that this loop ran, never by the clock alone.

Lag has two causes, of which only the first is a defect of this process: its own work blocked the loop, or it had no
processor. `own_lag_s` distinguishes them.

`LoopLag` and `own_lag_s` are pure: ticks in, answers out. `keep_ticking` is the task that ticks.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

TICK_S: Final = 0.1
PAUSE_S: Final = 0.05
"""Least lateness of a tick that counts as a pause; smaller ones are normal for timers."""
LONG_PAUSE_S: Final = 2.0
"""Least length of a pause after which all time limits start again: connections may have been lost in it, and processes
beside this one may have been stopped as well."""
RECOVERY_S: Final = 12.0
"""Time after a long pause during which broken connections are attributed to it: as long as a keepalive takes to find
one."""
_PAUSES_MAX: Final = 256


class LoopLag:
    """The pauses of one event loop. Times are in seconds on the loop's clock."""

    def __init__(self) -> None:
        self._last_tick_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_PAUSES_MAX)  # begin and end, oldest first
        self._long_pause_end_s = float("-inf")

    def tick(self, now_s: float) -> float:
        """Records that the loop runs; returns how late the tick is."""
        lag_s = self._overdue_s(now_s)
        if lag_s >= PAUSE_S:
            self._pauses.append((now_s - lag_s, now_s))
        if lag_s >= LONG_PAUSE_S:
            self._long_pause_end_s = now_s
        self._last_tick_s = now_s
        return lag_s

    def silence_s(self, since_s: float, now_s: float) -> float:
        """How long a peer counts as silent that was last heard from at `since_s`: the time that the loop ran, since the
        end of the last long pause at most. Must be called on the loop."""
        pauses = [*self._pauses]
        if (unseen_s := self._overdue_s(now_s)) >= PAUSE_S:  # this timer fired before the tick's
            pauses.append((now_s - unseen_s, now_s))
        begin_s = since_s
        for start_s, end_s in reversed(pauses):
            if end_s <= begin_s:
                break
            if end_s - start_s >= LONG_PAUSE_S:
                begin_s = max(begin_s, end_s)
        paused_s = sum(max(end_s - max(start_s, begin_s), 0.0) for start_s, end_s in pauses)
        return max(now_s - begin_s - paused_s, 0.0)

    def is_recovering(self, now_s: float) -> bool:
        """Whether the loop has just resumed from a long pause, so that a loss now may be due to it."""
        return self._overdue_s(now_s) >= LONG_PAUSE_S or now_s - self._long_pause_end_s < RECOVERY_S

    def _overdue_s(self, now_s: float) -> float:
        """Time since the next tick was due."""
        return 0.0 if self._last_tick_s is None else max(now_s - self._last_tick_s - TICK_S, 0.0)


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Processor time of a process so far, in seconds."""

    used_s: float  # by all its threads
    waited_s: float  # while the loop's thread was ready to run without a processor


def own_lag_s(lag_s: float, before: ProcessorTime, now: ProcessorTime) -> float:
    """The part of a lag that is this process' own doing: the lateness of the tick if processors were idle.

    It is the lag less the loop's waits for a processor, and at most the work of all threads of the process: one that
    keeps the interpreter's lock blocks the loop as well, and a stopped process does nothing at all. `before` is at the
    tick before this one.
    """
    return max(min(lag_s - (now.waited_s - before.waited_s), now.used_s - before.used_s), 0.0)


class ProcessorClock:
    """Reads the `ProcessorTime` of the thread that created it. On systems other than Linux waits are unknown and count
    as 0."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> ProcessorTime:
        waited_ns = 0
        if self._file is not None:
            waited_ns = int(os.pread(self._file, 128, 0).split()[1])
        return ProcessorTime(time.process_time(), waited_ns / 1e9)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


async def keep_ticking(lag: LoopLag, observe: Callable[[float, float], object]) -> None:
    """Ticks as long as the loop runs; `observe` takes each tick's lag and the part of it that was this process' own
    work, in seconds."""
    loop, clock = asyncio.get_running_loop(), ProcessorClock()
    try:
        before = clock.read()
        while True:
            lag_s, now = lag.tick(loop.time()), clock.read()
            observe(lag_s, own_lag_s(lag_s, before, now))
            before = now
            await asyncio.sleep(TICK_S)
    finally:
        clock.close()
