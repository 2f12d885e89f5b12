"""How much of an event loop its peers' streams may take, so that one who floods it keeps nobody else waiting. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE_MAX: Final = 0.25
"""Of the loop's time."""
BURST_S: Final = 0.05
"""So much is free at once: a whole frame of the largest size, for example."""


@dataclass(slots=True)
class LoopShare:
    """A leaky bucket of processor time. Times are seconds, `now` on a clock of the caller's."""

    spent_s: float = 0.0  # and not yet leaked away
    at: float = 0.0

    def spend(self, spent_s: float, now: float) -> None:
        """A message took so long."""
        self.spent_s, self.at = self._left_s(now) + spent_s, now

    def wait_s(self, now: float) -> float:
        """For how long nothing more is to be read. What peers go on sending then waits on their side (HTTP/2 flow
        control)."""
        return max(0.0, self._left_s(now) - BURST_S) / SHARE_MAX

    def _left_s(self, now: float) -> float:
        return max(0.0, self.spent_s - (now - self.at) * SHARE_MAX)
