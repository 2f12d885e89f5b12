"""Estimates when a slot becomes free, from how long slots were held. Pure.

With `c` slots taken and held for `m` seconds on average, one becomes free every `m / c` seconds, and the `k`-th in the
queue gets one after `k` of them. This is Little's law, so it holds for a worker as well as for one coordinator's share
of many workers' slots, whatever happens behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.concurrency.decayed_mean import DecayedMean

RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 30.0
"""Bounds of the retry time in a refusal: retrying sooner is useless, and no forecast reaches further."""
_DECAY: Final = 0.95
_QUANTILE: Final = 2.326
"""Quantile of the normal distribution for 1 %."""


@dataclass(slots=True)
class Turnover:
    """Holding times of slots. Times are seconds."""

    # How long the last twenty or so places were kept.
    stays: DecayedMean = field(default_factory=lambda: DecayedMean(_DECAY))

    def leave(self, stay_s: float) -> None:
        """A place comes free that was kept for so long, whatever the reason."""
        self.stays.observe(stay_s)

    def stay_s(self, otherwise: float = 0.0) -> float:
        """How long a place is kept; `otherwise` before anybody has left one."""
        return self.stays.mean if self.stays.weight else otherwise

    def wait_s(self, num_before: float, num_taken: int) -> float:
        """Expected wait behind `num_before` others with `num_taken` slots taken; 0.0 while nothing is known."""
        return (num_before + 1.0) * self.stay_s() / num_taken if num_taken else 0.0

    def least_wait_s(self, num_ends: int, ages_s: Sequence[float]) -> float:
        """A lower bound of the time until `num_ends` slots have become free. `ages_s`: how long the taken ones have
        been held.

        If slots are freed at random, the wait follows a gamma distribution and is below this bound in 1 % of cases
        (Wilson and Hilferty's approximation). If all are held equally long, the oldest are freed next. The shorter of
        the two counts.
        """
        if num_ends < 1 or not ages_s:
            return 0.0
        stay_s = self.stay_s()
        root = 1.0 - 1.0 / (9.0 * num_ends) - _QUANTILE / (3.0 * num_ends**0.5)
        at_random = num_ends * stay_s / len(ages_s) * max(root, 0.0) ** 3
        num_rounds, place = divmod(num_ends - 1, len(ages_s))
        in_order = num_rounds * stay_s + max(stay_s - sorted(ages_s, reverse=True)[place], 0.0)
        return min(at_random, in_order)


def retry_after_s(wait_s: float) -> float:
    """The retry time in a refusal, from the expected wait for a slot."""
    return min(max(wait_s, RETRY_S_MIN), RETRY_S_MAX)
