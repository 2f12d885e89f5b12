"""Acceptance rates of hints, learned from those that were verified. Pure.

Each step verifies of a block its accepted hints and at most one rejected one; the rest is not examined, and nothing is
known beyond a fully accepted block. So position i is counted over the blocks that reached it, and the expected extra
tokens of a step are the sum over i of a1 × a2 × … × ai: the product-limit estimate (Kaplan and Meier), which short
blocks do not distort.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field

from outrider.concurrency.decayed_mean import DecayedMean

DECAY = 0.97


@dataclass(slots=True)
class AcceptanceHistory:
    """The probability that a hint is accepted, given that those before it were: a decayed count with a prior of 0.7."""

    accepted: DecayedMean = field(default_factory=lambda: DecayedMean(DECAY, 2.8, 4.0))  # of those tried

    def observe(self, num_accepted: int, num_verified: int) -> None:
        """Takes a verified block of which the first `num_accepted` hints were accepted."""
        self.accepted.observe(num_accepted, min(num_accepted + 1, num_verified))

    @property
    def rate(self) -> float:
        """Mean acceptance, at most 0.99."""
        return min(self.accepted.mean, 0.99)


NUM_POSITIONS = 8
"""Positions in a block that are distinguished; later ones are assumed to be like the last of these."""
POSITION_WEIGHT = 6.0
"""Weight, in hints, of the rate over all positions in a position's estimate."""


def extra_tokens_at(rate: float) -> float:
    """Expected tokens of a step beyond its own if every position has the same acceptance rate, 0 to 1."""
    return sum(rate ** (position + 1) for position in range(NUM_POSITIONS))


@dataclass(slots=True)
class BlockAcceptance:
    """The probability that a hint is accepted, given that those before it were, by its position in the block."""

    overall: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    position_weight: float = POSITION_WEIGHT
    by_position: list[DecayedMean] = field(init=False)  # share accepted of the hints tried there

    def __post_init__(self) -> None:
        self.by_position = [DecayedMean(self.overall.accepted.decay) for _ in range(NUM_POSITIONS)]

    @classmethod
    def of_what_is_seen(cls, decay: float) -> BlockAcceptance:
        """That expects nothing before it has seen anything, and follows it soon."""
        return cls(AcceptanceHistory(DecayedMean(decay)), position_weight=1.0)

    @property
    def rate(self) -> float:
        """Acceptance rate of a verified hint at any position."""
        return self.overall.rate

    @property
    def extra_tokens(self) -> float:
        """Expected tokens of a step beyond its own, with enough hints."""
        return sum(itertools.accumulate(self.chances(NUM_POSITIONS), operator.mul))

    def observe(self, num_accepted: int, num_verified: int) -> None:
        """Takes a verified block of which the first `num_accepted` hints were accepted; those behind a rejection do not
        count."""
        self.overall.observe(num_accepted, num_verified)
        num_tried = min(num_accepted + 1, num_verified)
        for position, share in enumerate(self.by_position):  # positions that are no longer reached decay as well
            share.observe(position < num_accepted, position < num_tried)

    def chances(self, num_hints: int) -> list[float]:
        """Acceptance probability of each of `num_hints` in a block, given those before it."""
        rate = self.overall.rate
        known = [
            min((each.total + self.position_weight * rate) / (each.weight + self.position_weight), 0.99)
            for each in self.by_position[:num_hints]
        ]
        return known + known[-1:] * (num_hints - len(known))
