"""Tests of the benchmark of a fleet's memory, on recorded tokens."""

from __future__ import annotations

import random

import pytest

from benchmarks.sources.fleet_memory import BOTH, DRAFT, LOOKUP, MEMORY, RECENT, Client, Turn, compare, edited

PROMPT = [1, 2, 3, 4]


def test_what_another_target_generated_is_found_by_the_memory_alone() -> None:
    output = random.Random(0).sample(range(10, 5000), k=200)
    apart = [Client([Turn(PROMPT, output)], number * 300) for number in range(2)]
    found = compare(apart, 7)
    assert found[LOOKUP] == found[RECENT] == 1.0
    assert found[MEMORY] > 1.6  # the first takes 200 steps, the second about 25
    assert found["memory_over_lookup"] == found[MEMORY]
    assert found["memory_us_per_token"] > 0
    assert found[DRAFT] > 2.0  # most tokens, but not all, are guessed one by one
    assert found["memory_over_draft"] == pytest.approx(found[BOTH] / found[DRAFT], abs=0.01)
    assert found["memory_over_draft"] > 1.3  # the second takes a few steps


def test_requests_that_start_together_gain_nothing_and_late_hints_gain_less() -> None:
    output = random.Random(0).sample(range(10, 5000), k=200)
    together = [Client([Turn(PROMPT, output)], 0) for _ in range(2)]
    assert compare(together, 7)[MEMORY] < 1.05
    apart = [Client([Turn(PROMPT, output)], number * 300) for number in range(2)]
    assert 1.0 < compare(apart, 7, is_late=True)[MEMORY] <= compare(apart, 7)[MEMORY]


def test_turns_of_a_client_follow_each_other() -> None:
    first, second = (list(range(10, 60)), list(range(60, 100)))
    found = compare([Client([Turn(PROMPT, first), Turn([*PROMPT, *first], second)], 0)], 3)
    assert found[LOOKUP] >= 1.0


def test_an_edit_changes_that_share_of_the_lines() -> None:
    text = "\n".join(f"first{i} = second{i}" for i in range(40))
    changed = edited(text, random.Random(0), 0.1).split("\n")
    assert 2 <= sum(a != b for a, b in zip(text.split("\n"), changed, strict=True)) <= 4
