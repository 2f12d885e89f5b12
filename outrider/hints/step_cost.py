"""Step time as a function of the tokens fed, learned while serving. Pure.

A step's time is fitted as a sum of a fixed part, a part per token fed, a part per thousand tokens of context read, and
one per thousand tokens of context that branches read again. Least squares with exponential forgetting; a weak prior
decides where the steps seen do not tell two parts apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FORGETTING = 0.99
PRIOR_MS = (20.0, 0.4)
"""Time of an empty step and of a token before any measurement, so that the first steps speculate."""
OUTLIER = 3.0
"""Most times the expected step time that one step counts: longer ones were delayed by something else."""


class StepLine(NamedTuple):
    """Milliseconds of an empty step and of each token fed, at a given context."""

    fixed_ms: float
    token_ms: float
    reread_ms: float = 0.0  # of each thousand tokens of context that a branch reads again

    def branch_ms(self, num_context: int) -> float:
        """Time of a branch that is fed; `num_context`: committed tokens before it."""
        return self.token_ms + self.reread_ms * num_context / 1e3

    def step_ms(self, num_tokens: int) -> float:
        return self.fixed_ms + self.token_ms * num_tokens

    def num_tokens(self, step_ms: float) -> int:
        """Most tokens that a step of so many milliseconds feeds; 0 where even an empty one takes longer."""
        return max(int((step_ms - self.fixed_ms) / self.token_ms), 0)


NUM_STEPS_PER_FIT = 8
"""Steps between two fits; the first fits come after every step."""


@dataclass(slots=True)
class StepCost:
    """Weighted sums of the normal equations over (1, tokens, thousands of context, thousands that branches reread)."""

    products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    moments: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    coefficients: tuple[float, float, float, float] | None = None  # of the same features, milliseconds
    seen: list[tuple[float, float, float, float, float]] = field(default_factory=list)  # not yet in the sums

    def observe(self, num_tokens: int, step_ms: float, num_context: int = 0, num_reread: int = 0) -> None:
        """Takes one step: tokens fed, its time, tokens in the KV that it read, those that its branches read again."""
        if self.coefficients is not None:
            line = self.line(num_context)
            step_ms = min(step_ms, OUTLIER * (line.step_ms(num_tokens) + line.reread_ms * num_reread / 1e3))
        self.seen.append((1.0, num_tokens, num_context / 1e3, num_reread / 1e3, step_ms))
        if len(self.seen) >= NUM_STEPS_PER_FIT or self.products[0, 0] < NUM_STEPS_PER_FIT:
            seen = np.array(self.seen)
            weights = FORGETTING ** np.arange(len(seen) - 1, -1, -1)
            features, weighted = seen[:, :4], seen[:, :4] * weights[:, None]
            self.products = self.products * FORGETTING ** len(seen) + weighted.T @ features
            self.moments = self.moments * FORGETTING ** len(seen) + weighted.T @ seen[:, 4]
            self.seen.clear()
            self.coefficients = self._solve()

    def _solve(self) -> tuple[float, float, float, float]:
        weight = self.products[0, 0]
        mean_ms = self.moments[0] / weight
        mean_tokens = max(self.products[0, 1] / weight, 1.0)
        expected = np.array([0.0, 0.02 * mean_ms, 0.0, 0.0])
        strength = np.array([0.0, 0.5, 0.05, 0.5])
        found = np.linalg.solve(self.products + np.diag(strength + 1e-9), self.moments + strength * expected)
        token_ms = min(max(found[1], 0.005 * mean_ms), mean_ms / mean_tokens)
        context_ms, reread_ms = max(found[2], 0.0), max(found[3], 0.0)
        means = self.products[0] / weight
        fixed_ms = mean_ms - token_ms * means[1] - context_ms * means[2] - reread_ms * means[3]
        return float(max(fixed_ms, 0.05 * mean_ms)), float(token_ms), float(context_ms), float(reread_ms)

    def line(self, num_context: int = 0) -> StepLine:
        """Cost as a function of the tokens fed at a given context; both parts are positive."""
        if self.coefficients is None:
            return StepLine(*PRIOR_MS)
        fixed_ms, token_ms, context_ms, reread_ms = self.coefficients
        return StepLine(fixed_ms + context_ms * num_context / 1e3, token_ms, reread_ms)
