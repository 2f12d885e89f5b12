"""Bounded queue from the model's thread to a gRPC stream that the caller may not read.

A slow caller delays nothing else: the model goes on with its batch. So the queue is bounded, and a caller that leaves
too much unread loses its session; it may start another where it stopped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from outrider.errors import Overloaded
from target_worker.messages import Action, TokensCommitted

CALLER_BYTES_MAX: Final = 4 << 20
"""Most bytes of a session's queued steps, as `size_of` estimates them. The prompt's log probabilities, bounded by the
prompt's length, come on top."""
# Measured on CPython 3.11 and rounded up: per step, per token, and per alternative in its log probabilities.
_STEP_BYTES: Final = 512
_TOKEN_BYTES: Final = 256
_ALTERNATIVE_BYTES: Final = 160


class CallerQueue:
    """Actions of one session for its one reader."""

    def __init__(self, bytes_max: int = CALLER_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._actions: deque[Action] = deque()
        self._has_items = asyncio.Event()
        self.num_put = 0
        self.num_commit_bytes = 0  # sent to the session's draft worker meanwhile
        self.num_bytes = 0
        self.is_overrun = False
        """Whether the caller left too much unread; the queue stays empty from then on."""

    def put(self, action: Action) -> bool:
        """Adds an action; returns False once, when the bound is exceeded and everything is dropped."""
        if self.is_overrun:
            return True
        self.num_put += 1
        self.num_bytes += size_of(action)
        self._actions.append(action)
        self._has_items.set()
        if self.num_bytes <= self._bytes_max:
            return True
        self._actions.clear()
        self.num_bytes = 0
        self.is_overrun = True
        return False

    def remind(self) -> None:
        """Makes the reader's `get` return None once, although there is no action."""
        self._has_items.set()

    async def get(self) -> Action | None:
        """Returns the next action, or None for a reminder. Raises Overloaded when too much was left unread."""
        await self._has_items.wait()
        if self.is_overrun:
            raise Overloaded(f"this session's caller left more than {self._bytes_max} bytes unread")
        action = self._actions.popleft() if self._actions else None
        if not self._actions:
            self._has_items.clear()
        if action is not None:
            self.num_bytes -= size_of(action)
        return action


class Reminder:
    """Sends a caller a sign of life while there is nothing else to send: before its first token, and while its session
    is preempted. One timer serves all reads, because a timeout per read would cost every step."""

    def __init__(self, queue: CallerQueue, every_s: float, may_remind: Callable[[], bool]) -> None:
        """`may_remind` is called each time. Runs until `stop`."""
        self._queue = queue
        self._every_s = every_s
        self._may_remind = may_remind
        self._num_seen = queue.num_put
        self._timer = asyncio.get_running_loop().call_later(every_s, self._look)

    def stop(self) -> None:
        """Cancels the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._queue.num_put == self._num_seen and self._may_remind():
            self._queue.remind()
        self._num_seen = self._queue.num_put
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)


def size_of(action: Action) -> int:
    """Estimated memory of a step in bytes, rounded up; 0 for actions that a session sends once."""
    if not isinstance(action, TokensCommitted):
        return 0
    num_alternatives = sum(len(each.top) for each in action.logprobs) if action.logprobs else 0
    return _STEP_BYTES + _TOKEN_BYTES * len(action.token_ids) + _ALTERNATIVE_BYTES * num_alternatives
