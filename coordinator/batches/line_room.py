"""The room that the lines of one replica share, in sequences: a line with `n=8` takes up eight. Pure.

All batches together have one room. Whose turn it is follows from what each has: the tenant with the fewest sequences
goes first, then its batch with the fewest, then who came first. What does not fit waits for room that becomes free, and
nobody passes it, so a line with many sequences has its turn. A line with more sequences than the room runs alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from coordinator.batches.batch import Batch


@dataclass(slots=True, eq=False)
class Turn:
    """A line that wants to run, or runs."""

    batch: Batch
    num_sequences: int
    begin: Callable[[], object]  # called once, when it may run
    has_begun: bool = False


class LineRoom:
    """The room of one replica."""

    def __init__(self) -> None:
        self._total = 0
        self._num_of_tenant: Counter[str | None] = Counter()  # sequences of lines that run
        self._num_of_batch: Counter[str] = Counter()
        self._waiting: list[Turn] = []

    @property
    def num_held(self) -> int:
        """Sequences of the lines that run."""
        return self._num_of_batch.total()

    def num_of(self, batch: Batch) -> int:
        """Sequences of a batch's lines that run."""
        return self._num_of_batch[batch.batch_id]

    def resize(self, total: int) -> None:
        """Sets the room; what runs beyond it goes on."""
        self._total = total
        self._begin_some()

    def ask(self, turn: Turn) -> None:
        """Begins a line now or later; `leave` follows in any case."""
        self._waiting.append(turn)
        self._begin_some()

    def leave(self, turn: Turn) -> None:
        """Ends a line, whether it has begun or not."""
        if turn.has_begun:
            self._count(turn, -turn.num_sequences)
        else:
            self._waiting.remove(turn)
        self._begin_some()

    def _begin_some(self) -> None:
        while self._waiting and self._total:
            # `min` returns the first of several that are alike.
            turn = min(self._waiting, key=lambda each: self._have(each.batch))
            if self.num_held and self.num_held + turn.num_sequences > self._total:
                return
            self._waiting.remove(turn)
            turn.has_begun = True
            self._count(turn, turn.num_sequences)
            turn.begin()

    def _have(self, batch: Batch) -> tuple[int, int]:
        return self._num_of_tenant[batch.tenant], self._num_of_batch[batch.batch_id]

    def _count(self, turn: Turn, num: int) -> None:
        self._num_of_tenant[turn.batch.tenant] += num
        self._num_of_batch[turn.batch.batch_id] += num
        if not self._num_of_batch[turn.batch.batch_id]:
            del self._num_of_batch[turn.batch.batch_id]
        if not self._num_of_tenant[turn.batch.tenant]:
            del self._num_of_tenant[turn.batch.tenant]

    def to_claim(self, batches: Sequence[Batch], num_claimed: Callable[[Batch], int]) -> Iterator[tuple[Batch, int]]:
        """Yields the batches that may claim lines, each with the sequences that these should have.

        `num_claimed`: sequences of the lines that a batch has claimed here. Among them may be lines that wait for a
        target and take up no room, so each batch gets its part of the whole room, by tenants; what is free then is for
        all. What is claimed beyond the room waits for its turn.
        """
        num_batches = Counter(batch.tenant for batch in batches)
        left = max(self._total - self.num_held, 0)
        for number, batch in enumerate(sorted(batches, key=self._have)):
            part = math.ceil(self._total / len(num_batches) / num_batches[batch.tenant])
            free = math.ceil(left / (len(batches) - number))
            before = num_claimed(batch)
            num = max(part, self.num_of(batch) + free) - before
            if num > 0:
                yield batch, num
                left = max(left - max(num_claimed(batch) - before, 0), 0)
