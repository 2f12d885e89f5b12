"""How often hints hold, learned from those that were tried. Pure; both workers keep one per session."""

from __future__ import annotations

from dataclasses import dataclass


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
