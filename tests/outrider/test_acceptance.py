"""Tests of acceptance estimates: the extra tokens expected of a block of hints, from how many were accepted before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.hints.acceptance import NUM_POSITIONS, BlockAcceptance, extra_tokens_at


def observed(rates: list[float], num_hints: int, num_blocks: int = 20_000, seed: int = 1) -> BlockAcceptance:
    """An estimate from blocks of `num_hints`: position i is accepted at `rates[i]`, later ones at the last rate."""
    chance, made = random.Random(seed), BlockAcceptance.of_what_is_seen(decay=1.0)
    for _ in range(num_blocks):
        held = 0
        while held < num_hints and chance.random() < rates[min(held, len(rates) - 1)]:
            held += 1
        made.observe(held, num_hints)
    return made


def test_before_the_first_hint_nothing_is_promised() -> None:
    made = BlockAcceptance.of_what_is_seen(0.95)
    assert (made.rate, made.extra_tokens) == (0.0, 0.0)


@pytest.mark.parametrize("num_hints", [1, 3, 8, 12])
@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3, 0.6])
def test_a_flat_pattern_promises_what_its_rate_does_whatever_the_block_length(rate: float, num_hints: int) -> None:
    made = observed([rate], num_hints)
    # 20,000 blocks: a rate of 0.6 is known to 0.0035 (one standard deviation), its promise to 0.02.
    assert made.rate == pytest.approx(rate, abs=0.02)
    assert made.extra_tokens == pytest.approx(extra_tokens_at(rate), rel=0.08)


@pytest.mark.parametrize("rates", [[0.15, 0.9], [0.6, 0.05], [0.9, 0.1, 0.8]])
def test_an_uneven_pattern_promises_the_sum_of_its_products(rates: list[float]) -> None:
    true, held = 0.0, 1.0
    for position in range(NUM_POSITIONS):
        held *= rates[min(position, len(rates) - 1)]
        true += held
    assert observed(rates, NUM_POSITIONS).extra_tokens == pytest.approx(true, rel=0.05)


def test_the_bounds_as_flat_rates_promise_a_quarter_and_three_sevenths_of_a_token() -> None:
    assert extra_tokens_at(0.2) == pytest.approx(0.25, abs=1e-4)
    assert extra_tokens_at(0.3) == pytest.approx(3 / 7, abs=1e-4)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60))
def test_whatever_was_seen_the_promise_is_within_the_positions(blocks: list[tuple[int, int]]) -> None:
    made = BlockAcceptance.of_what_is_seen(0.9)
    for num_hints, num_accepted in blocks:
        made.observe(min(num_accepted, num_hints), num_hints)
    assert 0.0 <= made.rate <= 1.0
    assert 0.0 <= made.extra_tokens <= NUM_POSITIONS
