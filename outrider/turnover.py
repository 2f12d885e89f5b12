"""How soon a place comes free, told from how long those kept theirs who had one. Pure.

With `c` places that are taken and are kept for `m` seconds on average, one comes free every `m / c` seconds, and the
`k`-th who waits gets his after `k` of them. That is Little's law, so it holds at a worker as well as for the share of
many workers' places that one coordinator has, whatever happens behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 30.0
"""Bounds of what a refusal says of when to come back: sooner is no use, and nobody can see further ahead."""
_DECAY: Final = 0.95
_QUANTILE: Final = 2.326
"""Of the normal distribution, one in a hundred."""


@dataclass(slots=True)
class Turnover:
    """Times are seconds."""

    total_s: float = 0.0  # that places were kept, the last twenty or so, and
    weight: float = 0.0  # how many that were

    def leave(self, stay_s: float) -> None:
        """A place comes free that was kept for so long, whatever the reason."""
        self.total_s = _DECAY * self.total_s + stay_s
        self.weight = _DECAY * self.weight + 1.0

    def stay_s(self, otherwise: float = 0.0) -> float:
        """How long a place is kept; `otherwise` before anybody has left one."""
        return self.total_s / self.weight if self.weight else otherwise

    def wait_s(self, num_before: float, num_taken: int) -> float:
        """Expected by one that so many wait before, where so many places are taken; 0.0 while nothing is known."""
        return (num_before + 1.0) * self.stay_s() / num_taken if num_taken else 0.0

    def least_wait_s(self, num_ends: int, ages_s: Sequence[float]) -> float:
        """For how long at least so many places will not have come free. `ages_s`: since when those taken are.

        They may come free at random: then the wait follows a gamma distribution, and is shorter than this only once in
        a hundred times (Wilson and Hilferty's approximation). Or all are kept equally long, and those come free next
        that were taken first. The shorter of the two counts.
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
    """What a refusal says, of the time until there is a place."""
    return min(max(wait_s, RETRY_S_MIN), RETRY_S_MAX)
