"""Tests of calibration: what a draft's confidence means is learned from verified hints, whatever the draft reports."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.hints.confidence import CHANCE_MAX, NUM_LEVELS, Calibration, confidence_level

LEVELS = st.integers(0, NUM_LEVELS)
CHANCES = st.floats(0.0, 1.0)


def learned(truth: Callable[[float, float], float], num_hints: int = 4000) -> tuple[Calibration, random.Random]:
    """A calibration after hints of random confidence and record, which are accepted with the probability `truth`."""
    calibration, rng = Calibration(), random.Random(5)
    for _ in range(num_hints):
        confidence, record = rng.random(), rng.uniform(0.2, 0.95)
        is_accepted = rng.random() < truth(confidence, record)
        calibration.observe(confidence_level(confidence), record, is_accepted=is_accepted)
    return calibration, rng


def mean_error(calibration: Calibration, truth: Callable[[float, float], float]) -> float:
    cases = [(c / 20, r / 20) for c in range(1, 20) for r in range(4, 20)]
    return sum(abs(calibration.chance(confidence_level(c), r) - truth(c, r)) for c, r in cases) / len(cases)


def modest(confidence: float, record: float) -> float:
    """Acceptance of a draft that is right far more often than its confidence."""
    return 1.0 / (1.0 + math.exp(-(1.5 + 2.0 * math.log(confidence / (1.001 - confidence)))))


def boastful(confidence: float, record: float) -> float:
    """Acceptance of a draft that is right far less often than its confidence."""
    return 0.4 * confidence


def by_record(confidence: float, record: float) -> float:
    """Acceptance of a draft whose confidence is uninformative."""
    return record


class TestLearning:
    @pytest.mark.parametrize("truth", [modest, boastful, by_record])
    def test_chances_come_close_to_what_holds(self, truth: Callable[[float, float], float]) -> None:
        """Within 0.1 on average: a logistic curve fits none but the first exactly."""
        calibration, _ = learned(truth)
        assert mean_error(calibration, truth) < 0.1 < 0.15 < mean_error(Calibration(), truth)

    def test_a_confidence_that_says_nothing_is_not_listened_to(self) -> None:
        calibration, _ = learned(by_record)
        spread = calibration.chance(NUM_LEVELS, 0.6) - calibration.chance(1, 0.6)
        assert abs(spread) < 0.25 < Calibration().chance(NUM_LEVELS, 0.6) - Calibration().chance(1, 0.6)

    def test_a_draft_that_lies_is_turned_around(self) -> None:
        calibration, _ = learned(lambda confidence, record: 1.0 - confidence)
        assert calibration.chance(NUM_LEVELS, 0.6) < 0.3 < 0.7 < calibration.chance(1, 0.6)

    def test_a_change_is_followed(self) -> None:
        calibration, rng = learned(modest)
        for _ in range(2000):
            confidence = rng.random()
            calibration.observe(confidence_level(confidence), 0.1, is_accepted=rng.random() < boastful(confidence, 0.1))
        assert calibration.chance(confidence_level(0.6), 0.1) < 0.4


def test_without_confidence_the_record_counts_and_nothing_is_learned() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(0, 0.9, is_accepted=False)
    assert calibration == Calibration()
    assert calibration.chance(0, 0.37) == 0.37


@given(low=st.integers(1, NUM_LEVELS), high=st.integers(1, NUM_LEVELS), record=CHANCES)
def test_at_first_the_surer_hint_is_the_likelier(low: int, high: int, record: float) -> None:
    low, high = sorted((low, high))
    assert Calibration().chance(low, record) <= Calibration().chance(high, record)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seen=st.lists(st.tuples(LEVELS, CHANCES, st.booleans()), max_size=300), level=LEVELS, record=CHANCES)
def test_chances_stay_chances_whatever_is_seen(seen: list[tuple[int, float, bool]], level: int, record: float) -> None:
    calibration = Calibration()
    for known, own, is_accepted in seen * 3:
        calibration.observe(known, own, is_accepted=is_accepted)
    assert 0.0 <= calibration.chance(level, record) <= max(CHANCE_MAX, record)


def test_a_draft_that_is_always_right_moves_nothing_for_ever() -> None:
    """And one that turns after long honesty breaks nothing: a score stays one that can be computed with."""
    calibration = Calibration()
    for _ in range(200_000):
        calibration.observe(NUM_LEVELS, 0.99, is_accepted=True)
    assert max(map(abs, (calibration.bias, calibration.of_confidence, calibration.of_record))) < 2.0
    hostile = Calibration(0.0, 1e6, 1e6)
    assert hostile.chance(1, 0.01) == pytest.approx(0.0, abs=1e-9)
    hostile.observe(1, 0.01, is_accepted=True)


def test_a_broken_model_is_not_sure_of_anything() -> None:
    assert confidence_level(math.nan) == 1


@given(chance=CHANCES)
def test_a_level_is_one_byte_and_never_the_one_that_says_nothing(chance: float) -> None:
    level = confidence_level(chance)
    assert 1 <= level <= NUM_LEVELS < 128
    assert abs(level / NUM_LEVELS - chance) <= 1.0 / NUM_LEVELS
