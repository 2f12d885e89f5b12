"""Counting agreement on sequences made by hand. 0 is the draft's first guess, 4 none of its first four."""

from __future__ import annotations

import random

import pytest

from command_line.tune.agreement import (
    Ranks,
    acceptance,
    acceptances,
    committed_lengths,
    coverage,
    hit_rate_after_miss,
    iid_length,
    num_agreeing,
)
from demo.evaluate import walk

TEXT = (0, 0, 1, 0, 4, 0, 0, 0, 0, 0)


def test_coverage_counts_ranks_below_the_number_of_guesses() -> None:
    assert coverage([TEXT], 1) == 0.8
    assert coverage([TEXT], 2) == 0.9
    assert coverage([TEXT, (0,) * 10], 1) == 0.9
    assert coverage([], 1) == 0.0


def test_the_hit_rate_after_a_miss_is_of_the_misses_alone() -> None:
    assert hit_rate_after_miss([TEXT], 2) == 0.5
    assert hit_rate_after_miss([TEXT], 4) == 0.5
    assert hit_rate_after_miss([(0, 0)], 4) == 0.0


@pytest.mark.parametrize(
    ("start", "num_hints", "expected"), [(0, 4, 2), (2, 4, 0), (3, 1, 1), (5, 3, 3), (8, 9, 2), (10, 3, 0)]
)
def test_agreement_ends_at_the_first_miss_or_the_end(start: int, num_hints: int, expected: int) -> None:
    assert num_agreeing(TEXT, start, num_hints) == expected


def test_steps_commit_what_agrees_and_one_more() -> None:
    # [0 0 1] [0 4] [0 0 0]; a fourth step would be cut short by the end of the text.
    assert committed_lengths(TEXT, 2) == [3, 2, 3]
    assert committed_lengths(TEXT, 1) == [2, 1, 2, 2, 2]
    assert committed_lengths(TEXT, 0) == [1] * 10
    assert committed_lengths((0, 0), 2) == []


def test_lengths_are_those_of_the_walk_that_judges_the_demo_pair() -> None:
    ranks = [0, 0, 2, 0, 0, 0, 1, 4, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0]
    walked = walk([rank == 0 for rank in ranks], num_tokens=len(ranks) - 3, num_hints=3)
    assert sum(committed_lengths(ranks, 3)) == walked.num_steps + walked.num_accepted


def test_independence_is_leviathans_formula() -> None:
    assert iid_length(0.5, 2) == 1.75
    assert iid_length(0.0, 7) == 1.0
    assert iid_length(1.0, 7) == 8.0


def test_runs_count_for_more_than_their_rate() -> None:
    # Both agree on half of their tokens, one of them in a single run.
    runs: Ranks = (0,) * 32 + (4,) * 32
    scattered: Ranks = (0, 4) * 32
    found, other = acceptance([runs], 4), acceptance([scattered], 4)
    assert found is not None
    assert other is not None
    assert found.iid_length == other.iid_length
    assert found.mean_length < other.mean_length == 2.0
    assert found.histogram[0] > 0 < found.histogram[4]
    assert other.histogram == (0, other.num_steps, 0, 0, 0)


def test_figures_of_a_block_length() -> None:
    found = acceptance([TEXT, (0,) * 7], 2)
    assert found is not None
    assert found.histogram == (0, 1, 4)
    assert (found.num_steps, found.mean_length) == (5, 14 / 5)
    assert (found.text_min, found.text_max) == (8 / 3, 3.0)


def test_lengths_rise_with_the_block_where_texts_are_long() -> None:
    chosen = random.Random(5)
    found = acceptances([[0 if chosen.random() < 0.7 else 4 for _ in range(2000)]], 8)
    assert [each.num_hints for each in found] == list(range(1, 9))
    lengths = [each.mean_length for each in found]
    assert lengths == sorted(lengths)
    assert all(each.mean_length <= each.num_hints + 1 for each in found)


def test_a_block_that_no_text_can_hold_is_not_judged() -> None:
    assert acceptance([(0, 0, 0)], 3) is None
    assert len(acceptances([(0, 0, 0)], 9)) == 2
