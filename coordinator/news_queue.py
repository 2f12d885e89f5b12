"""Between the texts of a request, which grow step by step, and a client that reads: news that wait are joined.

Every chunk costs the same whatever it carries: a system call here, a pass through the proxy, a wake-up of the client.
So whoever falls behind catches up by larger chunks instead of falling behind further. Nothing is held back for that:
the first news go at once, and later ones wait for a turn of the event loop that was due anyway.

What waits is bounded in bytes, for a step may carry one token or a hundred with twenty log probabilities each; whoever
puts more waits. How long that may last is not for the queue to decide: it tells how old its oldest news are.

Invariant: joined news say exactly what the single ones did, in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.request_session import News
from coordinator.text_output import PromptOutput, VisibleOutput
from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2

QUEUE_BYTES_MAX: Final = 1 << 20
"""Of a request's news that may wait, as `size_of` estimates them. Each text may hold one step that finds no room."""
GATHERED_BYTES_MAX: Final = 128 << 20
"""Of news that are kept until a request has ended, because its answer is no stream, with what it takes to write that,
or is one of `best_of`; and of its prompt's log probabilities, which come as one."""
CHUNK_BYTES_MAX: Final = 64 << 10
"""Of news that are taken at once, unless one alone is larger."""
# Turns of the event loop in which a message that has already arrived comes through gRPC: one in which the loop sees
# it, one in which its reader runs.
_TURNS: Final = 2
# Measured on CPython 3.11 with upb's messages, and rounded up: of news, of a token, of its log probabilities, and of
# each alternative among those.
_NEWS_BYTES: Final = 768
_TOKEN_BYTES: Final = 128
_LOGPROBS_BYTES: Final = 512
_ALTERNATIVE_BYTES: Final = 24
_CHARACTER_BYTES: Final = 4  # at most, in memory and as UTF-8


@dataclass(frozen=True, slots=True)
class ChoiceNews:
    """News of the text with this index, 0 to n - 1."""

    index: int
    news: News


@dataclass(frozen=True, slots=True)
class _Waiting:
    item: ChoiceNews
    num_bytes: int
    since_s: float


class NewsQueue:
    """Several tasks put, one takes."""

    def __init__(self, now_s: Callable[[], float], bytes_max: int = QUEUE_BYTES_MAX) -> None:
        """`bytes_max` of news may wait, as `size_of` has them."""
        self._now_s = now_s
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._waiting: deque[_Waiting] = deque()
        self._error: Exception | None = None
        self._taken_since_s: float | None = None
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._has_begun = False

    @property
    def num_bytes(self) -> int:
        """Of what waits to be taken."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Whether whoever puts has to wait."""
        return not self._has_room.is_set()

    @property
    def oldest_s(self) -> float | None:
        """When the oldest came of the news that the reader is not done with; it is done with what it took when it asks
        for more. None where there are none."""
        if self._taken_since_s is not None:
            return self._taken_since_s
        return self._waiting[0].since_s if self._waiting else None

    async def put(self, item: ChoiceNews) -> None:
        """Waits while the queue is full. What comes after the end is never taken."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        if self._error is not None:
            return
        num_bytes = size_of(item.news)
        self._waiting.append(_Waiting(item, num_bytes, self._now_s()))
        self._num_bytes += num_bytes
        self._has_news.set()
        if self._num_bytes >= self._bytes_max:
            self._has_room.clear()

    def end(self, error: Exception) -> None:
        """What waits is still taken, and then the error is raised. Does nothing after the end."""
        self._error = self._error or error
        self._has_news.set()
        self._has_room.set()

    def drop(self, error: Exception) -> None:
        """The error is raised instead of what waits, which nobody will have."""
        self._waiting.clear()
        self._num_bytes = 0
        self._error = error
        self._has_news.set()
        self._has_room.set()

    async def take(self) -> list[ChoiceNews]:
        """The oldest of what waits, at least one; news of a text that follow one another are one. Raises the error of
        the end once everything before it was taken."""
        self._taken_since_s = None
        await self._has_news.wait()
        if self._has_begun:
            await self._until_nothing_more_is_due()
        self._has_begun = True
        if not self._waiting:
            assert self._error is not None
            raise self._error
        self._taken_since_s = self._waiting[0].since_s
        taken: list[ChoiceNews] = []
        num_bytes = 0
        while self._waiting and (not taken or num_bytes + self._waiting[0].num_bytes <= CHUNK_BYTES_MAX):
            each = self._waiting.popleft()
            taken.append(each.item)
            num_bytes += each.num_bytes
        self._num_bytes -= num_bytes
        if not self._waiting and self._error is None:
            self._has_news.clear()
        if self._num_bytes < self._bytes_max:
            self._has_room.set()
        return joined(taken)

    async def _until_nothing_more_is_due(self) -> None:
        """Under load a turn of the loop is long, and more may have come by its end."""
        num_seen = 0
        while num_seen < len(self._waiting) and self._num_bytes < CHUNK_BYTES_MAX:
            num_seen = len(self._waiting)
            for _ in range(_TURNS):
                await asyncio.sleep(0)


def check_gathered(num_bytes: int) -> None:
    """Raises InvalidRequest where one request would take too many bytes, as `size_of` and `written_bytes` estimate."""
    if num_bytes > GATHERED_BYTES_MAX:
        raise InvalidRequest(
            None,
            f"the answer, or what it says of the prompt, takes more than the {GATHERED_BYTES_MAX >> 20} MiB of memory "
            "that there are for one request; ask for a stream, or for less (max_tokens, n, best_of, logprobs, "
            "prompt_logprobs)",
        )


def size_of_scores(num_tokens: int, num_alternatives: int) -> int:
    """About how many bytes the log probabilities of a prompt take in memory."""
    return num_tokens * (_LOGPROBS_BYTES + num_alternatives * _ALTERNATIVE_BYTES)


def size_of(news: News) -> int:
    """About how many bytes news take in memory, rather more than fewer."""
    size = _NEWS_BYTES + _CHARACTER_BYTES * len(news.text)
    if isinstance(news, PromptOutput):
        return size + _size_of_logprobs(news.logprobs)
    if isinstance(news, VisibleOutput):
        size += _TOKEN_BYTES * len(news.token_ids) + _CHARACTER_BYTES * sum(map(len, news.pieces))
        return size + _size_of_logprobs(news.logprobs)
    return size


def _size_of_logprobs(logprobs: Sequence[common_pb2.TokenLogprobs]) -> int:
    num_alternatives = sum(len(each.top_token_ids) for each in logprobs)
    return _LOGPROBS_BYTES * len(logprobs) + _ALTERNATIVE_BYTES * num_alternatives


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
