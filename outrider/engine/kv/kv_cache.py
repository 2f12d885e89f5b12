"""Allocation and reference counts of KV blocks. Pure: block numbers, no tensors.

A sequence's KV lives in fixed-size blocks; entry `i` of a sequence is slot `block_ids[i // block_size] *
block_size + i % block_size` of every layer's cache. A full block can be published under a digest for other
sequences to begin with; blocks are reference-counted, so that these share it (paged attention, Kwon et al. 2309.06180).
A published block that nobody references is kept until its place is needed, the longest unused first.

Invariant: a published block is never written.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0
"""A block that no sequence owns. Padding reads it, so it must hold finite numbers."""


Digest = bytes
"""Identifies a block by the tokens of its sequence from the first one to the block's last (`prefix_cache`)."""


class OutOfBlocksError(Exception):
    """No free KV block is left; the caller should have made room first (`KVSequence.room`)."""


class BlockAllocator:
    """Hands out blocks `1 .. num_blocks - 1` and counts their references."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"need at least 2 blocks of at least 1 entry, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._num_references = [0] * num_blocks
        self._published: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}  # of published blocks
        # Published and unreferenced, the least recently used first.
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, published but unreferenced ones included."""
        return len(self._free) + len(self._unused)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences reference, 0 to 1; cached blocks do not count."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def blocks_for(self, num_entries: int) -> int:
        """Blocks that hold `num_entries` KV entries."""
        return -(-num_entries // self.block_size)

    def allocate(self) -> int:
        """Takes a free block, or the cached one that was unused longest; returns its id. Raises OutOfBlocksError."""
        if not self._free and not self._unused:
            raise OutOfBlocksError(f"all {self.num_blocks - 1} KV blocks are in use")
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._unused.popitem(last=False)
            del self._published[self._digests.pop(block_id)]
        self._num_references[block_id] = 1
        return block_id

    def release(self, block_id: int) -> None:
        """Drops one reference to a block."""
        assert self._num_references[block_id] > 0, f"block {block_id} is free"
        self._num_references[block_id] -= 1
        if self._num_references[block_id] == 0:
            if block_id in self._digests:
                self._unused[block_id] = None
            else:
                self._free.append(block_id)

    def publish(self, block_id: int, digest: Digest) -> None:
        """Publishes a block that will not be written again; does nothing if its digest is published already."""
        assert self._num_references[block_id] > 0, f"block {block_id} is free"
        if digest not in self._published and block_id not in self._digests:
            self._published[digest] = block_id
            self._digests[block_id] = digest

    def num_published(self, digests: Sequence[Digest]) -> int:
        """The number of leading blocks of a sequence that are published."""
        count = 0
        while count < len(digests) and digests[count] in self._published:
            count += 1
        return count

    def num_shared(self, digests: Sequence[Digest]) -> int:
        """The number of leading blocks of a sequence that are published and in use, so that sharing them costs
        nothing."""
        published = (self._published.get(digest) for digest in digests)
        held = itertools.takewhile(lambda block_id: block_id is not None, published)
        return sum(block_id not in self._unused for block_id in held)

    def take_published(self, digest: Digest) -> int:
        block_id = self._published[digest]
        self._unused.pop(block_id, None)
        self._num_references[block_id] += 1
        return block_id

    def may_write(self, block_id: int) -> bool:
        """Whether a block belongs to one sequence alone and is not published."""
        return self._num_references[block_id] == 1 and block_id not in self._digests

    def check_integrity(self, sequences: list[KVSequence]) -> None:
        """Raises AssertionError unless `sequences` together explain every reference and all other blocks are free."""
        references = [0] * self.num_blocks
        for sequence in sequences:
            for block_id in sequence.block_ids:
                references[block_id] += 1
        assert references == self._num_references, "block references differ from what the sequences hold"
        assert sorted([*self._free, *self._unused]) == [
            block_id for block_id in range(1, self.num_blocks) if references[block_id] == 0
        ], "what is free is not what nobody references"
        assert self._digests == {block_id: digest for digest, block_id in self._published.items()}, (
            "published blocks and their digests differ"
        )
        assert all(block_id in self._digests for block_id in self._unused), "a block is kept for no text"


@dataclass(slots=True, eq=False)
class KVSequence:
    """The KV of one sequence: entries `[0, length)` are valid in every layer."""

    allocator: BlockAllocator
    block_ids: list[int] = field(default_factory=list)
    length: int = 0

    def extend(self, num_entries: int) -> None:
        """Makes room for `num_entries` more and counts them as valid; the next forward pass writes them.

        Raises OutOfBlocksError and changes nothing when there is no room.
        """
        size = self.allocator.block_size
        assert (
            not num_entries or self.length % size == 0 or self.allocator.may_write(self.block_ids[self.length // size])
        ), "a published block would be written"
        num_new = self.num_missing(num_entries)
        if num_new > self.allocator.num_free:
            raise OutOfBlocksError(f"{num_new} KV blocks wanted, {self.allocator.num_free} free")
        self.block_ids.extend(self.allocator.allocate() for _ in range(num_new))
        self.length += num_entries

    def num_missing(self, num_entries: int) -> int:
        """Blocks that `extend` would take from those that are free."""
        return self.allocator.blocks_for(self.length + num_entries) - len(self.block_ids)

    def room(self, num_free: int) -> int:
        """Entries that `extend` could add with `num_free` blocks."""
        return (len(self.block_ids) + num_free) * self.allocator.block_size - self.length

    def truncate(self, length: int) -> None:
        """Drops entries from `length` on and returns their blocks, the last first: among cached blocks the end of a
        sequence is then evicted before its beginning, without which it is useless."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} KV entries to {length}")
        num_kept = self.allocator.blocks_for(length)
        for block_id in reversed(self.block_ids[num_kept:]):
            self.allocator.release(block_id)
        del self.block_ids[num_kept:]
        self.length = length

    def adopt(self, digests: Sequence[Digest]) -> None:
        """Starts an empty sequence with the published blocks of these digests."""
        assert self.length == 0, "only an empty sequence can begin with published blocks"
        self.block_ids = [self.allocator.take_published(digest) for digest in digests]
        self.length = len(digests) * self.allocator.block_size

    def publish(self, digests: Sequence[Digest], start: int, end: int | None = None) -> None:
        """Publishes the full blocks [start, end), by default from `start` on; `digests` are those of the sequence."""
        for index in range(start, len(digests) if end is None else end):
            self.allocator.publish(self.block_ids[index], digests[index])

    def free(self) -> None:
        """Drops all entries and their blocks."""
        self.truncate(0)

    def slots(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Cache slots of entries `[start, end)`; reads their blocks alone.  # [end - start]"""
        size = self.allocator.block_size
        first = start // size
        entries = np.arange(start - first * size, end - first * size, dtype=np.int64)
        block_ids = np.asarray(self.block_ids[first : self.allocator.blocks_for(end)], dtype=np.int64)
        return block_ids[entries // size] * size + entries % size
