"""Bounds the share of an event loop that one peer's stream may take, so that a flood delays nobody else. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE_MAX: Final = 0.25
"""Share of the loop's time."""
BURST_S: Final = 0.05
"""Time that may be spent at once: enough for a frame of the largest size."""


@dataclass(slots=True)
class LoopShare:
    """A leaky bucket of processor time. Times are seconds, `now` on the caller's clock."""

    spent_s: float = 0.0  # not yet leaked away
    at: float = 0.0

    def spend(self, spent_s: float, now: float) -> None:
        """Takes the processing time of a message."""
        self.spent_s, self.at = self._left_s(now) + spent_s, now

    def wait_s(self, now: float) -> float:
        """How long to read nothing more. Meanwhile HTTP/2 flow control holds the peer's messages on its side."""
        return max(0.0, self._left_s(now) - BURST_S) / SHARE_MAX

    def _left_s(self, now: float) -> float:
        return max(0.0, self.spent_s - (now - self.at) * SHARE_MAX)
