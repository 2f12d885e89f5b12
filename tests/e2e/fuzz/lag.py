"""Event loop lag that is caused by the loop's own work, from the metric that tells it apart from pauses of the machine.
Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

LAG_MAX_S: Final = 0.05
"""Longest time that a request may block a loop by its own work. One of the histogram's bounds."""
OWN: Final = "outrider_loop_own_lag_seconds"
ANY: Final = "outrider_loop_lag_seconds"


@dataclass(frozen=True, slots=True)
class Histogram:
    """A process' histogram at one moment."""

    sum_s: float
    counts: Mapping[float, float]  # by upper bound, those below included

    @classmethod
    def parse(cls, page: str, name: str) -> Histogram:
        """Raises ValueError where the page has none of this name."""
        total_s, counts = 0.0, dict[float, float]()
        for family in text_string_to_metric_families(page):
            if family.name == name:
                for sample in family.samples:
                    if sample.name == f"{name}_sum":
                        total_s += sample.value
                    elif sample.name == f"{name}_bucket":
                        counts[float(sample.labels["le"])] = sample.value
        if LAG_MAX_S not in counts:
            raise ValueError(f"the page has no histogram {name} with a bound of {LAG_MAX_S:g} s")
        return cls(total_s, counts)

    def worst_s(self, before: Histogram) -> float:
        """An upper bound of everything that was observed since `before`: the bound of the last bucket that grew, or the
        sum of all if that is lower."""
        grown_s, below = 0.0, 0.0
        for bound_s in sorted(self.counts):
            new = self.counts[bound_s] - before.counts.get(bound_s, 0.0)
            if new > below:
                grown_s = bound_s
            below = new
        return min(grown_s, max(self.sum_s - before.sum_s, 0.0))

    def num_late(self, before: Histogram) -> int:
        """The number of observations since `before` that exceed the permitted lag."""

        def late(each: Histogram) -> float:
            return each.counts[math.inf] - each.counts[LAG_MAX_S]

        return round(late(self) - late(before))


@dataclass(frozen=True, slots=True)
class Reading:
    """The lag of one process' event loop until now."""

    own: Histogram
    any: Histogram

    @classmethod
    def parse(cls, page: str) -> Reading:
        return cls(Histogram.parse(page, OWN), Histogram.parse(page, ANY))


@dataclass(slots=True)
class LagTable:
    """The greatest lag of a run, and how often it exceeded the bound."""

    own_max_s: dict[str, float] = field(default_factory=dict)  # by kind of input that was in flight
    any_max_s: float = 0.0  # whatever held up the loop
    num_own_late: int = 0
    num_late: int = 0

    def take(self, before: Reading, now: Reading, kinds: Iterable[str]) -> int:
        """Adds the lag between two readings. Returns how often the loop was late by its own work in between."""
        worst_s, num_own_late = now.own.worst_s(before.own), now.own.num_late(before.own)
        for kind in kinds:
            self.own_max_s[kind] = max(self.own_max_s.get(kind, 0.0), worst_s)
        self.any_max_s = max(self.any_max_s, now.any.worst_s(before.any))
        self.num_own_late += num_own_late
        self.num_late += now.any.num_late(before.any)
        return num_own_late
