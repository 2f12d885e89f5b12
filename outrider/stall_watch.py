"""How long a worker's model has been stuck, told apart from a process that did not run at all. Pure.

A process that was paused (a frozen machine, no processor time on a busy one) finds on waking that its model has owed a
sign of life for as long as that, though it had no chance to give one. So only time counts in which the watcher itself
kept its own beat.
"""

from __future__ import annotations


class StallWatch:
    """Told at each look what the model owes; times are `time.monotonic()` seconds."""

    def __init__(self, interval_s: float, now_s: float) -> None:
        """interval_s: between two looks. One that comes later than twice that counts as twice that."""
        self._longest_s = 2 * interval_s
        self._last_s = now_s
        self._counted_s = 0.0

    def look(self, owed_s: float, now_s: float) -> float:
        """For how long the model has been stuck while this process ran. owed_s: since a sign of life was asked for."""
        self._counted_s += min(now_s - self._last_s, self._longest_s)
        self._last_s = now_s
        if owed_s <= 0.0:
            self._counted_s = 0.0
        return min(owed_s, self._counted_s)
