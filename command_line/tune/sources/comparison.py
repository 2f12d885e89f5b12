"""Everything that a comparison of sources found, and which source is best. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line.tune.advice import NOISE, Advice
from command_line.tune.agreement import Acceptance
from command_line.tune.findings import ModelProfile, Settings
from command_line.tune.sources.forecasts import Forecast, Place, Source
from command_line.tune.times import Overheads

_PLACES = list(Place)


@dataclass(frozen=True, slots=True)
class Judged:
    """A source with its acceptance and its forecasts, by increasing batch size."""

    source: Source
    acceptance: tuple[Acceptance, ...]  # for γ = 1, 2, ...
    forecasts: tuple[Forecast, ...]

    @property
    def pays(self) -> bool:
        """Whether it is worth it at any batch size."""
        return any(each.num_speculative_tokens for each in self.forecasts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements, and the advice."""

    target: Path
    settings: Settings
    machine: str  # hardware, for people
    target_profile: ModelProfile
    overheads: Overheads
    judged: tuple[Judged, ...]  # the fastest at the smallest batch first
    advice: tuple[Advice, ...]  # for the best source, where it pays and runs on a draft worker
    num_texts: int
    num_tokens: int  # of all texts
    num_prompts: int  # asked for

    @property
    def best(self) -> Judged | None:
        """The recommended source: the best at the smallest batch, or where none pays there, at the largest."""
        return best_at(self.judged, 0) or best_at(self.judged, -1)


def ranked(judged: Sequence[Judged]) -> tuple[Judged, ...]:
    """Sources by speed-up at the smallest batch, then at the largest; what does not pay by what it would give."""

    def key(each: Judged) -> tuple[float, float, float]:
        first, last = each.forecasts[0], each.forecasts[-1]
        return first.speedup, last.speedup, first.highest

    return tuple(sorted(judged, key=key, reverse=True))


def best_at(judged: Sequence[Judged], index: int) -> Judged | None:
    """The best source at one batch size, None if none pays. Of those that differ from it by no more than two runs of
    one measurement do, the one that needs least."""
    paying = [each for each in judged if each.forecasts[index].num_speculative_tokens]
    highest = max((each.forecasts[index].speedup for each in paying), default=0.0)
    equal = [each for each in paying if each.forecasts[index].speedup >= highest * (1.0 - NOISE)]
    return min(equal, key=lambda each: _cost(each, index), default=None)


def _cost(each: Judged, index: int) -> tuple[int, int, float]:
    source = each.source
    return _PLACES.index(source.place), source.num_masks or 0, -each.forecasts[index].speedup
