"""Predicted speed-ups of one source of hints, by batch and block length. Pure.

A source on a draft worker drafts while the target verifies (`model.best_ahead`). A head beside the target's model runs
in series with the steps, as `target_worker.scheduling.head_turns` has it: a pass over what was committed since its last
turn, then one for each further hint. Lookup takes no time, and offers hints only where it has found a match.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from command_line.draft_kinds import Kind
from command_line.tune.advice import choose, usable_num_hints
from command_line.tune.agreement import num_agreeing
from command_line.tune.findings import ModelProfile
from command_line.tune.model import Pair, best_ahead, mean_length, plain_rate
from command_line.tune.sources.offers import Offer


class Place(StrEnum):
    """The process in which a source runs, from the one that needs least."""

    TARGET = "target alone"
    BESIDE = "beside the target"
    DRAFT_WORKER = "draft worker"


@dataclass(frozen=True, slots=True)
class Source:
    """A source of hints and what was measured of it."""

    offer: Offer
    place: Place
    pair: Pair  # its times stand for the draft's; lookup has none, and the target's stand there
    profile: ModelProfile | None = None  # None for lookup
    num_masks: int | None = None  # None: it reads none
    num_hints_max: int | None = None  # longest block that it can draft; None: any
    num_offered: tuple[tuple[int, ...], ...] = ()  # lookup's, by text and position

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.num_masks is None:
            return self.offer.name
        return f"{self.offer.name}, {self.num_masks} mask{'' if self.num_masks == 1 else 's'}"

    @property
    def num_tokens(self) -> int:
        """Tokens that it was compared with."""
        return sum(map(len, self.pair.texts))

    def usable_num_hints(self, num_hints_max: int) -> int:
        """Longest block that it can draft and the sequences can judge."""
        own = num_hints_max if self.num_hints_max is None else min(num_hints_max, self.num_hints_max)
        return usable_num_hints(self.pair, own)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Speed-ups of a source over plain decoding of the same batch."""

    batch: int
    by_num_hints: tuple[float, ...]  # for γ = 1, 2, ...
    num_speculative_tokens: int  # recommended γ; 0: it does not pay

    @property
    def speedup(self) -> float:
        """With the recommended γ; 1 without speculation."""
        return self.by_num_hints[self.num_speculative_tokens - 1] if self.num_speculative_tokens else 1.0

    @property
    def highest(self) -> float:
        """The best there is, though it may not be worth it."""
        return max(self.by_num_hints, default=1.0)


def forecast(source: Source, batch: int, num_hints_max: int) -> Forecast:
    """Predicts a source at one batch size, for blocks of up to `num_hints_max` hints."""
    plain = plain_rate(source.pair, batch)
    sizes = range(1, source.usable_num_hints(num_hints_max) + 1)
    speedups = tuple(rate(source, batch, num_hints) / plain for num_hints in sizes)
    return Forecast(batch, speedups, choose(speedups))


def rate(source: Source, batch: int, num_hints: int) -> float:
    """Tokens per millisecond and session with at most `num_hints` hints a step."""
    match source.place:
        case Place.DRAFT_WORKER:
            return best_ahead(source.pair, batch, num_hints)[0]
        case Place.BESIDE:
            return series_rate(source.pair, batch, num_hints, reads_all=source.offer.kind is not Kind.MEDUSA)
        case Place.TARGET:
            return free_rate(source, batch, num_hints)


def series_rate(pair: Pair, batch: int, num_hints: int, *, reads_all: bool) -> float:
    """Rate with a head whose passes and the target's steps follow one another.

    reads_all: whether its first pass has a row for every committed token, and not for the last one alone.
    """
    length = mean_length(pair.texts, num_hints)
    num_passes = pair.passes[min(num_hints, len(pair.passes)) - 1] if pair.passes else float(num_hints)
    first_ms = pair.draft.at(batch * length if reads_all else batch, batch)
    head_ms = first_ms + (num_passes - 1.0) * pair.draft.at(batch, batch)
    return length / (pair.target_step_ms(batch, num_hints, has_hints=False) + head_ms)


def free_rate(source: Source, batch: int, num_hints: int) -> float:
    """Rate with hints that cost no time but that of verifying them, where there are any."""
    pair, num_tokens, total_ms = source.pair, 0, 0.0
    costs = [pair.target_step_ms(batch, count, has_hints=False) for count in range(num_hints + 1)]
    for ranks, offered in zip(pair.texts, source.num_offered, strict=True):
        position = 0
        while position + num_hints < len(ranks):
            count = min(offered[position], num_hints)
            position += num_agreeing(ranks, position, count) + 1
            total_ms += costs[count]
        num_tokens += position
    return num_tokens / total_ms if total_ms else 0.0
