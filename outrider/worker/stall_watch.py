"""Measures how long a worker's model has been stuck, not counting time in which the process did not run. Pure.

A process that was paused (a frozen machine, no processor time on a busy one) finds on waking that its model has not
answered for as long, though it had no chance to. So only time counts in which the watcher itself kept its interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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


LEAST_CPU: Final = 0.05
"""Processor time of a process that works, as a share of one core. Probes and scrapes take less."""
LEAST_BYTES_PER_S: Final = 64 * 1024
LEAST_FAULTS_PER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work that a process has done since its start."""

    cpu_s: float
    num_bytes_read: int
    num_page_faults: int  # that read from a disk or a network: weights are read as mapped files


class LoadWatch:
    """Time in which a process that loads a model has neither computed nor read anything to speak of."""

    def __init__(self, interval_s: float, work: WorkDone, now_s: float) -> None:
        """interval_s: between two looks. A longer interval counts as at most twice that."""
        self._longest_s = 2 * interval_s
        self._last = work
        self._last_s = now_s
        self._idle_s = 0.0

    def look(self, work: WorkDone, now_s: float) -> float:
        """How long nothing has been done, seconds, while this process ran."""
        last, passed_s = self._last, max(now_s - self._last_s, 1e-3)
        self._last, self._last_s = work, now_s
        is_working = (
            work.cpu_s - last.cpu_s >= LEAST_CPU * passed_s
            or work.num_bytes_read - last.num_bytes_read >= LEAST_BYTES_PER_S * passed_s
            or work.num_page_faults - last.num_page_faults >= LEAST_FAULTS_PER_S * passed_s
        )
        self._idle_s = 0.0 if is_working else self._idle_s + min(passed_s, self._longest_s)
        return self._idle_s
