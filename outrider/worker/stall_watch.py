"""Measures how long a worker's model has been stuck, not counting time in which the process did not run. Pure.

A process that was paused (a frozen machine, no processor time on a busy one) finds on waking that its model has not
answered for as long, though it had no chance to. So only time counts in which the watcher itself kept its interval.
"""

from __future__ import annotations


class StallWatch:
    """Time that a model has been stuck. Times are `time.monotonic()` seconds."""

    def __init__(self, interval_s: float, now_s: float) -> None:
        """interval_s: between two looks. A longer interval counts as at most twice that."""
        self._longest_s = 2 * interval_s
        self._last_s = now_s
        self._counted_s = 0.0

    def look(self, owed_s: float, now_s: float) -> float:
        """How long the model has been stuck while this process ran. owed_s: time since a liveness check was sent."""
        self._counted_s += min(now_s - self._last_s, self._longest_s)
        self._last_s = now_s
        if owed_s <= 0.0:
            self._counted_s = 0.0
        return min(owed_s, self._counted_s)
