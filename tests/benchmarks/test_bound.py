"""Tests of the upper bound on the gain of speculation: formulas against sums, simulation and each other."""

from __future__ import annotations

import random

import pytest

from benchmarks.speculation.bound import (
    CostLine,
    acceptance_rate,
    expected_tokens,
    free_draft,
    line_through,
    speedup_bound,
)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("num_hints", [0, 1, 7])
def test_expected_tokens_are_one_and_the_chances_of_every_hint(acceptance: float, num_hints: int) -> None:
    chances = sum(acceptance**n for n in range(num_hints + 1))
    assert expected_tokens(acceptance, num_hints) == pytest.approx(chances)


def test_acceptance_is_found_again_in_blocks_that_were_drawn_with_it() -> None:
    rng = random.Random(3)
    num_accepted = num_rejected = 0
    num_blocks = 20_000
    for _ in range(num_blocks):
        for _ in range(4):
            if rng.random() >= 0.7:
                num_rejected += 1
                break
            num_accepted += 1
    assert acceptance_rate(num_accepted, num_rejected) == pytest.approx(0.7, abs=0.01)
    assert 1 + num_accepted / num_blocks == pytest.approx(expected_tokens(0.7, 4), abs=0.03)


def test_nothing_tried_is_nothing_accepted() -> None:
    assert acceptance_rate(0, 0) == 0.0


def test_steps_as_dear_as_plain_ones_gain_their_tokens() -> None:
    assert speedup_bound(3.5, 6.0, 6.0) == 3.5
    assert speedup_bound(3.5, 6.0, 12.0) == 1.75


def test_the_line_meets_both_points() -> None:
    line = line_through(1.0, 6.0, 4.0, 9.0)
    assert line.step_ms(1.0) == pytest.approx(6.0)
    assert line.step_ms(4.0) == pytest.approx(9.0)


@pytest.mark.parametrize(("more_tokens", "more_ms"), [(4.0, 5.0), (1.0, 7.0)])
def test_the_line_never_falls(more_tokens: float, more_ms: float) -> None:
    line = line_through(1.0, 6.0, more_tokens, more_ms)
    assert line.token_ms == 0.0
    assert line.step_ms(10.0) == pytest.approx(6.0)


def test_with_free_rows_a_free_draft_sends_all_the_hints_it_may() -> None:
    best = free_draft(0.8, CostLine(10.0, 0.0), 1.0, 7)
    assert best.num_hints == 7
    assert best.speedup == pytest.approx(expected_tokens(0.8, 7))


def test_where_rows_cost_as_much_as_steps_nothing_is_gained() -> None:
    best = free_draft(0.8, CostLine(0.0, 10.0), 8.0, 7)
    assert best.num_hints == 0
    assert best.speedup == pytest.approx(1.0)


def test_more_hints_pay_the_surer_they_are_and_the_fewer_the_sessions() -> None:
    cost = CostLine(10.0, 0.3)
    by_acceptance = [free_draft(rate, cost, 8.0, 7).num_hints for rate in (0.2, 0.5, 0.9)]
    by_sessions = [free_draft(0.7, cost, num, 7).num_hints for num in (32.0, 8.0, 1.0)]
    assert by_acceptance == sorted(by_acceptance)
    assert by_sessions == sorted(by_sessions)
    assert by_acceptance[0] < by_acceptance[-1]
    assert by_sessions[0] < by_sessions[-1]
