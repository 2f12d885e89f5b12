"""Between the texts of a request, which grow step by step, and a client that reads: news that wait are joined.

Every chunk costs the same whatever it carries: a system call here, a pass through the proxy, a wake-up of the client.
So whoever falls behind catches up by larger chunks instead of falling behind further. Nothing is held back for that:
the first news go at once, and later ones wait for a turn of the event loop that was due anyway.

Invariant: joined news say exactly what the single ones did, in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from coordinator.request_session import News
from coordinator.text_output import VisibleOutput

# Turns of the event loop in which a message that has already arrived comes through gRPC: one in which the loop sees
# it, one in which its reader runs.
_TURNS: Final = 2


@dataclass(frozen=True, slots=True)
class ChoiceNews:
    """News of the text with this index, 0 to n - 1."""

    index: int
    news: News


class NewsQueue:
    """Several tasks put, one takes."""

    def __init__(self, size_max: int) -> None:
        """`size_max` is how many news may wait, each as it came."""
        self._size_max = size_max
        self._waiting: deque[ChoiceNews | Exception] = deque()
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._has_begun = False

    async def put(self, item: ChoiceNews | Exception) -> None:
        """Waits while the queue is full. What comes after an exception is never taken."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        self._waiting.append(item)
        self._has_news.set()
        if len(self._waiting) >= self._size_max:
            self._has_room.clear()

    async def take(self) -> list[ChoiceNews]:
        """All that waits, at least one; news of a text that follow one another are one. Raises an exception that was
        put once everything before it was taken."""
        await self._has_news.wait()
        if self._has_begun:
            await self._until_nothing_more_is_due()
        self._has_begun = True
        taken: list[ChoiceNews] = []
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, Exception):
                break
            taken.append(item)
            self._waiting.popleft()
        if not taken:
            assert isinstance(self._waiting[0], Exception)
            raise self._waiting[0]
        if not self._waiting:
            self._has_news.clear()
        self._has_room.set()
        return joined(taken)

    async def _until_nothing_more_is_due(self) -> None:
        """Under load a turn of the loop is long, and more may have come by its end."""
        num_seen = 0
        while num_seen < len(self._waiting) < self._size_max:
            num_seen = len(self._waiting)
            for _ in range(_TURNS):
                await asyncio.sleep(0)


def joined(items: Iterable[ChoiceNews]) -> list[ChoiceNews]:
    """The news with those steps joined that follow one another in a text."""
    result: list[ChoiceNews] = []
    last_of: dict[int, int] = {}  # index of a text: where its last news stand in the result
    for item in items:
        place = last_of.get(item.index)
        last = None if place is None else result[place].news
        news = item.news
        if (
            place is not None
            and isinstance(last, VisibleOutput)
            and isinstance(news, VisibleOutput)
            and last.is_repeat == news.is_repeat
        ):
            result[place] = ChoiceNews(item.index, _sum(last, news))
        else:
            last_of[item.index] = len(result)
            result.append(item)
    return result


def _sum(first: VisibleOutput, second: VisibleOutput) -> VisibleOutput:
    return VisibleOutput(
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.origins + second.origins,
        first.pieces + second.pieces,
        first.logprobs + second.logprobs,
        first.is_repeat,
    )
