"""I6: every random number is a function of (seed, position, purpose), uniform and independent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.engine.sampling import randomness
from outrider.engine.sampling.randomness import MASK_64, Purpose, key, mix, uniform

ERROR_RATE = 1e-4
"""Probability that a chi-square test fails by chance for random seeds; they are fixed, so no test is flaky."""


def test_mix_is_the_finalizer_of_splitmix64() -> None:
    """The first outputs of the reference implementation for seed 0, and its stream for 1234567."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(randomness.GOLDEN) == 0x6E789E6AA1B965F4
    stream = [mix((1234567 + i * randomness.GOLDEN) & MASK_64) for i in range(3)]
    assert stream == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=200, derandomize=True)
@given(seed=st.integers(0, MASK_64), position=st.integers(0, 2**32), purpose=st.sampled_from(Purpose))
def test_numbers_lie_strictly_between_0_and_1_and_repeat(seed: int, position: int, purpose: Purpose) -> None:
    number = uniform(seed, position, purpose)
    assert 0.0 < number < 1.0
    assert number == uniform(seed, position, purpose)
    assert 0 <= key(seed, position, purpose) <= MASK_64


@pytest.mark.parametrize("value", [0, 1, MASK_64, MASK_64 - 1, MASK_64 - 4095])
def test_even_the_extreme_key_gives_a_number_strictly_between_0_and_1(
    value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mix` is a bijection: for every position some seed leads to every key."""
    monkeypatch.setattr(randomness, "key", lambda *_: value)
    assert 0.0 < uniform(0, 0, Purpose.DRAFT) < 1.0


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_over_positions_and_over_seeds(purpose: Purpose) -> None:
    over_positions = [uniform(0, position, purpose) for position in range(20_000)]
    over_seeds = [uniform(seed, 17, purpose) for seed in range(20_000)]
    for numbers in (over_positions, over_seeds):
        counts = np.histogram(numbers, bins=50, range=(0.0, 1.0))[0]
        assert stats.chisquare(counts).pvalue > ERROR_RATE / (2 * len(Purpose))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(Purpose, 2)))
def test_purposes_are_independent(first: Purpose, second: Purpose) -> None:
    """A contingency table of two purposes at the same position."""
    pairs = [(uniform(4, p, first), uniform(4, p, second)) for p in range(6000)]
    firsts, seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    table = np.histogram2d(firsts, seconds, bins=6, range=[[0, 1], [0, 1]])[0]
    assert stats.chi2_contingency(table).pvalue > ERROR_RATE / 10


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbouring_positions_and_seeds_are_independent(lag: int) -> None:
    for numbers in (
        [uniform(1, position, Purpose.ACCEPT) for position in range(10_000)],
        [uniform(seed, 1, Purpose.ACCEPT) for seed in range(10_000)],
    ):
        table = np.histogram2d(numbers[:-lag], numbers[lag:], bins=6, range=[[0, 1], [0, 1]])[0]
        assert stats.chi2_contingency(table).pvalue > ERROR_RATE / 6


def test_no_two_of_many_keys_are_equal() -> None:
    """Not even where seeds, positions and purposes are small and could cancel."""
    keys = {key(s, p, q) for s in range(30) for p in range(300) for q in Purpose}
    assert len(keys) == 30 * 300 * len(Purpose)
