"""How long a client may keep what is meant for it waiting.

`PaceWatch` measures one thing that begins and ends often, such as a send or the wait of a queue's oldest item, with a
timer that is looked at once in a while instead of one for each. A loop that was away itself blames nobody: what it
missed meanwhile has to come through first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

CUT_AFTER: Final = 2
"""Times the limit of a client's pace. Between the two it can still read why its request was ended."""
PACE_BYTES: Final = 1 << 20
"""Of what is ready at once, such as a finished answer, that a client has to take in the time after which it is cut, as
much of a stream as may wait for it; less than that within the same time."""
_LATE_S: Final = 1.0  # behind its time, an event loop was held up, and looks again before it judges


class PaceWatch:
    """Calls `on_stall` once, when what `since` tells has lasted for `limit_s`."""

    def __init__(
        self, since_s: Callable[[], float | None], limit_s: float, on_stall: Callable[[], object]
    ) -> None:
        """`since_s` tells when what is measured began, on the running loop's clock; None: it is not going on."""
        self._since_s = since_s
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From here on it is measured; does nothing where it is already."""
        if self._timer is None:
            self._look_at(self._loop.time() + self._limit_s)

    def stop(self) -> None:
        """No more timers."""
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
