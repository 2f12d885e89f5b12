"""How likely a hint is to hold, from how sure the draft model is of it and from how its session's hints fared. Pure.

A draft model that gives a token 0.6 may be right 19 times of 20, and another half the time: models are overconfident or
were trained to be modest, some texts are harder than their model knows, and some drafts say nothing true at all. So the
chance is learned from hints that were tried, by logistic regression on the two log odds (Platt, 1999), one small step
of gradient descent per hint. A draft whose confidence tells nothing is soon judged by its record alone.

For greedy and coupled decoding only. Under rejection sampling whether a hint is verified must not depend on its own
probability (invariant I4); such hints carry no confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.sampling_params import DecodingMode

NUM_LEVELS = 127
"""Of confidence, from 1 for hardly to this for sure: one byte on the wire. 0 says nothing."""
RATE = 0.03
"""Of learning: some hundred hints make most of a difference."""
CHANCE_MAX = 0.99
_CHANCE_MIN = 0.01
SCORE_MAX = 30.0
"""Log odds beyond which a chance is not told from 0 or 1."""


def confidence_level(chance: float) -> int:
    """As it travels, of what the draft model gives a token, 0 to 1; of a broken model's NaN the lowest."""
    return min(max(round(chance * NUM_LEVELS), 1), NUM_LEVELS) if chance > 0.0 else 1


def _log_odds(chance: float) -> float:
    chance = min(max(chance, _CHANCE_MIN), CHANCE_MAX)
    return math.log(chance / (1.0 - chance))


_LOG_ODDS = [_log_odds(level / NUM_LEVELS) for level in range(NUM_LEVELS + 1)]


@dataclass(slots=True)
class Calibration:
    """In one decoding mode, of all draft workers that a target listens to, or all targets that a draft worker serves:
    in a deployment these run one model each. At first it takes both at half their word."""

    bias: float = 0.0
    of_confidence: float = 0.5
    of_record: float = 0.5

    def chance(self, confidence: int, record: float) -> float:
        """That a hint holds, those before it held; 0 to CHANCE_MAX.

        confidence: its level, 0 where it has none; record: how often the session's own hints held, 0 to 1.
        """
        if confidence == 0:
            return record
        return min(self._raw_chance(confidence, record), CHANCE_MAX)

    def _raw_chance(self, confidence: int, record: float) -> float:
        score = self.bias + self.of_confidence * _LOG_ODDS[confidence] + self.of_record * _log_odds(record)
        return 1.0 / (1.0 + math.exp(-min(max(score, -SCORE_MAX), SCORE_MAX)))

    def observe(self, confidence: int, record: float, *, has_held: bool) -> None:
        """A hint that was tried, and what was known of it before."""
        if confidence == 0:
            return
        # Not from what `chance` cuts off: an error that never ends would make the slopes grow for ever.
        step = RATE * (has_held - self._raw_chance(confidence, record))
        self.bias += step
        self.of_confidence += step * _LOG_ODDS[confidence]
        self.of_record += step * _log_odds(record)


def calibrations() -> dict[DecodingMode, Calibration]:
    """Of one worker. There is none for rejection sampling, where nobody may look at how sure the draft is (I4)."""
    return {mode: Calibration() for mode in (DecodingMode.GREEDY, DecodingMode.COUPLED)}
