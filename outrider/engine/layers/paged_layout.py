"""Step layout for attention kernels that read KV through a block table, such as FlashAttention's. Pure.

All numbers of a step are one int32 array, divided into fixed parts by its `PagedShape`: it goes to the device in one
copy, and a CUDA graph that was captured once runs every later step of the same shape or smaller.

Such kernels let every row of a sequence see all keys up to its own, in the order of a list of blocks. That fits
committed tokens. A node of a hint tree sees the committed tokens and its own ancestors, which are scattered: it becomes
a sequence of its own, whose list ends in scratch blocks into which the entries behind the last full committed block are
copied first. So every row, committed or of a tree, goes through the same kernel in the same order of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.kv.kv_cache import NULL_BLOCK
from outrider.engine.layers.attention import QueryBlock, padded_rows


@dataclass(frozen=True, slots=True)
class PagedShape:
    """Upper bounds of a step's sizes."""

    num_rows: int
    num_sequences: int  # padding counts as one
    num_blocks: int  # of the longest sequence
    num_copies: int  # entries for scratch blocks

    def part_sizes(self) -> dict[str, int]:
        """Names and lengths of the parts, in order."""
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
        """Number of int32 entries of all parts together."""
        return sum(self.part_sizes().values())

    def holds(self, other: PagedShape) -> bool:
        """Whether a step of the other shape fits into this one."""
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
    copies: Sequence[int] = ()  # slots whose entries are copied to scratch blocks


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step's numbers before they are written into an array; blocks one after the other in their order."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    wanted: Sequence[int]  # rows whose logits are needed
    sequences: Sequence[_Sequence]
    scratch_slots: Sequence[int]  # destinations of all sequences' copies, in order

    @property
    def shape(self) -> PagedShape:
        """The smallest shape that holds the step."""
        return PagedShape(
            num_rows=padded_rows(len(self.token_ids)),
            num_sequences=len(self.sequences) + 1,
            num_blocks=max(len(sequence.block_ids) for sequence in self.sequences),
            num_copies=len(self.scratch_slots),
        )

    def write_down(self, shape: PagedShape) -> npt.NDArray[np.int32]:
        """Returns the step's numbers, `[shape.size]`, for a shape that holds it.

        The remainder of each part has no effect: padding rows are a sequence of their own, whose only key is the null
        block's first entry, and surplus copies copy that entry.
        """
        numbers = np.zeros(shape.size, dtype=np.int32)
        parts = dict(zip(shape.part_sizes(), _split(numbers, shape), strict=True))
        num_rows = len(self.token_ids)
        parts["token_ids"][:num_rows] = self.token_ids
        parts["positions"][:num_rows] = self.positions
        parts["write_slots"][:num_rows] = self.write_slots  # padding writes to the null block
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


def _split(numbers: npt.NDArray[np.int32], shape: PagedShape) -> Iterator[npt.NDArray[np.int32]]:
    end = 0
    for size in shape.part_sizes().values():
        start, end = end, end + size
        yield numbers[start:end]


def plan_paged(
    blocks: Sequence[QueryBlock],
    token_ids: Sequence[int],
    wanted: Sequence[int],
    block_size: int,
    scratch_block_ids: Sequence[int],
) -> PagedPlan | None:
    """Plans a step; None where its trees need more scratch blocks than there are."""
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
            first_copied = num_full * block_size
            slots = block.kv.slots(first_copied, block.kv.length)
            seen = [entry - first_copied for entry in path]
            copies = [*slots[: block.tree_start - first_copied], *slots[seen]]
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
    return PagedPlan(token_ids, positions, write_slots, wanted, sequences, scratch_slots)


def _is_straight(path: Sequence[int], tree_start: int) -> bool:
    """Whether a path's entries follow the committed ones without gaps."""
    return path[0] == tree_start and path[-1] == tree_start + len(path) - 1
