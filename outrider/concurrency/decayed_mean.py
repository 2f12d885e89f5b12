"""A mean in which what is older counts less. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DecayedMean:
    """The sum of values over the sum of their weights; every observation multiplies what came before by `decay`."""

    decay: float
    total: float = 0.0
    weight: float = 0.0

    def observe(self, value: float, weight: float = 1.0) -> None:
        """Adds a value; earlier ones count less by the factor `decay`."""
        self.total = self.total * self.decay + value
        self.weight = self.weight * self.decay + weight

    @property
    def mean(self) -> float:
        """0.0 before the first observation."""
        return self.total / self.weight if self.weight else 0.0
