"""How often hints hold, learned from those that were tried. Pure; both workers keep one per session."""

from __future__ import annotations

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
"""Places in a block that are told apart; hints further down are taken to hold as often as the last of these."""
POSITION_WEIGHT = (
    6.0  # hints tried: how much of a position's estimate is the session's rate over all positions
)


@dataclass(slots=True)
class BlockAcceptance:
    """The chance that a hint is accepted, given that those before it were, by its place in the block."""

    overall: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_POSITIONS)
    tried: list[float] = field(default_factory=lambda: [0.0] * NUM_POSITIONS)

    def observe(self, num_accepted: int, num_verified: int) -> None:
        """Of a block of `num_verified` hints the first `num_accepted` held; those behind a rejection were not tried."""
        self.overall.observe(num_accepted, num_verified)
        decay = self.overall.decay
        for position in range(min(num_accepted + 1, num_verified, NUM_POSITIONS)):
            self.accepted[position] = self.accepted[position] * decay + (position < num_accepted)
            self.tried[position] = self.tried[position] * decay + 1.0

    def chances(self, num_hints: int) -> list[float]:
        """Of each of `num_hints` in a block, given those before it."""
        rate = self.overall.rate
        known = [
            min((accepted + POSITION_WEIGHT * rate) / (tried + POSITION_WEIGHT), 0.99)
            for accepted, tried in zip(self.accepted[:num_hints], self.tried[:num_hints], strict=True)
        ]
        return known + known[-1:] * (num_hints - len(known))
