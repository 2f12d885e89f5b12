"""Rows within objectives: the most sessions on track, then tokens; without objectives the rows of `allot`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.hints.objective_rows import UNLIMITED, StepBudget, allot_within, time_left_ms
from outrider.hints.speculation import allot
from outrider.hints.step_cost import StepLine

GAINS = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda rates: list(itertools.accumulate(rates, min)))
LINES = st.builds(StepLine, st.floats(1.0, 30.0), st.floats(0.05, 6.0))
BUDGETS = st.one_of(
    st.just(UNLIMITED), st.builds(StepBudget, st.floats(-20.0, 40.0), st.floats(0.5, 40.0))
)  # fmt: skip
BATCHES = st.lists(st.tuples(GAINS, BUDGETS), min_size=1, max_size=4)


def step_ms(counts: Sequence[int], line: StepLine) -> float:
    return line.step_ms(len(counts) + sum(counts))


def on_track(
    gains: Sequence[Sequence[float]], counts: Sequence[int], line: StepLine, limits: Sequence[StepBudget]
) -> set[int]:
    """Sessions with an objective that afford the step."""
    whole_ms = step_ms(counts, line)
    return {
        s
        for s, (own, count, limit) in enumerate(zip(gains, counts, limits, strict=True))
        if not math.isinf(limit.spare_ms) and whole_ms <= limit.ms(1.0 + sum(own[:count]))
    }


def rate(gains: Sequence[Sequence[float]], counts: Sequence[int], line: StepLine) -> float:
    tokens = sum(1.0 + sum(own[:count]) for own, count in zip(gains, counts, strict=True))
    return tokens / step_ms(counts, line)


def all_counts(gains: Sequence[Sequence[float]], budget: int) -> Iterator[tuple[int, ...]]:
    every = itertools.product(*(range(len(own) + 1) for own in gains))
    return (counts for counts in every if sum(counts) <= budget)


@given(batch=BATCHES, line=LINES, budget=st.integers(0, 12))
@settings(max_examples=400, deadline=None)
def test_as_many_sessions_are_on_track_as_any_rows_could_keep(
    batch: list[tuple[list[float], StepBudget]], line: StepLine, budget: int
) -> None:
    gains, limits = [own for own, _ in batch], [limit for _, limit in batch]
    counts = allot_within(gains, line, budget, limits)
    assert all(0 <= count <= len(own) for count, own in zip(counts, gains, strict=True))
    assert sum(counts) <= budget
    most = max(len(on_track(gains, each, line, limits)) for each in all_counts(gains, budget))
    assert len(on_track(gains, counts, line, limits)) == most


@given(batch=BATCHES, line=LINES, budget=st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_tokens_come_second(batch: list[tuple[list[float], StepBudget]], line: StepLine, budget: int) -> None:
    """If everybody can be on track, no step that has them all on track by fewest rows has a higher rate."""
    gains, limits = [own for own, _ in batch], [limit for _, limit in batch]
    counts = allot_within(gains, line, budget, limits)
    kept = on_track(gains, counts, line, limits)
    bound = {s for s, limit in enumerate(limits) if not math.isinf(limit.spare_ms)}
    if kept == bound:
        fewest = min(
            (each for each in all_counts(gains, budget) if on_track(gains, each, line, limits) == bound), key=sum
        )
        assert rate(gains, counts, line) >= rate(gains, fewest, line) * (1 - 1e-9)


@given(gains=st.lists(GAINS, min_size=1, max_size=8), line=LINES, budget=st.integers(0, 40))
def test_without_objectives_the_rows_are_those_of_allot(gains: list[list[float]], line: StepLine, budget: int) -> None:
    limits = [UNLIMITED] * len(gains)
    counts = allot(gains, line, budget)
    assert allot_within(gains, line, budget, limits) == counts
    assert time_left_ms(gains, counts, line, limits) == math.inf


@given(batch=BATCHES, line=LINES, budget=st.integers(0, 12))
def test_objectives_that_the_best_rows_meet_change_nothing(
    batch: list[tuple[list[float], StepBudget]], line: StepLine, budget: int
) -> None:
    gains = [own for own, _ in batch]
    counts = allot(gains, line, budget)
    ample = [StepBudget(0.0, step_ms(counts, line)) for _ in gains]
    assert allot_within(gains, line, budget, ample) == counts


LINE = StepLine(8.0, 1.0)


def test_a_session_without_hints_does_not_pay_for_the_rows_of_others() -> None:
    gains = [[0.9, 0.8, 0.7, 0.6], []]
    assert allot(gains, LINE, 10) == [4, 0]
    tight = StepBudget(0.0, 12.0)
    assert allot_within(gains, LINE, 10, [UNLIMITED, tight]) == [2, 0]
    assert allot_within(gains, LINE, 10, [UNLIMITED, StepBudget(0.0, 10.0)]) == [0, 0]


def test_slack_pays_for_rows_of_others() -> None:
    assert allot_within([[0.9, 0.8, 0.7], []], LINE, 10, [UNLIMITED, StepBudget(2.0, 10.0)]) == [2, 0]


def test_a_session_that_is_behind_gets_the_rows_that_it_needs_though_others_gain_more() -> None:
    gains = [[0.9, 0.8, 0.7], [0.4, 0.3]]
    line = StepLine(8.0, 0.5)
    assert allot(gains, line, 2) == [2, 0]
    assert allot_within(gains, line, 2, [UNLIMITED, StepBudget(-1.0, 8.0)])[1] >= 1


def test_one_that_cannot_be_on_track_is_helped_and_not_slowed() -> None:
    gains = [[0.9, 0.8], [0.5, 0.05]]
    hopeless = StepBudget(-50.0, 6.0)
    assert allot_within(gains, LINE, 10, [UNLIMITED, hopeless]) == [0, 1]


def test_where_not_all_can_be_on_track_the_most_are() -> None:
    """One without hints affords a plain step alone; three others need a row each."""
    gains = [[], [0.9], [0.9], [0.9]]
    line = StepLine(6.0, 1.0)
    limits = [StepBudget(0.0, 10.0), *[StepBudget(0.0, 8.0)] * 3]
    counts = allot_within(gains, line, 10, limits)
    assert counts == [0, 1, 1, 1]
    assert on_track(gains, counts, line, limits) == {1, 2, 3}


def test_the_time_left_is_that_of_the_tightest_session() -> None:
    gains = [[0.5], []]
    assert time_left_ms(gains, [1, 0], LINE, [UNLIMITED, StepBudget(1.0, 12.0)]) == 2.0
    assert time_left_ms(gains, [1, 0], LINE, [StepBudget(-9.0, 10.0), UNLIMITED]) == 0.0
