"""Virtual time, network links and busy processors.

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


class Processor:
    """Processor of one process: it handles items one after another, each for the same time."""

    __slots__ = ("_clock", "_counts_s", "_free_s", "_item_s", "num_items")

    def __init__(self, clock: Clock, item_s: float, since_s: float, until_s: float) -> None:
        """Items take `item_s` each. Only those that begin from `since_s` on and before `until_s` are counted."""
        self._clock, self._item_s, self._counts_s = clock, item_s, (since_s, until_s)
        self._free_s = 0.0
        self.num_items = 0

    @property
    def busy_s(self) -> float:
        """Time that the counted items took."""
        return self.num_items * self._item_s

    def take(self, handle: Callable[[list[Any]], None], items: list[Any]) -> None:
        """Handles the items, each when its time is over; at once if they take none."""
        since_s, until_s = self._counts_s
        if not self._item_s:
            self.num_items += len(items) * (since_s <= self._clock.now_s < until_s)
            handle(items)
            return
        for item in items:
            begin_s = max(self._clock.now_s, self._free_s)
            self.num_items += since_s <= begin_s < until_s
            self._free_s = begin_s + self._item_s
            self._clock.at(self._free_s, handle, [item])
