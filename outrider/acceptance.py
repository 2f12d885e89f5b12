"""How often hints hold, learned from those that were tried. Pure.

Of a block each step tries its accepted hints and at most one rejected one; the rest was never looked at, and what lies
beyond a block that held to its end was never hinted. So position i is counted over the blocks that reached it, and the
tokens that a step may expect on top of its own are the sum over i of a1 × a2 × … × ai: the product-limit estimate of
how far blocks hold (Kaplan and Meier), which short blocks do not distort.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field


@dataclass(slots=True)
class AcceptanceHistory:
    """The chance that a hint is accepted, given that those before it were: a decayed count with a prior of 0.7."""

    accepted: float = 2.8
    tried: float = 4.0
    decay: float = 0.97

    def observe(self, num_accepted: int, num_verified: int) -> None:
        """Of `num_verified` hints the first `num_accepted` held; those behind a rejection were not tried."""
        num_tried = min(num_accepted + 1, num_verified)
        self.accepted = self.accepted * self.decay + num_accepted
        self.tried = self.tried * self.decay + num_tried

    @property
    def rate(self) -> float:
        return min(self.accepted / self.tried, 0.99) if self.tried > 0 else 0.0


NUM_POSITIONS = 8
"""Positions in a block that are told apart; hints further down are taken to hold as often as the last of these."""
POSITION_WEIGHT = 6.0
"""Hints tried: how much of a position's estimate is the rate over all positions."""


def extra_tokens_at(rate: float) -> float:
    """Tokens a step expects on top of its own where every position holds with the same rate, 0 to 1."""
    return sum(rate ** (position + 1) for position in range(NUM_POSITIONS))


@dataclass(slots=True)
class BlockAcceptance:
    """The chance that a hint is accepted, given that those before it were, by its position in the block."""

    overall: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    position_weight: float = POSITION_WEIGHT
    accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_POSITIONS)
    tried: list[float] = field(default_factory=lambda: [0.0] * NUM_POSITIONS)

    @classmethod
    def of_what_is_seen(cls, decay: float) -> BlockAcceptance:
        """That expects nothing before it has seen anything, and follows it soon."""
        return cls(AcceptanceHistory(accepted=0.0, tried=0.0, decay=decay), position_weight=1.0)

    @property
    def rate(self) -> float:
        """Of a hint that is tried, wherever it stands."""
        return self.overall.rate

    @property
    def extra_tokens(self) -> float:
        """Tokens a step may expect on top of its own, had it hints enough."""
        return sum(itertools.accumulate(self.chances(NUM_POSITIONS), operator.mul))

    def observe(self, num_accepted: int, num_verified: int) -> None:
        """Of a block of `num_verified` hints the first `num_accepted` held; those behind a rejection were not tried."""
        self.overall.observe(num_accepted, num_verified)
        decay = self.overall.decay
        num_tried = min(num_accepted + 1, num_verified)
        for position in range(NUM_POSITIONS):  # what is no longer reached fades as well
            self.accepted[position] = self.accepted[position] * decay + (position < num_accepted)
            self.tried[position] = self.tried[position] * decay + (position < num_tried)

    def chances(self, num_hints: int) -> list[float]:
        """Of each of `num_hints` in a block, given those before it."""
        rate = self.overall.rate
        known = [
            min((accepted + self.position_weight * rate) / (tried + self.position_weight), 0.99)
            for accepted, tried in zip(self.accepted[:num_hints], self.tried[:num_hints], strict=True)
        ]
        return known + known[-1:] * (num_hints - len(known))
