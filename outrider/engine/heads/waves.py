"""The order in which rows of one step are run, where a row's input may be the output of another one. Pure: no tensors.

The row of entry `i` takes the feature of the entry before it: the target's own vector where that has arrived, else the
head's output for that entry. In the second case the entry before must have been run; if it is in the same step, the row
belongs to a later wave. Within a wave all rows run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers.attention import QueryBlock
from outrider.engine.sequence_chunk import SequenceChunk


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one chunk that run in one wave, at consecutive entries."""

    block: QueryBlock
    rows: range  # in the flat step
    entries: range  # of the sequence
    previous: Sequence[int]  # the entry before each of them, -1 for the first of a sequence


def plan_waves(chunks: Sequence[SequenceChunk], is_given: Callable[[SequenceChunk, int], bool]) -> list[list[Run]]:
    """Waves of a step, in order. is_given: whether the target's vector of an entry has arrived."""
    waves: list[list[Run]] = []
    num_rows = 0
    for chunk in chunks:
        for number, run in _runs(chunk, num_rows, is_given):
            waves.extend([] for _ in range(number + 1 - len(waves)))
            waves[number].append(run)
        num_rows += len(chunk.token_ids)
    return waves


def _runs(
    chunk: SequenceChunk, first_row: int, is_given: Callable[[SequenceChunk, int], bool]
) -> list[tuple[int, Run]]:
    """The rows of a chunk, grouped, each group with the number of its wave."""
    count = len(chunk.token_ids)
    first = chunk.kv.length - count
    previous = [_entry_before(chunk, first, row) for row in range(count)]
    numbers: list[int] = []
    for entry in previous:
        if entry < first:
            numbers.append(0)
        else:
            numbers.append(numbers[entry - first] + (not is_given(chunk, entry)))
    runs = []
    start = 0
    for end in range(1, count + 1):
        if end < count and numbers[end] == numbers[start]:
            continue
        view = KVSequence(chunk.kv.allocator, chunk.kv.block_ids, first + end)
        paths = None if chunk.paths is None else chunk.paths[start:end]
        block = QueryBlock(view, end - start, chunk.tree_start, paths)
        rows = range(first_row + start, first_row + end)
        runs.append((numbers[start], Run(block, rows, range(first + start, first + end), previous[start:end])))
        start = end
    return runs


def _entry_before(chunk: SequenceChunk, first: int, row: int) -> int:
    if chunk.paths is None:
        return first + row - 1
    path = chunk.paths[row]
    return path[-2] if len(path) > 1 else chunk.tree_start - 1
