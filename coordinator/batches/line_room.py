"""The room that the lines of one replica share, in sequences: a line with `n=8` takes up eight. Pure.

Each model has a room of its own, as large as its targets have slots: lines that wait for a busy model do not hold up
those of another. All rooms together have a bound. Half of it is kept for the models in equal parts; the other half is
for whoever comes first.

Whose turn it is in a room follows from what each has there: the tenant with the fewest sequences goes first, then its
batch with the fewest, then who came first. What does not fit waits for room that becomes free, and nobody passes it, so
a line with many sequences has its turn. A line with more sequences than its model's room runs alone there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.batches.batch import Batch


@dataclass(frozen=True, slots=True)
class RoomSize:
    """The sequences of lines that a replica may have at once."""

    most: int = 0  # of all models together
    num_slots: Mapping[str, int] = field(default_factory=dict)  # by model

    @property
    def total(self) -> int:
        """The most sequences that there are if every model has lines."""
        return min(self.most, sum(self.num_slots.values()))

    @property
    def part(self) -> int:
        """Sequences that are kept for each model."""
        return self.most // (2 * max(len(self.num_slots), 1))


@dataclass(slots=True, eq=False)
class Turn:
    """A line that wants to run, or runs."""

    model: str
    batch: Batch
    num_sequences: int
    begin: Callable[[], object]  # called once, when it may run
    has_begun: bool = False


class LineRoom:
    """The room of one replica."""

    def __init__(self) -> None:
        self._size = RoomSize()
        # Sequences of lines that run, by model.
        self._num_of_model: Counter[str] = Counter()
        self._num_of_tenant: Counter[tuple[str, str | None]] = Counter()
        self._num_of_batch: Counter[tuple[str, str]] = Counter()
        self._waiting: list[Turn] = []

    @property
    def num_held(self) -> int:
        """Sequences of the lines that run."""
        return self._num_of_model.total()

    def num_of(self, batch: Batch) -> int:
        """Sequences of a batch's lines that run."""
        return sum(num for (_, batch_id), num in self._num_of_batch.items() if batch_id == batch.batch_id)

    def resize(self, size: RoomSize) -> None:
        """Sets the rooms; what runs beyond them goes on."""
        self._size = size
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
        full: set[str] = set()  # models whose first line does not fit
        while turns := [turn for turn in self._waiting if turn.model not in full]:
            # `min` returns the first of several that are alike.
            turn = min(turns, key=self._have)
            if not self._fits(turn):
                full.add(turn.model)
                continue
            self._waiting.remove(turn)
            turn.has_begun = True
            self._count(turn, turn.num_sequences)
            turn.begin()

    def _fits(self, turn: Turn) -> bool:
        size, held = self._size, self._num_of_model[turn.model]
        num_slots = size.num_slots.get(turn.model, 0)
        if not num_slots or not held:
            return num_slots > 0
        others = size.num_slots.keys() - {turn.model}
        kept = sum(max(size.part - self._num_of_model[name], 0) for name in others)
        room = max(size.part, held + size.most - self.num_held - kept)
        return held + turn.num_sequences <= min(num_slots, room)

    def _have(self, turn: Turn) -> tuple[int, int]:
        batch = turn.batch
        return self._num_of_tenant[turn.model, batch.tenant], self._num_of_batch[turn.model, batch.batch_id]

    def _count(self, turn: Turn, num: int) -> None:
        model, batch = turn.model, turn.batch
        self._num_of_model[model] += num
        self._num_of_tenant[model, batch.tenant] += num
        self._num_of_batch[model, batch.batch_id] += num
        if not self._num_of_model[model]:
            del self._num_of_model[model]
        if not self._num_of_tenant[model, batch.tenant]:
            del self._num_of_tenant[model, batch.tenant]
        if not self._num_of_batch[model, batch.batch_id]:
            del self._num_of_batch[model, batch.batch_id]

    def to_claim(self, batches: Sequence[Batch], num_claimed: Callable[[Batch], int]) -> Iterator[tuple[Batch, int]]:
        """Yields the batches that may claim lines, each with the sequences that these should have.

        `num_claimed`: sequences of the lines that a batch has claimed here. Among them may be lines that wait for a
        target and take up no room, so each batch gets its part of the whole room, by tenants; what is free then is for
        all. What is claimed beyond the room waits for its turn.
        """
        num_batches = Counter(batch.tenant for batch in batches)
        num_of_tenant: Counter[str | None] = Counter()
        for (_, tenant), num in self._num_of_tenant.items():
            num_of_tenant[tenant] += num
        total = self._size.total
        left = max(total - self.num_held, 0)
        in_turn = sorted(batches, key=lambda batch: (num_of_tenant[batch.tenant], self.num_of(batch)))
        for number, batch in enumerate(in_turn):
            part = math.ceil(total / len(num_batches) / num_batches[batch.tenant])
            free = math.ceil(left / (len(batches) - number))
            before = num_claimed(batch)
            num = max(part, self.num_of(batch) + free) - before
            if num > 0:
                yield batch, num
                left = max(left - max(num_claimed(batch) - before, 0), 0)
