"""How long a worker may say nothing, and which losses are our own: a process that was stopped blames nobody.

One timer and not `asyncio.timeout` around each read: that was a tenth of what a streamed step cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from coordinator.workers import was_never_sent
from outrider.loop_lag import LoopLag

_LOOK_AGAIN_S: Final = 0.001


class SilenceWatch:
    """Cancels a call when one read takes too long, by the time that the event loop ran meanwhile."""

    def __init__(self, cancel: Callable[[], object], silence_max_s: float, lag: LoopLag) -> None:
        self._cancel = cancel
        self._silence_max_s = silence_max_s
        self._lag = lag
        self._loop = asyncio.get_running_loop()
        self._reading_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.has_cancelled = False

    def start(self) -> None:
        """From here on silence counts."""
        self._timer = self._loop.call_later(self._silence_max_s, self._look)

    def begin(self) -> None:
        """A read begins."""
        self._reading_since_s = self._loop.time()

    def end(self) -> None:
        """It has brought something; what is done with it takes as long as it likes."""
        self._reading_since_s = None

    def stop(self) -> None:
        """No more timers."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        silent_s = 0.0
        if self._reading_since_s is not None:
            silent_s = self._lag.silence_s(self._reading_since_s, now_s)
        if silent_s < self._silence_max_s:
            wait_s = max(self._silence_max_s - silent_s, _LOOK_AGAIN_S)  # which rounding may make nothing
            self._timer = self._loop.call_at(now_s + wait_s, self._look)
        else:
            self.has_cancelled = True
            self._cancel()


def is_own_loss(error: grpc.aio.AioRpcError, lag: LoopLag) -> bool:
    """Whether a connection broke that this process itself has let go stale, by a pause: peers close one on which their
    keepalives have no answer. That a worker cannot be reached now is a fact all the same."""
    return (
        error.code() is grpc.StatusCode.UNAVAILABLE
        and not was_never_sent(error)
        and lag.is_recovering(asyncio.get_running_loop().time())
    )
