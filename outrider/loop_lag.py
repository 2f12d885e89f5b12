"""How late an event loop runs, and what of other people's silence was the loop's own absence.

A process may be stopped for seconds (a virtual machine that moves, SIGSTOP, a processor given to others) or hold up its
own loop. When it goes on, its timers fire first, and they say that every peer has been silent; what the peers have said
lies there and is read a moment later. So a peer is judged by the time that this loop ran, never by the clock alone.

Lag has two causes, and only one of them is a defect of this process: its own work held up the loop, or it had no
processor to work with. `own_lag_s` tells them apart.

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
"""A tick that is later than this is a pause; what is less is how timers are."""
LONG_PAUSE_S: Final = 2.0
"""After such a pause everybody has their whole time again: connections may have been lost in it, and processes beside
this one may have been stopped as well."""
RECOVERY_S: Final = 12.0
"""For so long after a long pause a broken connection is put down to it: as long as a keepalive takes to find one."""
_PAUSES_MAX: Final = 256


class LoopLag:
    """The pauses of one event loop. Times are in seconds on the loop's clock."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        """`tick_s`: how often it is told of a tick. From the first one on it knows of pauses."""
        self._tick_s = tick_s
        self._last_tick_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_PAUSES_MAX)  # begin and end, oldest first
        self._long_pause_end_s = float("-inf")

    def tick(self, now_s: float) -> float:
        """The loop runs; returns how late that is."""
        lag_s = self._overdue_s(now_s)
        if lag_s >= PAUSE_S:
            self._pauses.append((now_s - lag_s, now_s))
        if lag_s >= LONG_PAUSE_S:
            self._long_pause_end_s = now_s
        self._last_tick_s = now_s
        return lag_s

    def silence_s(self, since_s: float, now_s: float) -> float:
        """For how long somebody may be called silent who has said nothing since then: the time that the loop ran, since
        the end of the last long pause at most. To be asked on the loop."""
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
        """Whether the loop has just come back from a long pause, so that what is lost now may have been lost by it."""
        return self._overdue_s(now_s) >= LONG_PAUSE_S or now_s - self._long_pause_end_s < RECOVERY_S

    def _overdue_s(self, now_s: float) -> float:
        """How long ago the next tick should have come."""
        return 0.0 if self._last_tick_s is None else max(now_s - self._last_tick_s - self._tick_s, 0.0)


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """What the system has given so far, in seconds."""

    used_s: float  # by all threads of this process
    waited_s: float  # that the loop's thread was ready to run and had no processor


def own_lag_s(lag_s: float, before: ProcessorTime, now: ProcessorTime) -> float:
    """How much of a lag is this process' own doing: how late the tick would have been with processors to spare.

    What is left without the loop's waits for a processor, and no more than all threads of the process worked: one that
    keeps the interpreter's lock holds up the loop as well, and a process that was stopped did nothing at all. `before`
    is at the tick before this one.
    """
    return max(min(lag_s - (now.waited_s - before.waited_s), now.used_s - before.used_s), 0.0)


class ProcessorClock:
    """Reads the `ProcessorTime` of the thread that made it. Where the system does not tell of waits (it is not Linux),
    there are none."""

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
    """Ticks for as long as the loop runs; `observe` is told how late each tick is and how much of that was this
    process' own work, in seconds."""
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
