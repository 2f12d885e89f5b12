"""What a session tells its caller, between the model's thread and a gRPC stream that may not be read.

A caller that falls behind slows nothing down here: the model goes on in its batch. So what waits is bounded, and a
caller that leaves more unread loses its session, with all that it holds; it may begin another where it stopped.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
        self.num_bytes = 0
        self.is_overrun = False
        """Whether the caller left too much unread. Nothing waits for it any more."""

    def put(self, action: Action) -> bool:
        """Whether there is room. Once there was none, everything is dropped."""
        if self.is_overrun:
            return True
        self.num_bytes += size_of(action)
        self._actions.append(action)
        self._has_news.set()
        if self.num_bytes <= self._bytes_max:
            return True
        self._actions.clear()
        self.num_bytes = 0
        self.is_overrun = True
        return False

    async def get(self) -> Action:
        """The next one. Raises Overloaded when too much was left unread."""
        await self._has_news.wait()
        if self.is_overrun:
            raise Overloaded(f"this session's caller left more than {self._bytes_max} bytes unread")
        action = self._actions.popleft()
        self.num_bytes -= size_of(action)
        if not self._actions:
            self._has_news.clear()
        return action


def size_of(action: Action) -> int:
    """About how many bytes a step takes in memory, rather more than fewer; 0 for what a session says once."""
    if not isinstance(action, TokensCommitted):
        return 0
    num_alternatives = sum(len(each.top) for each in action.logprobs or ())
    return _STEP_BYTES + _TOKEN_BYTES * len(action.token_ids) + _ALTERNATIVE_BYTES * num_alternatives
