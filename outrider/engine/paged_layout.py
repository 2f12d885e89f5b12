"""A step laid out for attention kernels that read KV through a block table, such as FlashAttention's. Pure.

All numbers of a step are one array of int32, cut into fixed places by its `PagedShape`: it goes to the device in one
copy, and a CUDA graph that was captured once runs every later step of the same shape or smaller.

Such kernels let every row of a sequence see all keys up to its own, in the order of a list of blocks. Plain text is
just that. A node of a hint tree sees the text and its own ancestors, which lie scattered: it becomes a sequence of its
own, whose list ends in scratch blocks into which the entries behind the last full block of the text are copied first.
So every row, of a text or of a tree, goes through the same kernel in the same order of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.attention import QueryBlock, padded_rows
from outrider.engine.kv_cache import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class PagedShape:
    """How much a step may have at the most."""

    num_rows: int
    num_sequences: int  # one of padding included
    num_blocks: int  # of the longest sequence
    num_copies: int  # entries for scratch blocks

    def places(self) -> dict[str, int]:
        """Names of the parts, in their order, and how long each is."""
        return {
            "token_ids": self.num_rows,
            "positions": self.num_rows,
            "write_slots": self.num_rows,
            "query_starts": self.num_sequences + 1,
            "key_counts": self.num_sequences,
            "block_table": self.num_sequences * self.num_blocks,
            "copy_from": self.num_copies,
            "copy_to": self.num_copies,
            "wanted": self.num_rows,
        }

    @property
    def size(self) -> int:
        return sum(self.places().values())

    def holds(self, other: PagedShape) -> bool:
        return (
            other.num_rows <= self.num_rows
            and other.num_sequences <= self.num_sequences
            and other.num_blocks <= self.num_blocks
            and other.num_copies <= self.num_copies
        )


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Consecutive rows that see the same keys, each up to its own."""

    num_rows: int
    num_keys: int  # of the last row
    block_ids: Sequence[int]
    copies: Sequence[int] = ()  # slots whose entries are to be in scratch blocks


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step before it is written down. `blocks` in their order, one after the other."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    wanted: Sequence[int]  # rows whose logits are
    sequences: Sequence[_Sequence]
    scratch_slots: Sequence[int]  # where the copies of all sequences go, in their order
    block_size: int

    @property
    def shape(self) -> PagedShape:
        """The least that holds it."""
        return PagedShape(
            num_rows=padded_rows(len(self.token_ids)),
            num_sequences=len(self.sequences) + 1,
            num_blocks=max(len(sequence.block_ids) for sequence in self.sequences),
            num_copies=len(self.scratch_slots),
        )

    def write_down(self, shape: PagedShape) -> npt.NDArray[np.int32]:
        """The step's numbers, `[shape.size]`, for a shape that holds it.

        What is left over of each part has no effect: rows of padding are a sequence of their own, whose one key is the
        null block's first entry, and that entry is what superfluous copies copy.
        """
        numbers = np.zeros(shape.size, dtype=np.int32)
        parts = dict(zip(shape.places(), _cut(numbers, shape), strict=True))
        num_rows = len(self.token_ids)
        parts["token_ids"][:num_rows] = self.token_ids
        parts["positions"][:num_rows] = self.positions
        parts["write_slots"][:num_rows] = self.write_slots  # those of padding are the null block's
        parts["wanted"][: len(self.wanted)] = self.wanted
        starts = np.cumsum([0, *(sequence.num_rows for sequence in self.sequences)])
        parts["query_starts"][: len(starts)] = starts
        parts["query_starts"][len(starts) :] = shape.num_rows
        parts["key_counts"][len(self.sequences)] = 1
        table = parts["block_table"].reshape(shape.num_sequences, shape.num_blocks)
        table[:] = NULL_BLOCK
        copied: list[int] = []
        for row, sequence in enumerate(self.sequences):
            parts["key_counts"][row] = sequence.num_keys
            table[row, : len(sequence.block_ids)] = sequence.block_ids
            copied += sequence.copies
        parts["copy_from"][: len(copied)] = copied
        parts["copy_to"][: len(copied)] = self.scratch_slots
        return numbers


def _cut(numbers: npt.NDArray[np.int32], shape: PagedShape) -> Iterator[npt.NDArray[np.int32]]:
    end = 0
    for size in shape.places().values():
        start, end = end, end + size
        yield numbers[start:end]


def plan_paged(
    blocks: Sequence[QueryBlock],
    token_ids: Sequence[int],
    wanted: Sequence[int],
    block_size: int,
    scratch_block_ids: Sequence[int],
) -> PagedPlan | None:
    """None where a step's trees need more scratch blocks than there are."""
    positions: list[int] = []
    write_slots: list[int] = []
    sequences: list[_Sequence] = []
    scratch_slots: list[int] = []
    num_used = 0
    for block in blocks:
        first = block.kv.length - block.num_rows
        write_slots += block.kv.slots(first, block.kv.length).tolist()
        if block.paths is None:
            positions += range(first, block.kv.length)
            sequences.append(_Sequence(block.num_rows, block.kv.length, block.kv.block_ids))
            continue
        for path in block.paths:
            num_keys = block.tree_start + len(path)
            positions.append(num_keys - 1)
            if _is_straight(path, block.tree_start):
                sequences.append(_Sequence(1, num_keys, block.kv.block_ids))
                continue
            num_full = block.tree_start // block_size
            slots = block.kv.slots(0, block.kv.length)
            copies = [*slots[num_full * block_size : block.tree_start], *slots[list(path)]]
            num_scratch = -(-len(copies) // block_size)
            own = scratch_block_ids[num_used : num_used + num_scratch]
            num_used += num_scratch
            if num_used > len(scratch_block_ids):
                return None
            scratch_slots += (
                own[place // block_size] * block_size + place % block_size for place in range(len(copies))
            )
            sequences.append(
                _Sequence(1, num_keys, [*block.kv.block_ids[:num_full], *own], [int(slot) for slot in copies])
            )
    return PagedPlan(token_ids, positions, write_slots, wanted, sequences, scratch_slots, block_size)


def _is_straight(path: Sequence[int], tree_start: int) -> bool:
    """Whether the entries lie behind the text one after the other, as if they were text."""
    return path[0] == tree_start and path[-1] == tree_start + len(path) - 1
