"""What a step costs, learned while serving. Pure.

A step's time is fitted as a sum: something fixed, something per token fed, per thousand tokens of context read, and per
session that listens to a draft worker (whose hints are received beside the step). Least squares with exponential
forgetting; where the steps seen do not tell two causes apart, a weak prior does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FORGETTING = 0.99
PRIOR_MS = (20.0, 0.4)
"""Of an empty step and a token before anything was seen, so that the first steps speculate."""
OUTLIER = 3.0
"""Times the expected: a step that took longer was held up by something else, and counts as this much."""


class StepLine(NamedTuple):
    """Milliseconds of an empty step and of each token fed, at a given context and number of listening sessions."""

    fixed_ms: float
    token_ms: float

    def step_ms(self, num_tokens: int) -> float:
        return self.fixed_ms + self.token_ms * num_tokens


@dataclass(slots=True)
class StepCost:
    """Weighted sums of the normal equations over (1, tokens, thousands of context, listening sessions)."""

    products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    moments: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    coefficients: npt.NDArray[np.float64] | None = None

    def observe(self, num_tokens: int, step_ms: float, num_context: int = 0, num_listening: int = 0) -> None:
        """One step: tokens fed, its time, tokens in the KV that it read, sessions that listened."""
        features = np.array([1.0, num_tokens, num_context / 1e3, num_listening])
        if self.coefficients is not None and self.products[0, 0] > 8.0:
            step_ms = min(step_ms, OUTLIER * max(float(self.coefficients @ features), 1e-3))
        self.products *= FORGETTING
        self.moments *= FORGETTING
        self.products += np.outer(features, features)
        self.moments += features * step_ms
        self.coefficients = self._solve()

    def _solve(self) -> npt.NDArray[np.float64]:
        weight = self.products[0, 0]
        mean_ms = self.moments[0] / weight
        mean_tokens = max(self.products[0, 1] / weight, 1.0)
        expected = np.array([0.0, 0.02 * mean_ms, 0.0, 0.01 * mean_ms])
        strength = np.array([0.0, 0.5, 0.05, 2.0])
        found = np.linalg.solve(self.products + np.diag(strength + 1e-9), self.moments + strength * expected)
        token_ms = min(max(found[1], 0.005 * mean_ms), mean_ms / mean_tokens)
        context_ms, listening_ms = max(found[2], 0.0), max(found[3], 0.0)
        means = self.products[0] / weight
        fixed_ms = mean_ms - token_ms * means[1] - context_ms * means[2] - listening_ms * means[3]
        return np.array([max(fixed_ms, 0.05 * mean_ms), token_ms, context_ms, listening_ms])

    def line(self, num_context: int = 0, num_listening: int = 0) -> StepLine:
        """Cost over the number of tokens fed, both parts positive."""
        if self.coefficients is None:
            return StepLine(*PRIOR_MS)
        fixed_ms, token_ms, context_ms, listening_ms = self.coefficients.tolist()
        return StepLine(fixed_ms + context_ms * num_context / 1e3 + listening_ms * num_listening, token_ms)

    @property
    def listening_ms(self) -> float:
        """Milliseconds that one listening session adds to a step."""
        return 0.0 if self.coefficients is None else float(self.coefficients[3])
