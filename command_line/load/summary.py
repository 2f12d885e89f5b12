"""Figures over requests: percentiles, rates, goodput, medians over rounds. Pure.

TPOT = (E2EL − TTFT) ÷ (output tokens − 1); ITL is the gap between chunks, each of which may contain several tokens. A
failed request counts in `num_failed` and against goodput; its times and tokens are not counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MS_PER_S: Final = 1e3


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request as the client saw it. `sent_s` and `ended_s` are clock times, the rest durations."""

    index: int  # within its turn, from 0
    sent_s: float
    ended_s: float
    ttft_s: float | None = None  # None: no token came
    e2el_s: float | None = None
    itl_s: tuple[float, ...] = ()
    num_output_tokens: int = 0
    is_counted_by_usage: bool = True  # False: chunks were counted
    mean_acceptance_length: float | None = None  # τ, if the server reports it
    num_spec_steps: int | None = None  # number of steps behind τ
    cause: str | None = None  # None: it succeeded
    detail: str = ""
    late_s: float = 0.0  # open loop: delay behind the arrival time

    @property
    def is_ok(self) -> bool:
        """Whether the whole answer arrived."""
        return self.cause is None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens.

        Also None if all output came in one chunk: the client saw no time pass, and a 0 would favour a server that
        does not stream.
        """
        if self.ttft_s is None or self.e2el_s is None or self.num_output_tokens < 2 or not self.itl_s:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a good answer, in milliseconds; None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, result: RequestResult) -> bool:
        """Whether the request succeeded within the limits. A time that does not exist meets its limit."""
        if not result.is_ok:
            return False
        if self.ttft_ms is not None and (result.ttft_s is None or result.ttft_s * MS_PER_S > self.ttft_ms):
            return False
        tpot_s = result.tpot_s
        return self.tpot_ms is None or tpot_s is None or tpot_s * MS_PER_S <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of `num_samples` values, in milliseconds."""

    p50: float
    p90: float
    p99: float
    num_samples: int

    def shown(self, digits: int) -> str:
        return " / ".join(f"{value:.{digits}f}" for value in (self.p50, self.p90, self.p99))


@dataclass(frozen=True, slots=True)
class Failures:
    """Requests with the same cause of failure, and the first one's detail."""

    num_requests: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one server at one level. None if not measured or not asked for."""

    num_ok: int
    num_failed: int
    wall_s: float  # from the first request sent to the last one ended
    num_output_tokens: int
    num_counted_by_chunks: int  # requests with tokens counted by chunks
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2el_ms: Percentiles | None
    goodput_share: float | None  # of all requests, failed ones included
    goodput_requests_per_s: float | None
    mean_acceptance_length: float | None
    failures: Mapping[str, Failures]  # by cause, the most frequent first


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of a figure over rounds."""

    median: float
    min: float
    max: float
    num_rounds: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """Value below which `share` of the sorted values lie, interpolated linearly as in numpy; at least one value."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentiles_ms(values_s: Iterable[float | None]) -> Percentiles | None:
    """Percentiles of the durations that are not None, in ms; None if there are none."""
    ordered = sorted(value * MS_PER_S for value in values_s if value is not None)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, len(ordered))


def wall_s(results: Sequence[RequestResult]) -> float:
    """Seconds from the first request sent to the last one ended."""
    if not results:
        return 0.0
    return max(result.ended_s for result in results) - min(result.sent_s for result in results)


def summarize(rounds: Sequence[Sequence[RequestResult]], slo: Slo) -> Summary:
    """Summarizes one or several rounds of one server at one level. The rounds' wall times add up."""
    results = [result for each in rounds for result in each]
    ok = [result for result in results if result.is_ok]
    wall = sum(map(wall_s, rounds))
    num_tokens = sum(result.num_output_tokens for result in ok)
    num_good = sum(map(slo.is_met, results)) if slo != Slo() else None
    return Summary(
        num_ok=len(ok),
        num_failed=len(results) - len(ok),
        wall_s=wall,
        num_output_tokens=num_tokens,
        num_counted_by_chunks=sum(not result.is_counted_by_usage for result in ok),
        output_tokens_per_s=_per_s(num_tokens, wall),
        requests_per_s=_per_s(len(ok), wall),
        ttft_ms=percentiles_ms(result.ttft_s for result in ok),
        tpot_ms=percentiles_ms(result.tpot_s for result in ok),
        itl_ms=percentiles_ms(gap for result in ok for gap in result.itl_s),
        e2el_ms=percentiles_ms(result.e2el_s for result in ok),
        goodput_share=num_good / len(results) if num_good is not None and results else None,
        goodput_requests_per_s=_per_s(num_good, wall) if num_good is not None else None,
        mean_acceptance_length=_mean_acceptance_length(ok),
        failures=_failures(results),
    )


def _per_s(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _mean_acceptance_length(results: Sequence[RequestResult]) -> float | None:
    """τ weighted by steps, which is 1 + accepted ÷ steps of all requests; equal weights without step counts."""
    known = [
        (result.mean_acceptance_length, result.num_spec_steps or 1)
        for result in results
        if result.mean_acceptance_length is not None
    ]
    return sum(mean * steps for mean, steps in known) / sum(steps for _, steps in known) if known else None


def _failures(results: Iterable[RequestResult]) -> dict[str, Failures]:
    by_cause: dict[str, list[RequestResult]] = {}
    for result in results:
        if result.cause is not None:
            by_cause.setdefault(result.cause, []).append(result)
    ordered = sorted(by_cause.items(), key=lambda item: -len(item[1]))
    return {cause: Failures(len(failed), failed[0].detail) for cause, failed in ordered}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median and extremes of the rounds that have a value; None if none has."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known), len(known)) if known else None


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of ours to theirs, round by round; rounds with a missing or zero value are left out."""
    return [our / their for our, their in zip(ours, theirs, strict=False) if our > 0 and their > 0]
