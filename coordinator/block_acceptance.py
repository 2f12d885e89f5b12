"""What blocks of hints lately held, position by position, and what that promises. Pure.

Of a block each step decides its accepted hints and at most one rejected one; the rest was never looked at, and what
lies beyond a block that held to its end was never hinted. So position i is counted over the blocks that reached it,
and the tokens that a step may expect on top of its own are the sum over i of a1 × a2 × … × ai: the product-limit
estimate of how far blocks hold, which short blocks do not distort.
"""

from __future__ import annotations

from typing import Final

NUM_POSITIONS: Final = 8
"""Positions looked at; what holds so far is worth its while anyway."""


def extra_tokens_at(rate: float) -> float:
    """Tokens a step expects on top of its own where every position holds with the same rate, 0 to 1."""
    return sum(rate ** (position + 1) for position in range(NUM_POSITIONS))


class BlockAcceptance:
    """Counts that fade by `decay` with each block observed."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._decided = [0.0] * NUM_POSITIONS
        self._accepted = [0.0] * NUM_POSITIONS

    def observe(self, num_hints: int, num_accepted: int) -> None:
        """A block of at least one hint, of which the first `num_accepted` held."""
        num_decided = min(num_accepted + 1, num_hints)
        for position in range(NUM_POSITIONS):
            self._decided[position] = self._decided[position] * self._decay + (position < num_decided)
            self._accepted[position] = self._accepted[position] * self._decay + (position < num_accepted)

    @property
    def rate(self) -> float:
        """Accepted share of the hints decided, whatever their position; 0 before the first."""
        num_decided = sum(self._decided)
        return sum(self._accepted) / num_decided if num_decided else 0.0

    @property
    def extra_tokens(self) -> float:
        """Tokens a step may expect on top of its own. Each position starts from one hint at the common rate, so that a
        flat pattern promises `extra_tokens_at(rate)` and one that nobody reached follows the others."""
        rate, total, held = self.rate, 0.0, 1.0
        for accepted, decided in zip(self._accepted, self._decided, strict=True):
            held *= (accepted + rate) / (decided + 1.0)
            total += held
        return total
