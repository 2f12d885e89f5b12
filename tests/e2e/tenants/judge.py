"""Limits for what a neighbour may notice of an attack, and a judgement of the measurements. Pure.

**Latencies.** A quantile under attack is compared with the same quantile beside an equally large ordinary load. Both
are known only from samples, so a limit counts as exceeded only where the lower confidence limit of the one exceeds the
limit times the upper confidence limit of the other. Both are order statistics, which assume nothing of the
distribution; the error rate of each is `ERROR_RATE`. Where there are too few samples for an upper limit of the p99, the
largest sample is used. Samples of one pause depend on each other, so a comparison that fails is measured anew, and
counts as failed only if it fails again. Latencies below `FLOOR_S` count as that: nobody notices them.

**Memory.** The first round of an attack warms the allocator up with this very load, and what it keeps then is bounded;
after each later round a process has to have as much as after the first, within a tenth. A leak grows with each round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.e2e.fuzz.lag import Histogram
from tests.e2e.tables import markdown_table
from tests.e2e.tenants.neighbour import GROUPS, Sample

ERROR_RATE: Final = 0.005
FLOOR_S: Final = 0.05
MEMORY_SHARE: Final = 0.1
MEMORY_NOISE_BYTES: Final = 16 << 20
KEPT_ONCE_BYTES: Final = 320 << 20
"""Arenas that threads of a compiler leave behind: 250 MiB after twenty schemas of 1,500 properties, and after forty."""
PEAK_MORE_BYTES: Final = 512 << 20
"""A quarter of what the chart gives a coordinator or a worker: more of it at once is not one tenant's."""
LAG_MAX_S: Final = 0.1
LATE_SHARE_MAX: Final = 0.01
STALL_MAX_S: Final = 1.0
FAULTS_SHOWN: Final = 3


@dataclass(frozen=True)
class Limits:
    """How many times as long as beside an ordinary load the neighbour's requests may take."""

    times: Mapping[float, float] = field(default_factory=lambda: {0.5: 2.0, 0.99: 4.0})  # by quantile
    latency_max_s: float = math.inf
    kept_once_bytes: int = KEPT_ONCE_BYTES
    """Memory that a process may keep after the first round of an attack."""


@dataclass(frozen=True)
class Comparison:
    """One quantile of one group of requests, in seconds, as it was measured."""

    group: str
    quantile: float
    ordinary_s: float
    attacked_s: float
    limit: float
    is_exceeded: bool

    @property
    def ratio(self) -> float:
        return self.attacked_s / self.ordinary_s

    def __str__(self) -> str:
        return (
            f"{self.group} p{self.quantile * 100:g} {self.attacked_s:.2f} s, beside an ordinary load "
            f"{self.ordinary_s:.2f} s: {self.ratio:.1f} times, permitted {self.limit:g}"
        )


def confidence_ranks(count: int, quantile: float, error_rate: float = ERROR_RATE) -> tuple[int, int]:
    """Indices, from 0, of the sorted samples between which a quantile lies; each side is wrong at that rate.

    The number of samples below the quantile is binomial. The highest index is the last one even where that is not
    enough.
    """
    below, lower, upper = 0.0, -1, count - 1
    for number in range(count + 1):
        choices = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
        below += math.exp(choices + number * math.log(quantile) + (count - number) * math.log1p(-quantile))
        if below <= error_rate:
            lower = number
        if below >= 1 - error_rate:
            upper = min(number, count - 1)
            break
    return max(lower, 0), upper


def compare(
    group: str, ordinary: Sequence[float], attacked: Sequence[float], quantile: float, limit: float
) -> Comparison:
    """Compares one quantile of two samples, neither of which is empty."""
    before, under = (sorted(max(each, FLOOR_S) for each in samples) for samples in (ordinary, attacked))
    _, upper = confidence_ranks(len(before), quantile)
    lower, _ = confidence_ranks(len(under), quantile)
    is_exceeded = under[lower] > limit * before[upper]
    of = [samples[min(int(quantile * len(samples)), len(samples) - 1)] for samples in (before, under)]
    return Comparison(group, quantile, of[0], of[1], limit, is_exceeded)


def compare_all(ordinary: Sequence[Sample], attacked: Sequence[Sample], limits: Limits) -> list[Comparison]:
    """Compares the requests of each group, by each quantile that has a limit."""
    found = []
    for group, kinds in GROUPS.items():
        before, under = ([each.latency_s for each in samples if each.kind in kinds] for samples in (ordinary, attacked))
        if before and under:
            found += [compare(group, before, under, quantile, limit) for quantile, limit in limits.times.items()]
    return found


def answer_faults(samples: Sequence[Sample], limits: Limits) -> list[str]:
    """Describes what the neighbour got that it should not have got: errors, and answers that were too late."""
    faults = Counter(f"{each.kind}: {each.fault}" for each in samples if each.fault is not None)
    found = [f"{count} × {fault}" for fault, count in faults.most_common(FAULTS_SHOWN)]
    if (left := faults.total() - sum(count for _, count in faults.most_common(FAULTS_SHOWN))) > 0:
        found.append(f"{left} more of the neighbour's {len(samples)} requests failed")
    slowest = max(samples, key=lambda each: each.latency_s, default=None)
    if slowest is not None and slowest.latency_s > limits.latency_max_s:
        found.append(f"{slowest.kind}: {slowest.latency_s:.1f} s, permitted {limits.latency_max_s:g} s")
    return found


Memory = Mapping[str, int]
"""Resident bytes of each process."""


def has_settled(wanted: Memory, now: Memory) -> bool:
    """Whether no process has a tenth more than it should have."""
    return not _grown(wanted, now, MEMORY_NOISE_BYTES)


def memory_faults(
    before: Memory, rounds: Sequence[Memory], peaks: Memory, kept_once_bytes: int = KEPT_ONCE_BYTES
) -> list[str]:
    """Describes processes that do not give back what they took. `rounds`: after each round of the attack, settled;
    `peaks`: most during any round."""
    found = []
    for name, then, now in _grown(before, rounds[0], kept_once_bytes) if rounds else []:
        found.append(f"{name} keeps {_mib(now)} after the first round, {_mib(then)} before")
    for name, then, now in _grown(rounds[0], rounds[-1], MEMORY_NOISE_BYTES) if len(rounds) > 1 else []:
        found.append(f"{name} keeps {_mib(now)} after round {len(rounds)}, {_mib(then)} after the first")
    for name in sorted(peaks.keys() & before.keys()):
        if peaks[name] > before[name] + PEAK_MORE_BYTES:
            found.append(f"{name} had {_mib(peaks[name])} at once, {_mib(before[name])} before")
    return found


def _grown(before: Memory, now: Memory, noise_bytes: int) -> list[tuple[str, int, int]]:
    return [
        (name, before[name], now[name])
        for name in sorted(before.keys() & now.keys())
        if now[name] > before[name] * (1 + MEMORY_SHARE) + noise_bytes
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"


@dataclass(frozen=True)
class Lag:
    """Ticks of a process' event loop in some time, late by the loop's own work."""

    num_ticks: float
    num_late: float
    worst_s: float  # an upper bound

    @classmethod
    def between(cls, before: Histogram, now: Histogram) -> Lag:
        def late(each: Histogram) -> float:
            return each.counts[math.inf] - each.counts[LAG_MAX_S]

        num_ticks = now.counts[math.inf] - before.counts[math.inf]
        return cls(num_ticks, late(now) - late(before), now.worst_s(before))

    def fault(self, name: str) -> str | None:
        """Describes a loop that is late too often or for too long; None if it is not.

        A quantile: one tick of a hundred may be later, by less than a second.
        """
        if self.worst_s > STALL_MAX_S:
            return f"the event loop of {name} stood still for up to {self.worst_s:.1f} s by its own work"
        if self.num_late > 1 and self.num_late > LATE_SHARE_MAX * self.num_ticks:
            return (
                f"the event loop of {name} was late {self.num_late:.0f} times of {self.num_ticks:.0f} by its own work"
            )
        return None


@dataclass
class Row:
    """Everything that was found out about one attack."""

    name: str
    point: int
    text: str
    num_requests: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # of the hostile tenant
    num_ordinary: int = 0
    num_samples: int = 0
    comparisons: list[Comparison] = field(default_factory=list)
    memory_mib: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # before, at most, after
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def cells(self) -> tuple[object, ...]:
        answers = ", ".join(f"{answer} {count}" for answer, count in self.answers.most_common(4))
        by = {(each.group, each.quantile): f"{each.ratio:.1f}" for each in self.comparisons}
        quantiles = [" / ".join(by.get((group, quantile), "–") for quantile in (0.5, 0.99)) for group in GROUPS]
        worst = max(self.memory_mib.items(), key=lambda each: each[1][1] - each[1][0], default=None)
        memory = "–" if worst is None else f"{worst[0].partition(' ')[0]} {' → '.join(map(str, worst[1]))}"
        verdict = "; ".join(self.faults).replace("|", "¦") or "holds"
        return (self.name, self.point or "–", f"{self.num_requests} ({answers})", *quantiles, memory, verdict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "point": self.point,
            "text": self.text,
            "num_requests": self.num_requests,
            "answers": dict(self.answers),
            "num_ordinary": self.num_ordinary,
            "num_samples": self.num_samples,
            "comparisons": [vars(each) for each in self.comparisons],
            "memory_mib": self.memory_mib,
            "faults": self.faults,
            "seconds": round(self.seconds, 1),
        }


def table(rows: Sequence[Row]) -> str:
    """The table of the results, a line for each attack."""
    groups = [f"{group}, p50 / p99 times" for group in GROUPS]
    titles = ["Attack", "point", "requests (answers)", *groups, "memory before → at most → after, MiB", "verdict"]
    return markdown_table(" | ".join(titles), [row.cells() for row in rows])
