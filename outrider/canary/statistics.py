"""Statistics of an arm's requests, as sums that can be added over replicas. Pure.

A figure is one number per request, because tokens within a request depend on each other (one prompt, one batch, one
draft that suits the subject or not). Requests of one key do too, and all get one arm, so figures are summed by clusters
of keys, and their intervals rest on how clusters differ. Losses are counted twice: by request, for their rate, and by
groups of keys (`CanaryPlan.group_of`, several to a cluster), each for the arm that lost one of its requests first, so
that a key whose every request fails counts once.

Quantiles come from histograms with logarithmic buckets (DDSketch, Masson et al., 1908.10693): a value has a relative
error of RELATIVE_ERROR between VALUE_MIN and VALUE_MAX; values beyond are clamped.

Invariant: names of sums, and so what a replica stores and sends, are bounded: those of three figures, each of at most
`NUM_BUCKETS` buckets, eight for each of `NUM_CLUSTERS` clusters, and two for each group of keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.canary.intervals import Interval, Ratio, rank_bounds, ratio_interval

RELATIVE_ERROR: Final = 0.01
VALUE_MIN: Final = 1e-3
VALUE_MAX: Final = 1e8
"""Milliseconds: from a microsecond to more than a day."""
_LOG_BASE: Final = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_INDEX_MIN: Final = math.ceil(math.log(VALUE_MIN) / _LOG_BASE)
_INDEX_MAX: Final = math.ceil(math.log(VALUE_MAX) / _LOG_BASE)
NUM_BUCKETS: Final = _INDEX_MAX - _INDEX_MIN + 1
NUM_CLUSTERS: Final = 64
"""Number of clusters: enough to see how keys differ, few enough to read every few seconds."""
_ACCEPTANCE: Final = "acceptance"


class Figure(StrEnum):
    """A measurement of a finished request, in milliseconds."""

    TTFT = "ttft"
    TPOT = "tpot"  # mean over its tokens after the first; None with only one token
    E2E = "e2e"


class Count(StrEnum):
    """A count of requests. The first five add up to those that got the arm, were admitted and have ended."""

    FINISHED = "finished"
    FAILED = "failed"  # by our fault: a worker lost, a bug
    LATE = "late"  # its deadline passed
    LEFT = "left"  # the client left, or did not read
    REFUSED = "refused"  # full, or invalid: depends on load and client more than on the arm
    AUDITED = "audited"  # repeated without speculation, and compared
    DIVERGED = "diverged"  # of these: speculation changed the output
    UNSTABLE = "unstable"  # of these: plain decoding is not reproducible
    UNAUDITED = "unaudited"  # in the sample but not compared: no room, or the second run failed


class Loss(StrEnum):
    """Requests of an arm that did not finish, so that their times are unknown. In a slow arm these are the slow ones:
    without them it would look fast."""

    FAILURES = "failures"
    DEPARTURES = "departures"  # probably those that took too long


LOSSES: Final[Mapping[Loss, tuple[Count, ...]]] = {
    Loss.FAILURES: (Count.FAILED,),
    Loss.DEPARTURES: (Count.LATE, Count.LEFT),
}
FIRST: Final = "first:"
"""Prefix of the names of sums that count in one arm alone: the one in which they are added to first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """Figures of one finished request."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    num_draft_tokens: int  # hints verified
    num_accepted_draft_tokens: int


class ArmStatistics:
    """Sums over requests by name. `sums` is what is sent; adding another arm's sums gives the sums of both."""

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = dict(sums or {})

    def count(self, what: Count, number: int = 1) -> None:
        self._add(what, number)

    def lose(self, what: Count, group: int) -> None:
        """Adds a request of this group of keys that did not finish."""
        self.count(what)
        for loss, counts in LOSSES.items():
            if what in counts:
                self._add(f"{FIRST}{loss}:{group}", 1)

    def add(self, request: RequestFigures, group: int) -> None:
        """Adds a request of this group of keys that finished."""
        cluster = group % NUM_CLUSTERS
        self.count(Count.FINISHED)
        for figure, value in (
            (Figure.TTFT, request.ttft_ms),
            (Figure.TPOT, request.tpot_ms),
            (Figure.E2E, request.e2e_ms),
        ):
            if value is not None:
                self._add_to_ratio(figure, cluster, value, 1)
                self._add(f"{figure}:b:{_index_of(value)}", 1)
        if request.num_draft_tokens:
            self._add_to_ratio(_ACCEPTANCE, cluster, request.num_accepted_draft_tokens, request.num_draft_tokens)

    def num(self, what: Count) -> int:
        return round(self.sums.get(what, 0.0))

    @property
    def num_ended(self) -> int:
        """Requests that have ended in any way."""
        return self.num_judged + self.num(Count.REFUSED)

    @property
    def num_judged(self) -> int:
        """Requests that finished or were lost."""
        return self.num(Count.FINISHED) + sum(map(self.num_lost, Loss))

    def num_lost(self, loss: Loss) -> int:
        return sum(map(self.num, LOSSES[loss]))

    def loss_rate(self, loss: Loss) -> float:
        return self.num_lost(loss) / self.num_judged if self.num_judged else 0.0

    def num_first(self, loss: Loss) -> int:
        """Groups of keys that had this loss in this arm first."""
        return sum(name.startswith(f"{FIRST}{loss}:") for name in self.sums)

    def mean(self, figure: Figure) -> Ratio:
        """Mean over requests; their number is `whole`."""
        return self._ratio(figure)

    def quantile(self, figure: Figure, share: float) -> float | None:
        """The smallest value that is at least as large as this share of all, to RELATIVE_ERROR; None without values."""
        num = self._num_in_buckets(figure)
        return _middle(self._index_at(figure, max(math.ceil(share * num), 1))) if num else None

    def quantile_interval(self, figure: Figure, share: float, confidence: float) -> Interval:
        """Interval from order statistics, for any distribution of independent requests; a side is None where there are
        too few."""
        low, high = rank_bounds(self._num_in_buckets(figure), share, confidence)
        return Interval(
            None if low is None else _edges(self._index_at(figure, low))[0],
            None if high is None else _edges(self._index_at(figure, high))[1],
        )

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over verified hints of all requests; None if none was verified."""
        ratio = self._ratio(_ACCEPTANCE)
        return ratio.value if ratio.whole else None

    def draft_acceptance_interval(self, confidence: float) -> Interval:
        found = ratio_interval(self._ratio(_ACCEPTANCE), confidence)
        if found.low is None or found.high is None:
            return found
        return Interval(max(found.low, 0.0), min(found.high, 1.0))

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def _add_to_ratio(self, name: str, cluster: int, dividend: float, divisor: float) -> None:
        self._add(f"{name}:c:{cluster}:dividend", dividend)
        self._add(f"{name}:c:{cluster}:divisor", divisor)

    def _ratio(self, name: str) -> Ratio:
        return Ratio.of_clusters(
            (
                self.sums.get(f"{name}:c:{cluster}:dividend", 0.0),
                self.sums.get(f"{name}:c:{cluster}:divisor", 0.0),
            )
            for cluster in range(NUM_CLUSTERS)
        )

    def _buckets(self, figure: Figure) -> dict[int, float]:
        """Number of values by bucket."""
        prefix = f"{figure}:b:"
        return {int(name.removeprefix(prefix)): count for name, count in self.sums.items() if name.startswith(prefix)}

    def _num_in_buckets(self, figure: Figure) -> int:
        return round(sum(self._buckets(figure).values()))

    def _index_at(self, figure: Figure, rank: int) -> int:
        """Bucket of the value of this rank; ranks count from 1."""
        buckets = sorted(self._buckets(figure).items())
        seen = 0.0
        for index, count in buckets:
            seen += count
            if seen >= rank:
                return index
        return buckets[-1][0]


def _index_of(value: float) -> int:
    if value <= VALUE_MIN:
        return _INDEX_MIN
    return min(math.ceil(math.log(value) / _LOG_BASE), _INDEX_MAX)


def _edges(index: int) -> tuple[float, float]:
    """Bounds of a bucket's values; the last buckets are open."""
    return math.exp((index - 1) * _LOG_BASE), math.exp(index * _LOG_BASE)


def _middle(index: int) -> float:
    """A value within RELATIVE_ERROR of every value in the bucket."""
    low, high = _edges(index)
    return 2 * low * high / (low + high)
