"""The least probability of being reached with which a node is still fed. Pure.

Every node costs the target a part of a message, and memory traffic where the workers share a machine. Beside a target
whose steps are long there is time for nodes that are less likely to be reached, and a hint that is missing costs more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.concurrency.decayed_mean import DecayedMean

SLOW_TARGET = 8.0
"""Time between two commits of a session, in steps of the draft worker, from which less likely nodes are fed."""
LOWERED = 0.5
"""The least probability beside such a target, relative to the usual one. Measured on the demo's pairs at temperature 1:
with the grown target 0.75 instead of 0.68 of the commits then find hints ready; the small one was slower with it."""
MAX_INTERVAL_S = 1.0
"""Longer intervals between commits are pauses."""


@dataclass(slots=True)
class ReachFloor:
    """Least probability of being reached for a node of one session to be fed."""

    usual: float
    _interval_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.9))
    _last_at: float = -math.inf  # shell's clock, seconds

    def after_commit(self, now: float, step_ms: float) -> float:
        """Takes the time of a commit; returns the least probability from now on. step_ms: mean time of a step of the
        draft worker, 0.0 while unknown."""
        if now - self._last_at < MAX_INTERVAL_S:
            self._interval_s.observe(now - self._last_at)
        self._last_at = now
        is_slow = step_ms > 0.0 and 1e3 * self._interval_s.mean > SLOW_TARGET * step_ms
        return self.usual * (LOWERED if is_slow else 1.0)
