"""Predicted tokens per second by where the draft runs, and of the same money spent on more target. Pure.

A draft on a device of its own drafts ahead. Where it shares the target's device or all its cores, one of the two runs
at a time, so hints are never free: that is the replay of synchronous drafting. Where speculation does not pay, the
target pauses it: a placement is never predicted below its target alone.

The alternative to a draft is more of the target. For cores it is measured: the target alone on its own cores and the
draft's. For GPUs the draft's price buys a fraction of a further target: `k` times the target's price is `k` replicas,
over which the sequences of a batch spread. A single sequence cannot be spread, so the upper bound is stated, too: `k`
shards of a target whose exchange costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isclose
from typing import Final

from command_line.tune.advice import choose
from command_line.tune.model import Pair, best_ahead, plain_rate, synchronous_rate
from command_line.tune.placement.devices import CORE, GB_PER_S, on_another_gpu
from command_line.tune.times import StepTimes

PER_S: Final = 1e3  # rates are per millisecond


class Sharing(StrEnum):
    """How draft and target run."""

    ALONE = "alone"  # no draft
    APART = "apart"  # at the same time, on devices of their own
    IN_TURNS = "in turns"  # on the same device or cores, one at a time


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of a pair, and the step times of the two models there."""

    name: str
    sharing: Sharing
    pair: Pair
    price: float  # of all devices, relative to each other
    is_equal_cost: bool = False  # the draft's money spent on more target
    num_targets: float = 1.0  # replicas that the sequences of a batch spread over
    has_free_shards: bool = False  # they are shards instead, whose exchange costs nothing: an upper bound
    note: str = ""  # what is assumed rather than measured


@dataclass(frozen=True, slots=True)
class PlacementForecast:
    """Predicted speed of a placement, by batch size."""

    placement: Placement
    tokens_per_s: tuple[float, ...]  # of the whole batch
    num_hints: tuple[int, ...]  # best γ; 0: no speculation


@dataclass(frozen=True, slots=True)
class Placements:
    """Forecasts of all placements for the same batch sizes."""

    batches: tuple[int, ...]
    forecasts: tuple[PlacementForecast, ...]
    why_no_more: str = ""  # why a placement, or the equal-cost alternative, is missing

    def best_draft(self, index: int) -> PlacementForecast | None:
        """The fastest placement of a draft at a batch size."""
        found = [each for each in self.forecasts if each.placement.sharing != Sharing.ALONE]
        return max(found, key=lambda each: each.tokens_per_s[index], default=None)

    def without_draft(self, like: PlacementForecast, index: int, *, is_bound: bool = False) -> PlacementForecast | None:
        """The fastest way to use the target alone at the same cost as `like`; None where none was predicted.

        is_bound: of those that are upper bounds.
        """
        found = [
            each
            for each in self.forecasts
            if each.placement.sharing == Sharing.ALONE
            and each.placement.has_free_shards == is_bound
            and isclose(each.placement.price, like.placement.price)
        ]
        return max(found, key=lambda each: each.tokens_per_s[index], default=None)


def forecast(placement: Placement, batches: Sequence[int], num_hints_max: int) -> PlacementForecast:
    """Predicts a placement at each batch size, with the best γ up to `num_hints_max`."""
    found = [_rate(placement, batch, num_hints_max) for batch in batches]
    return PlacementForecast(placement, tuple(rate for rate, _ in found), tuple(gamma for _, gamma in found))


def _rate(placement: Placement, batch: int, num_hints_max: int) -> tuple[float, int]:
    """Tokens per second of a batch, and the γ that gives them."""
    pair, count = placement.pair, placement.num_targets
    if placement.has_free_shards:
        return PER_S * batch * count * plain_rate(pair, batch), 0
    if placement.sharing == Sharing.ALONE:
        return PER_S * batch * _spread_rate(pair, batch, count), 0
    plain = plain_rate(pair, batch)
    rates = [
        synchronous_rate(pair, batch, gamma)
        if placement.sharing == Sharing.IN_TURNS
        else best_ahead(pair, batch, gamma)[0]
        for gamma in range(1, num_hints_max + 1)
    ]
    chosen = choose([rate / plain for rate in rates])
    return PER_S * batch * (rates[chosen - 1] if chosen else plain), chosen


def _spread_rate(pair: Pair, batch: int, num_targets: float) -> float:
    """Rate of each sequence of a batch that is spread over replicas; a sequence runs on one of them."""
    share = max(1.0, batch / num_targets)
    overhead = pair.overheads
    step_ms = pair.target.at(share) + pair.target.sequence_ms * (share - 1.0)
    return 1.0 / (step_ms + overhead.step_ms + overhead.session_ms * share)


def on_cores(
    pair: Pair, target_on_more: StepTimes | None, num_threads: int, why_not: str = ""
) -> tuple[list[Placement], str]:
    """Placements on a CPU, and why some are missing.

    pair: target on `num_threads` cores, draft on one. target_on_more: the target on one core more, the draft's.
    """
    own, both = _cores(num_threads), _cores(num_threads + 1)
    placements = [
        Placement(f"target alone on {own}", Sharing.ALONE, pair, num_threads),
        Placement(f"target on {own}, draft on another", Sharing.APART, pair, num_threads + 1),
    ]
    if target_on_more is None:
        return placements, why_not
    more = replace(pair, target=target_on_more)
    placements += [
        Placement(f"target on {both}, draft in turns with it", Sharing.IN_TURNS, more, num_threads + 1),
        Placement(f"target alone on {both}", Sharing.ALONE, more, num_threads + 1, is_equal_cost=True),
    ]
    return placements, ""


def _cores(count: int) -> str:
    return f"{count} core{'s'[: count > 1]}"


@dataclass(frozen=True, slots=True)
class GpuProfiles:
    """Profiles from a machine with a GPU: step times of both models on it, and of the draft on the CPU."""

    pair: Pair  # both on the GPU, each alone
    gpu: str | None  # its type, as `GB_PER_S` names it; None: not known
    draft_on_cpu: StepTimes | None = None  # on one core


def on_gpus(profiles: GpuProfiles, draft_gpu: str, prices: dict[str, float]) -> tuple[list[Placement], str]:
    """Placements on a machine with a GPU, each followed by its equal-cost alternative, and why some are missing."""
    pair, gpu = profiles.pair, profiles.gpu
    price = prices[gpu] if gpu is not None else 1.0
    placements = [
        Placement("target alone", Sharing.ALONE, pair, price),
        Placement("draft on the target's GPU, in turns with it", Sharing.IN_TURNS, pair, price),
        *_with_alternative(Placement("draft on a GPU like the target's", Sharing.APART, pair, 2.0 * price), price),
    ]
    missing = []
    if gpu is None:
        missing.append("the type of this GPU is not known, so the draft on a smaller one is not predicted")
    elif draft_gpu != gpu:
        small = replace(pair, draft=on_another_gpu(pair.draft, gpu, draft_gpu))
        note = f"draft steps scaled by bandwidth, {GB_PER_S[gpu]:.0f} to {GB_PER_S[draft_gpu]:.0f} GB/s"
        own = Placement(f"draft on one {draft_gpu}", Sharing.APART, small, price + prices[draft_gpu], note=note)
        placements += _with_alternative(own, price)
    if profiles.draft_on_cpu is None:
        missing.append("the draft was not measured on the CPU")
    else:
        on_cpu = replace(pair, draft=profiles.draft_on_cpu)
        own = Placement("draft on a core of the CPU", Sharing.APART, on_cpu, price + prices[CORE])
        placements += _with_alternative(own, price)
    return placements, "; ".join(missing)


def _with_alternative(placement: Placement, target_price: float) -> list[Placement]:
    """A placement, and what its price buys of targets alone: as replicas, and at most as shards."""
    count = placement.price / target_price
    times = f"{count:.3g} × the target alone"
    alternative = Placement(
        f"{times}, as replicas",
        Sharing.ALONE,
        placement.pair,
        placement.price,
        is_equal_cost=True,
        num_targets=count,
    )
    shards = replace(alternative, name=f"{times}, as shards that exchange for nothing", has_free_shards=True)
    return [placement, alternative, shards]


def predict(placements: tuple[list[Placement], str], batches: Sequence[int], num_hints_max: int) -> Placements:
    """Forecasts of placements, and why some are missing."""
    found, why_no_more = placements
    return Placements(tuple(batches), tuple(forecast(each, batches, num_hints_max) for each in found), why_no_more)
