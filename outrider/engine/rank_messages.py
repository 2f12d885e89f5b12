"""Messages of rank 0 to the other ranks (`rank_group`): steps and copies of its engine as integers. Pure but for its
types.

A step is, for each of its chunks: the numbers of tokens, KV entries, blocks, logits and rows with a path, and the start
of the hint tree; then the tokens, the blocks, and every path with its length before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.sequence_chunk import SequenceChunk

Numbers = npt.NDArray[np.int32]
_NO_PATHS = -1


def encode_step(chunks: Sequence[SequenceChunk]) -> Numbers:
    numbers: list[int] = []
    for chunk in chunks:
        num_paths = _NO_PATHS if chunk.paths is None else len(chunk.paths)
        numbers += (len(chunk.token_ids), chunk.kv.length, len(chunk.kv.block_ids))
        numbers += (chunk.num_logits, chunk.tree_start, num_paths)
        numbers += chunk.token_ids
        numbers += chunk.kv.block_ids
        for path in chunk.paths or ():
            numbers.append(len(path))
            numbers += path
    return np.array(numbers, dtype=np.int32)


def decode_step(numbers: Numbers, allocator: BlockAllocator) -> list[SequenceChunk]:
    """Decodes the chunks of a step. Their sequences are read-only: rank 0 owns the blocks."""
    rest = numbers.tolist()
    at = 0

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return rest[at - count : at]

    chunks = []
    while at < len(rest):
        num_tokens, length, num_blocks, num_logits, tree_start, num_paths = take(6)
        token_ids = take(num_tokens)
        kv = KVSequence(allocator, take(num_blocks), length)
        paths = None if num_paths == _NO_PATHS else [take(take(1)[0]) for _ in range(num_paths)]
        chunks.append(SequenceChunk(kv, token_ids, num_logits, tree_start, paths))
    return chunks


def encode_pairs(
    firsts: Sequence[int] | npt.NDArray[np.int64], seconds: Sequence[int] | npt.NDArray[np.int64]
) -> Numbers:
    return np.concatenate([firsts, seconds]).astype(np.int32)


def decode_pairs(numbers: Numbers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    half = len(numbers) // 2
    return numbers[:half].astype(np.int64), numbers[half:].astype(np.int64)
