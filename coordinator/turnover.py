"""How soon places at targets come free, by how long texts have held them. Pure.

Little's law at the boundary of one replica: with `num_held` places held for `mean_s` each, one comes free every
mean_s / num_held seconds, whatever happens at the targets meanwhile, and however many replicas share them.
"""

from __future__ import annotations

from typing import Final

_FADING: Final = 0.05  # weight of the newest of many


class Turnover:
    """Of one model, at one replica."""

    def __init__(self) -> None:
        self.num_held = 0
        self._mean_s = 0.0
        self._num_ended = 0

    def begin(self) -> None:
        """A text takes a place."""
        self.num_held += 1

    def end(self, held_s: float) -> None:
        """It leaves it after so long, whatever the reason."""
        self.num_held -= 1
        self._num_ended += 1
        self._mean_s += max(_FADING, 1.0 / self._num_ended) * (held_s - self._mean_s)

    def wait_s(self, num_ahead: float) -> float:
        """How long one waits for its place behind `num_ahead` others; 0.0 while nothing is known."""
        if not self.num_held:
            return 0.0
        return (num_ahead + 1.0) * self._mean_s / self.num_held
