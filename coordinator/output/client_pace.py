"""Limit on how long a client may keep its output waiting.

`PaceWatch` measures an interval that begins and ends often, such as a send or the wait of a queue's oldest item, with
one timer that fires once in a while instead of one per interval. After a delay of its own event loop it looks again
before it judges: output that piled up meanwhile must come through first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

CUT_AFTER: Final = 2
"""Factor of the limit after which a client is cut off. Before that it can still read why its request was ended."""
PACE_BYTES: Final = 1 << 20
"""Bytes of ready output, such as a finished answer, that a client must read within the time after which it is cut off;
a smaller rest has the same time. As many bytes of a stream may wait."""
_LATE_S: Final = 1.0  # delay of the event loop after which it looks again before it judges


class PaceWatch:
    """Calls `on_stall` once, when the interval that `since_s` reports has lasted for `limit_s`."""

    def __init__(self, since_s: Callable[[], float | None], limit_s: float, on_stall: Callable[[], object]) -> None:
        """`since_s` returns the start of the interval, on the running loop's clock; None: there is none now."""
        self._since_s = since_s
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts measuring; does nothing if it has started."""
        if self._timer is None:
            self._look_at(self._loop.time() + self._limit_s)

    def stop(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, when_s: float) -> None:
        self._timer = self._loop.call_at(when_s, self._look, when_s)

    def _look(self, when_s: float) -> None:
        now_s = self._loop.time()
        late_s, since_s = now_s - when_s, self._since_s()
        due_s = (now_s if since_s is None else since_s) + self._limit_s
        if due_s > now_s:
            self._look_at(due_s)
        elif late_s > _LATE_S:
            self._look_at(now_s + min(late_s, self._limit_s))
        else:
            self._on_stall()
