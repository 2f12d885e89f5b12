"""Acceptance probability of a hint, from the draft model's confidence in it and its session's acceptance rate. Pure.

A draft model that gives a token 0.6 may be right 19 times of 20, and another half the time: models are over- or
underconfident, some sequences are harder than their model knows, and some drafts send arbitrary values. So the
probability is learned from verified hints, by logistic regression on the two log odds (Platt, 1999), one small step of
gradient descent per hint. A draft with uninformative confidence is soon judged by its acceptance rate alone.

For greedy and coupled decoding only. Under rejection sampling whether a hint is verified must not depend on its own
probability (invariant I4); such hints carry no confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.sampling_params import DecodingMode

NUM_LEVELS = 127
"""The highest confidence level; the lowest is 1, and 0 means unknown. A level is one byte on the wire."""
RATE = 0.03
"""Learning rate: some hundred hints make most of a difference."""
CHANCE_MAX = 0.99
_CHANCE_MIN = 0.01
SCORE_MAX = 30.0
"""Log odds beyond which a probability is not distinguished from 0 or 1."""


def confidence_level(chance: float) -> int:
    """The level sent for a probability from 0 to 1; the lowest for a broken model's NaN."""
    return min(max(round(chance * NUM_LEVELS), 1), NUM_LEVELS) if chance > 0.0 else 1


def _log_odds(chance: float) -> float:
    chance = min(max(chance, _CHANCE_MIN), CHANCE_MAX)
    return math.log(chance / (1.0 - chance))


_LOG_ODDS = [_log_odds(level / NUM_LEVELS) for level in range(NUM_LEVELS + 1)]


@dataclass(slots=True)
class Calibration:
    """Calibration of one decoding mode, over all draft workers of a target, or all targets of a draft worker: in a
    deployment these run one model each. Initially both inputs count half."""

    bias: float = 0.0
    of_confidence: float = 0.5
    of_record: float = 0.5

    def chance(self, confidence: int, record: float) -> float:
        """Acceptance probability of a hint, given those before it; 0 to CHANCE_MAX.

        confidence: its level, 0 for unknown; record: acceptance rate of the session's own hints, 0 to 1.
        """
        if confidence == 0:
            return record
        return min(self._raw_chance(confidence, record), CHANCE_MAX)

    def _raw_chance(self, confidence: int, record: float) -> float:
        score = self.bias + self.of_confidence * _LOG_ODDS[confidence] + self.of_record * _log_odds(record)
        return 1.0 / (1.0 + math.exp(-min(max(score, -SCORE_MAX), SCORE_MAX)))

    def observe(self, confidence: int, record: float, *, is_accepted: bool) -> None:
        """Takes a verified hint with the inputs known before."""
        if confidence == 0:
            return
        # Not from the clipped value: its permanent error would make the slopes grow for ever.
        step = RATE * (is_accepted - self._raw_chance(confidence, record))
        self.bias += step
        self.of_confidence += step * _LOG_ODDS[confidence]
        self.of_record += step * _log_odds(record)


def branch_calibrations() -> dict[DecodingMode, Calibration]:
    """Calibrations of one target by mode, of hints beside a draft's likeliest path. They have no record of their own,
    and initially the draft is believed."""
    return {mode: Calibration(of_confidence=1.0, of_record=0.0) for mode in (DecodingMode.GREEDY, DecodingMode.COUPLED)}


def calibrations() -> dict[DecodingMode, Calibration]:
    """Calibrations of one worker by mode. None for rejection sampling, which must not use the draft's confidence
    (I4)."""
    return {mode: Calibration() for mode in (DecodingMode.GREEDY, DecodingMode.COUPLED)}
