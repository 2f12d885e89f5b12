"""Virtual time and network links.

Deterministic: events of one moment happen in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import Any


class Clock:
    """Virtual clock, in seconds since the run began."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_asked = 0

    def at(self, when_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._num_asked += 1
        heapq.heappush(self._events, (when_s, self._num_asked, happen, arguments))

    def run(self, until_s: float) -> None:
        """Runs all events up to `until_s`, and all there are if that is infinity."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, happen, arguments = heapq.heappop(events)
            self.num_events += 1
            happen(*arguments)
        if math.isfinite(until_s):
            self.now_s = until_s


class Link:
    """Network link between two processes: messages are delayed and never reordered."""

    __slots__ = ("_chance", "_clock", "_delay_s", "_jitter", "_last_s")

    def __init__(self, clock: Clock, chance: random.Random, delay_ms: float, jitter: float) -> None:
        self._clock, self._chance, self._delay_s, self._jitter = clock, chance, delay_ms / 1e3, jitter
        self._last_s = 0.0

    def send(self, take: Callable[..., None], *arguments: Any) -> None:
        longer = 1.0 + self._jitter * self._chance.expovariate(1.0) if self._jitter else 1.0
        self._last_s = max(self._clock.now_s + self._delay_s * longer, self._last_s)
        self._clock.at(self._last_s, take, *arguments)
