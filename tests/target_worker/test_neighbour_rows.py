"""Rows of a prediction or an objective: what they cost the other sessions of a step is bounded."""

from __future__ import annotations

import itertools
import operator
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.hints.objective_rows import UNLIMITED
from outrider.hints.speculation import allot
from outrider.hints.step_cost import StepLine
from target_worker.hints.hint_path import HintPath
from target_worker.hints.neighbour_rows import NEIGHBOURS_FACTOR, spare_neighbours
from target_worker.scheduling import step_composition

LINE = StepLine(10.0, 0.55)
RIGHT = list(itertools.accumulate([0.97] * 32, operator.mul))
BATCHES = st.lists(
    st.tuples(
        st.lists(st.floats(0.01, 1.0), max_size=8).map(lambda rates: list(itertools.accumulate(rates, operator.mul))),
        st.sampled_from([None, 0, 2]),
    ),
    min_size=1,
    max_size=6,
)
LINES = st.builds(StepLine, st.floats(1.0, 30.0), st.floats(0.05, 6.0))


def test_a_right_prediction_does_not_make_its_neighbours_slow() -> None:
    """Seven others without hints: their time per token was 1.88 times that of plain decoding."""
    gains = [RIGHT, *[[]] * 7]
    counts = allot(gains, LINE, 500)
    assert LINE.step_ms(8 + sum(counts)) > 1.8 * LINE.step_ms(8)
    spared = spare_neighbours(counts, gains, LINE, [0, *[None] * 7])
    assert LINE.step_ms(8 + sum(spared)) <= NEIGHBOURS_FACTOR * LINE.step_ms(8)
    assert spared[0] > 0


def test_alone_or_among_its_like_it_keeps_all() -> None:
    for batch in ([RIGHT], [RIGHT] * 3):
        counts = allot(batch, LINE, 500)
        assert spare_neighbours(counts, batch, LINE, [0] * len(batch)) == counts


def counted_on(paths: list[HintPath], *, in_background: bool = False) -> list[int]:
    """Rows of a step of these paths, the first of which is a client's; the others may be a batch's."""
    sessions: list[Any] = [SimpleNamespace(is_background=in_background and index > 0) for index in range(len(paths))]
    gains = [path.gains() for path in paths]
    return step_composition._counted_on(sessions, paths, gains, LINE, 500, [UNLIMITED] * len(paths))


def test_a_prediction_does_not_cost_its_session_the_rows_of_its_draft() -> None:
    plain = [HintPath([], 0)] * 7
    drafted = counted_on([HintPath([], 0, chances=[0.85] * 8), *plain])[0]
    path = HintPath([], 0, chances=[*[0.85] * 6, *[0.97] * 20], num_before_prediction=6)
    assert counted_on([path, *plain])[0] >= drafted == 6


def test_a_batch_in_the_background_does_not_hold_a_prediction_back() -> None:
    path = HintPath([], 0, chances=[0.97] * 32, num_before_prediction=0)
    paths = [path, *[HintPath([], 0)] * 7]
    assert (
        counted_on(paths)[0]
        < counted_on(paths, in_background=True)[0]
        == allot([path.gains(), *[[]] * 7], LINE, 500)[0]
    )


def test_neighbours_whose_own_hints_gain_afford_a_longer_step() -> None:
    gains = [RIGHT, *[RIGHT[:8]] * 3]
    counts = allot(gains, LINE, 500)
    assert spare_neighbours(counts, gains, LINE, [0, None, None, None]) == counts


@given(batch=BATCHES, line=LINES, budget=st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_rows_are_taken_back_from_those_that_are_bounded_and_no_more_than_it_takes(
    batch: list[tuple[list[float], int | None]], line: StepLine, budget: int
) -> None:
    gains, floors = [own for own, _ in batch], [floor for _, floor in batch]
    counts = allot(gains, line, budget)
    spared = spare_neighbours(counts, gains, line, floors)
    others = [1.0 + sum(own[:count]) for own, count, floor in zip(gains, counts, floors, strict=True) if floor is None]
    for before, after, floor in zip(counts, spared, floors, strict=True):
        assert after == before if floor is None else min(floor, before) <= after <= before
    if others and spared != counts:
        plain_ms = line.step_ms(len(gains))
        # One row more would cost the others too much, by either measure.
        assert line.step_ms(len(gains) + sum(spared) + 1) > NEIGHBOURS_FACTOR * min(others) * plain_ms * (1.0 - 1e-9)
        kept = [
            after - floor for after, floor in zip(spared, floors, strict=True) if floor is not None and after > floor
        ]
        assert (sum(kept) + 1) * line.token_ms > (NEIGHBOURS_FACTOR - 1.0) * plain_ms * (1.0 - 1e-9)
