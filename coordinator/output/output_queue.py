"""Output queue between the sequences of a request and its client: outputs that wait are joined.

A chunk costs the same whatever its size: a system call, a pass through the proxy, a wake-up of the client. So a client
that falls behind catches up by larger chunks. Nothing is delayed for that: the first outputs go at once, and later ones
wait for a turn of the event loop that was due anyway.

The queue is bounded in bytes, for a step may have one token or a hundred with twenty log probabilities each; a producer
waits while it is full. The limit on that wait lies elsewhere: the queue reports how old its oldest output is.

Invariant: joined outputs have the same content as the single ones, in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.output.sequence_output import OutputItem
from coordinator.output.text_output import PromptOutput, VisibleOutput
from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2

QUEUE_BYTES_MAX: Final = 1 << 20
"""Most bytes of a request's outputs that wait, as `size_of` estimates them; each sequence may have one more step."""
GATHERED_BYTES_MAX: Final = 128 << 20
"""Most bytes of outputs kept until a request ends, because its answer is no stream or it has `best_of`, including what
it takes to encode the answer; and of a prompt's log probabilities, which come at once."""
CHUNK_BYTES_MAX: Final = 64 << 10
"""Most bytes of outputs taken at once, unless a single one is larger."""
# Turns of the event loop in which an arrived message comes through gRPC: the loop sees it in the first, its reader runs
# in the second.
_LOOP_ITERATIONS: Final = 2
# Bytes of an item, a token, its log probabilities and each of their alternatives, measured on CPython 3.11 with upb's
# messages and rounded up.
_ITEM_BYTES: Final = 768
_TOKEN_BYTES: Final = 128
_LOGPROBS_BYTES: Final = 512
_ALTERNATIVE_BYTES: Final = 24
_CHARACTER_BYTES: Final = 4  # at most, in memory and as UTF-8


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """An output of the sequence with this index, 0 to n - 1."""

    index: int
    item: OutputItem


@dataclass(frozen=True, slots=True)
class _Waiting:
    output: ChoiceOutput
    num_bytes: int
    since_s: float


class OutputQueue:
    """Queue with several producers and one reader."""

    def __init__(self, now_s: Callable[[], float], bytes_max: int = QUEUE_BYTES_MAX) -> None:
        """`bytes_max`: most bytes that wait, as `size_of` estimates them."""
        self._now_s = now_s
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._waiting: deque[_Waiting] = deque()
        self._error: Exception | None = None
        self._taken_since_s: float | None = None
        self._has_items = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._has_begun = False

    @property
    def oldest_s(self) -> float | None:
        """Arrival of the oldest output that the reader has not finished with; it has finished with what it took when it
        asks for more. None if there is none."""
        if self._taken_since_s is not None:
            return self._taken_since_s
        return self._waiting[0].since_s if self._waiting else None

    async def put(self, output: ChoiceOutput) -> None:
        """Adds an output, after waiting while the queue is full. Outputs after the end are dropped."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        if self._error is not None:
            return
        num_bytes = size_of(output.item)
        self._waiting.append(_Waiting(output, num_bytes, self._now_s()))
        self._num_bytes += num_bytes
        self._has_items.set()
        if self._num_bytes >= self._bytes_max:
            self._has_room.clear()

    def end(self, error: Exception) -> None:
        """Ends the queue: what waits is still taken, then the error is raised. Does nothing after the end."""
        self._error = self._error or error
        self._has_items.set()
        self._has_room.set()

    def drop(self, error: Exception) -> None:
        """Drops what waits, and ends the queue with the error."""
        self._waiting.clear()
        self._num_bytes = 0
        self._error = error
        self._has_items.set()
        self._has_room.set()

    async def take(self) -> list[ChoiceOutput]:
        """Takes the oldest outputs, at least one; consecutive steps of a sequence are joined. Raises the error of the
        end once everything before it was taken."""
        self._taken_since_s = None
        await self._has_items.wait()
        if self._has_begun:
            await self._until_nothing_more_is_due()
        self._has_begun = True
        if not self._waiting:
            assert self._error is not None
            raise self._error
        self._taken_since_s = self._waiting[0].since_s
        taken: list[ChoiceOutput] = []
        num_bytes = 0
        while self._waiting and (not taken or num_bytes + self._waiting[0].num_bytes <= CHUNK_BYTES_MAX):
            each = self._waiting.popleft()
            taken.append(each.output)
            num_bytes += each.num_bytes
        self._num_bytes -= num_bytes
        if not self._waiting and self._error is None:
            self._has_items.clear()
        if self._num_bytes < self._bytes_max:
            self._has_room.set()
        return joined(taken)

    async def _until_nothing_more_is_due(self) -> None:
        """Waits while more comes: under load a turn of the loop is long."""
        num_seen = 0
        while num_seen < len(self._waiting) and self._num_bytes < CHUNK_BYTES_MAX:
            num_seen = len(self._waiting)
            for _ in range(_LOOP_ITERATIONS):
                await asyncio.sleep(0)


def check_gathered(num_bytes: int) -> None:
    """Raises InvalidRequest if one request takes too many bytes, as `size_of` and `written_bytes` estimate."""
    if num_bytes > GATHERED_BYTES_MAX:
        raise InvalidRequest(
            None,
            f"the answer, or the prompt's part of it, takes more than the {GATHERED_BYTES_MAX >> 20} MiB of memory "
            "that there are for one request; ask for a stream, or for less (max_tokens, n, best_of, logprobs, "
            "prompt_logprobs)",
        )


def size_of_scores(num_tokens: int, num_alternatives: int) -> int:
    """Estimates the bytes in memory of a prompt's log probabilities."""
    return num_tokens * (_LOGPROBS_BYTES + num_alternatives * _ALTERNATIVE_BYTES)


def size_of(item: OutputItem) -> int:
    """Estimates the bytes in memory of an item, rather too high."""
    size = _ITEM_BYTES + _CHARACTER_BYTES * len(item.text)
    if isinstance(item, PromptOutput):
        return size + _size_of_logprobs(item.logprobs)
    if isinstance(item, VisibleOutput):
        size += _TOKEN_BYTES * len(item.token_ids) + _CHARACTER_BYTES * sum(map(len, item.pieces))
        return size + _size_of_logprobs(item.logprobs)
    return size


def _size_of_logprobs(logprobs: Sequence[common_pb2.TokenLogprobs]) -> int:
    num_alternatives = sum(len(each.top_token_ids) for each in logprobs)
    return _LOGPROBS_BYTES * len(logprobs) + _ALTERNATIVE_BYTES * num_alternatives


def joined(outputs: Iterable[ChoiceOutput]) -> list[ChoiceOutput]:
    """Joins consecutive steps of the same sequence."""
    result: list[ChoiceOutput] = []
    last_of: dict[int, int] = {}  # index of a sequence: position of its last output in the result
    for output in outputs:
        position = last_of.get(output.index)
        last = None if position is None else result[position].item
        item = output.item
        if (
            position is not None
            and isinstance(last, VisibleOutput)
            and isinstance(item, VisibleOutput)
            and last.is_repeat == item.is_repeat
        ):
            result[position] = ChoiceOutput(output.index, _sum(last, item))
        else:
            last_of[output.index] = len(result)
            result.append(output)
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
