"""Recommended settings, derived from the model's predictions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Final

from command_line.tune.model import (
    HintPace,
    Pair,
    best_ahead,
    bound_rate,
    plain_rate,
    synchronous_rate,
)

MIN_GAIN: Final = 1.03
"""Smallest speed-up that is worth a draft worker. Repeated measurements on one machine differ by as much."""
INDIFFERENCE: Final = 0.02
"""Share by which two rates may differ and still count as equal. The shorter block then wins: it costs other sessions
less."""
ENOUGH: Final = 0.95
"""Share of its speed with a draft worker of its own that a session keeps when it shares one."""
OVERHEAD_FACTOR: Final = 1.5
"""Factor by which this machine's overheads may differ from the stated ones, up or down."""
NOISE: Final = 0.1
"""Share by which the speed-up differs between two runs on a shared machine. No range is narrower."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice for one batch size. Speed-ups are over plain decoding of the same batch, with one draft worker for all
    of it."""

    batch: int
    plain_tokens_per_s: float  # of the whole batch
    num_speculative_tokens: int  # recommended γ; 0: do not speculate
    speedup: float  # predicted with γ; 1 without speculation
    speedup_low: float
    speedup_high: float
    num_waited: int  # best number of hints to wait for
    synchronous: float  # speed-up with its own best γ, at least 1
    dedicated: float  # speed-up ahead if every session had its own draft worker, at its best γ
    bound: float  # speed-up if hints were free, at its best γ
    sessions_per_draft: int  # most sessions per draft worker that keep 95 % of their speed; 0: none
    by_num_hints: tuple[float, ...]  # speed-up ahead for γ = 1, 2, ...

    @property
    def targets_per_draft(self) -> int:
        """Target workers at this batch size that one draft worker can serve; 0 if it cannot serve one."""
        return self.sessions_per_draft // self.batch

    @property
    def drafts_per_target(self) -> int:
        """Draft workers that a target worker at this batch size needs; 0 if speculation does not pay."""
        return -(-self.batch // self.sessions_per_draft) if self.sessions_per_draft else 0


def usable_num_hints(pair: Pair, num_hints_max: int) -> int:
    """Longest block that can be judged: the longest sequence must contain one block and its last token."""
    return max(0, min(num_hints_max, max(map(len, pair.texts), default=0) - 1))


def advise(pair: Pair, batch: int, num_hints_max: int) -> Advice:
    """Recommends a block length for a batch. Raises ValueError if no sequence can judge even one hint."""
    num_hints_max = usable_num_hints(pair, num_hints_max)
    if num_hints_max < 1:
        raise ValueError("the outputs are too short to judge a single hint")
    plain = plain_rate(pair, batch)
    sizes = range(1, num_hints_max + 1)
    found = [best_ahead(pair, batch, num_hints) for num_hints in sizes]
    speedups = tuple(rate / plain for rate, _ in found)
    chosen = choose(speedups)
    low, high = _range(pair, batch, chosen, speedups[chosen - 1]) if chosen else (1.0, 1.0)
    return Advice(
        batch=batch,
        plain_tokens_per_s=1e3 * batch * plain,
        num_speculative_tokens=chosen,
        speedup=speedups[chosen - 1] if chosen else 1.0,
        speedup_low=low,
        speedup_high=high,
        num_waited=found[chosen - 1][1] if chosen else 0,
        synchronous=max(synchronous_rate(pair, batch, num_hints) for num_hints in sizes) / plain,
        dedicated=max(best_ahead(pair, batch, num_hints, 1)[0] for num_hints in sizes) / plain,
        bound=max(1.0, *(bound_rate(pair, batch, num_hints) / plain for num_hints in sizes)),
        sessions_per_draft=sessions_per_draft(pair, batch, chosen) if chosen else 0,
        by_num_hints=speedups,
    )


def choose(speedups: Sequence[float]) -> int:
    """γ from the speed-ups of γ = 1, 2, ...: the smallest that equals the best, 0 if none is worth it."""
    best = max(speedups, default=0.0)
    if best < MIN_GAIN:
        return 0
    return next(i for i, each in enumerate(speedups, 1) if each >= best * (1.0 - INDIFFERENCE))


def _speedup(pair: Pair, batch: int, num_hints: int) -> float:
    return best_ahead(pair, batch, num_hints)[0] / plain_rate(pair, batch)


def _range(pair: Pair, batch: int, num_hints: int, speedup: float) -> tuple[float, float]:
    """Lowest and highest likely speed-up. It covers the overheads, the choice of prompts (two standard errors) and
    noise."""
    scaled = [
        _speedup(replace(pair, overheads=pair.overheads.scaled(factor)), batch, num_hints)
        for factor in (OVERHEAD_FACTOR, 1.0 / OVERHEAD_FACTOR)
    ]
    by_text = [
        _speedup(replace(pair, texts=(ranks,)), batch, num_hints) for ranks in pair.texts if len(ranks) > num_hints
    ]
    # One sequence says nothing about others: assume an error of 50 % of its gain.
    error = stdev(by_text) / len(by_text) ** 0.5 if len(by_text) > 1 else 0.25 * abs(fmean(by_text) - 1.0)
    low = min(*scaled, speedup) - 2.0 * error
    high = max(*scaled, speedup) + 2.0 * error
    return max(0.0, min(low, (1.0 - NOISE) * speedup)), max(high, (1.0 + NOISE) * speedup)


SESSIONS_PER_DRAFT_MAX: Final = 1024


def sessions_per_draft(pair: Pair, batch: int, num_hints: int) -> int:
    """Most sessions at this batch size that one draft worker serves with `ENOUGH` of their speed.

    Two limits apply: a session's own pace, from the replay, and throughput, γ + 1 tokens for every session per target
    step. Bisection finds the number, since more sessions never make a draft worker faster.
    """
    alone = best_ahead(pair, batch, num_hints, 1)[0]
    step_ms = pair.target_step_ms(batch, num_hints, has_hints=True)

    def is_enough(num_sessions: int) -> bool:
        hints_per_step = step_ms / HintPace.of(pair, num_sessions).gap_ms  # per session
        if num_sessions > 1 and hints_per_step < num_hints + 1:
            return False
        return best_ahead(pair, batch, num_hints, num_sessions)[0] >= ENOUGH * alone

    low, high = 1, SESSIONS_PER_DRAFT_MAX
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_enough(middle) else (low, middle - 1)
    return low
