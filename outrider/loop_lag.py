"""How late an event loop runs, and what of other people's silence was the loop's own absence.

A process may be stopped for seconds (a virtual machine that moves, SIGSTOP, a processor given to others) or hold up its
own loop. When it goes on, its timers fire first, and they say that every peer has been silent; what the peers have said
lies there and is read a moment later. So a peer is judged by the time that this loop ran, never by the clock alone.

`LoopLag` is pure: ticks in, answers out. `keep_ticking` is the task that ticks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
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


async def keep_ticking(lag: LoopLag, observe: Callable[[float], object]) -> None:
    """Ticks for as long as the loop runs; `observe` is told how late each tick is, in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        observe(lag.tick(loop.time()))
        await asyncio.sleep(TICK_S)
