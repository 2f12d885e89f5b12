"""Step times between measured sizes, the knee, and overheads."""

from __future__ import annotations

import pytest

from command_line.tune.times import Overheads, StepTimes
from tests.command_line.tune.test_model import FREE

TIMES = StepTimes.measured([(1, 10.0), (4, 10.0), (8, 14.0)])


@pytest.mark.parametrize(("size", "expected"), [(0.5, 10), (1, 10), (2.5, 10), (4, 10), (6, 12), (8, 14), (12, 18)])
def test_times_are_linear_between_sizes_and_beyond(size: float, expected: float) -> None:
    assert TIMES.at(size) == expected


def test_one_size_is_all_there_is() -> None:
    assert StepTimes.measured([(1, 3.0)]).at(100) == 3.0


def test_further_sequences_cost_their_share() -> None:
    assert StepTimes.measured([(1, 10.0), (4, 10.0)], sequence_ms=0.5).at(4, 3) == 11.0


def test_more_tokens_never_cost_less() -> None:
    made = StepTimes.measured([(8, 6.0), (1, 4.0), (2, 3.0), (4, 2.0)])
    assert made.num_tokens == (1, 2, 4, 8)
    assert made.step_ms == (3.0, 3.0, 3.0, 6.0)


def test_the_knee_is_where_a_step_costs_a_quarter_more() -> None:
    assert TIMES.knee == 6.5
    assert TIMES.is_memory_bound


def test_no_knee_within_the_measured_sizes() -> None:
    made = StepTimes.measured([(1, 10.0), (64, 12.0)])
    assert made.knee is None
    assert made.is_memory_bound


def test_a_step_that_grows_with_its_tokens_is_compute_bound() -> None:
    made = StepTimes.measured([(1, 1.0), (2, 2.0), (4, 4.0)])
    assert made.knee == 1.25
    assert not made.is_memory_bound


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no step times"):
        StepTimes.measured([])


def test_overheads_scale_but_the_network() -> None:
    usual = Overheads()
    doubled = usual.scaled(2.0)
    assert doubled.plain_ms == 2 * usual.plain_ms
    assert doubled.draft_step_ms == 2 * usual.draft_step_ms
    assert doubled.link_ms == usual.link_ms
    assert usual.target_ms(1, has_hints=False) == usual.plain_ms
    assert FREE.target_ms(9, has_hints=True) == 0.0
