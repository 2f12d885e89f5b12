"""What a session tells its caller, between the model's thread and a gRPC stream that may not be read.

A caller that falls behind slows nothing down here: the model goes on in its batch. So what waits is bounded, and a
caller that leaves more unread loses its session, with all that it holds; it may begin another where it stopped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from outrider.errors import Overloaded
from target_worker.messages import Action, TokensCommitted

CALLER_BYTES_MAX: Final = 4 << 20
"""Of a session's steps that may wait for its caller, as `size_of` estimates them. The prompt's log probabilities, which
the prompt's length bounds, come on top."""
# Measured on CPython 3.11, and rounded up: of a step, of a token, and of each alternative in its log probabilities.
_STEP_BYTES: Final = 512
_TOKEN_BYTES: Final = 256
_ALTERNATIVE_BYTES: Final = 160


class CallerQueue:
    """One session's; one reader."""

    def __init__(self, bytes_max: int = CALLER_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._actions: deque[Action] = deque()
        self._has_news = asyncio.Event()
        self.num_put = 0
        self.num_bytes = 0
        self.is_overrun = False
        """Whether the caller left too much unread. Nothing waits for it any more."""

    def put(self, action: Action) -> bool:
        """Whether there is room. Once there was none, everything is dropped."""
        if self.is_overrun:
            return True
        self.num_put += 1
        self.num_bytes += size_of(action)
        self._actions.append(action)
        self._has_news.set()
        if self.num_bytes <= self._bytes_max:
            return True
        self._actions.clear()
        self.num_bytes = 0
        self.is_overrun = True
        return False

    def remind(self) -> None:
        """There is nothing to tell, and the caller should hear so, once."""
        self._has_news.set()

    async def get(self) -> Action | None:
        """The next one; None for a reminder. Raises Overloaded when too much was left unread."""
        await self._has_news.wait()
        if self.is_overrun:
            raise Overloaded(f"this session's caller left more than {self._bytes_max} bytes unread")
        action = self._actions.popleft() if self._actions else None
        if not self._actions:
            self._has_news.clear()
        if action is not None:
            self.num_bytes -= size_of(action)
        return action


class Reminder:
    """Has a caller hear from time to time that somebody is there, while there is nothing else to tell: before its first
    token, and while its session is preempted. One timer for all reads: a limit for each of them would cost every step.
    """

    def __init__(self, queue: CallerQueue, every_s: float, may_remind: Callable[[], bool]) -> None:
        """`may_remind` is asked each time. Runs until `stop`."""
        self._queue = queue
        self._every_s = every_s
        self._may_remind = may_remind
        self._num_seen = queue.num_put
        self._timer = asyncio.get_running_loop().call_later(every_s, self._look)

    def stop(self) -> None:
        """No more timers."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._queue.num_put == self._num_seen and self._may_remind():
            self._queue.remind()
        self._num_seen = self._queue.num_put
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)


def size_of(action: Action) -> int:
    """About how many bytes a step takes in memory, rather more than fewer; 0 for what a session says once."""
    if not isinstance(action, TokensCommitted):
        return 0
    num_alternatives = sum(len(each.top) for each in action.logprobs or ())
    return _STEP_BYTES + _TOKEN_BYTES * len(action.token_ids) + _ALTERNATIVE_BYTES * num_alternatives
