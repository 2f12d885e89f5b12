"""Bounds the share of a thread's time that peers may take, so that a flood delays nobody else. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE_MAX: Final = 0.25
"""Share of an event loop's time that one peer's stream may take."""
BURST_S: Final = 0.05
"""Time that a stream may take without a pause. Others have their turns in between."""


@dataclass(slots=True)
class LoopShare:
    """A leaky bucket of processor time. Times are seconds, `now` on the caller's clock."""

    share: float = SHARE_MAX
    burst_s: float = BURST_S
    spent_s: float = 0.0  # not yet leaked away
    at: float = 0.0

    def spend(self, spent_s: float, now: float) -> None:
        """Takes the processing time of a message."""
        self.spent_s, self.at = self._left_s(now) + spent_s, now

    def wait_s(self, now: float) -> float:
        """How long to take nothing more. Meanwhile flow control holds the peer's messages on its side."""
        return max(0.0, self._left_s(now) - self.burst_s) / self.share

    def _left_s(self, now: float) -> float:
        return max(0.0, self.spent_s - (now - self.at) * self.share)
