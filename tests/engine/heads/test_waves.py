"""Rows that feed each other run one after the other, all others at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.heads.waves import Run, plan_waves
from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.sequence_chunk import SequenceChunk


def sequence(length: int) -> KVSequence:
    kv = KVSequence(BlockAllocator(20, 4))
    kv.extend(length)
    return kv


def entries(waves: Sequence[Sequence[Run]]) -> list[list[int]]:
    return [[entry for run in wave for entry in run.entries] for wave in waves]


def plan(chunk: SequenceChunk, arrived: set[int]) -> list[list[Run]]:
    return plan_waves([chunk], lambda _, entry: entry in arrived)


def test_rows_behind_features_of_the_target_run_at_once() -> None:
    chunk = SequenceChunk(sequence(6), [1] * 6, 1)
    assert entries(plan(chunk, {0, 1, 2, 3, 4})) == [[0, 1, 2, 3, 4, 5]]


def test_rows_without_them_run_one_after_the_other() -> None:
    chunk = SequenceChunk(sequence(6), [1] * 4, 1)
    assert entries(plan(chunk, {0, 1, 2})) == [[2, 3], [4], [5]]


def test_a_row_that_sees_a_later_wave_waits_for_it() -> None:
    """Entry 3 has its feature, but sees entry 2, which has to wait for entry 1."""
    chunk = SequenceChunk(sequence(4), [1] * 4, 1)
    assert entries(plan(chunk, {0, 2})) == [[0, 1], [2, 3]]


def test_siblings_run_at_once_and_children_after_their_parents() -> None:
    paths = [[5], [6], [5, 7], [6, 8], [5, 7, 9]]
    chunk = SequenceChunk(sequence(10), [1] * 5, 5, tree_start=5, paths=paths)
    waves = plan(chunk, {4})
    assert entries(waves) == [[5, 6], [7, 8], [9]]
    assert [list(run.previous) for wave in waves for run in wave] == [[4, 4], [5, 6], [7]]


def test_waves_are_shared_by_sequences() -> None:
    chunks = [SequenceChunk(sequence(2), [1, 1], 1), SequenceChunk(sequence(3), [1, 1, 1], 1)]
    waves = plan_waves(chunks, lambda *_: False)
    assert [[list(run.rows) for run in wave] for wave in waves] == [[[0], [2]], [[1], [3]], [[4]]]


@given(st.data())
def test_every_row_runs_once_after_all_that_it_sees_and_feeds_on(data: st.DataObject) -> None:
    committed = data.draw(st.integers(0, 4))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(data.draw(st.integers(1, 10)))]
    arrived = data.draw(st.sets(st.integers(0, 14)))
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), committed + node])
    kv = sequence(committed + len(parents))
    waves = plan(SequenceChunk(kv, [1] * len(parents), 1, tree_start=committed, paths=paths), arrived)
    number = {entry: index for index, wave in enumerate(waves) for run in wave for entry in run.entries}
    assert sorted(entry for wave in entries(waves) for entry in wave) == list(range(committed, kv.length))
    for path in paths:
        for earlier, later in itertools.pairwise(path):
            assert number[earlier] + (earlier not in arrived) == number[later]
        if path[:1] == path:
            assert number[path[0]] == 0
    for wave in waves:
        for run in wave:
            assert [path[-1] for path in run.block.paths or ()] == list(run.entries)
            assert run.block.kv.length == run.entries.stop
