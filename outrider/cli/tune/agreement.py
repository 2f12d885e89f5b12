"""How often the draft says what the target says, counted on the target's own greedy texts. Pure.

A text is its ranks: per position, which of the draft's guesses there is the target's token, the draft having read the
target's text up to that position (0: its first guess; `UNRANKED`: none of its first four). A hint is looked at only
when all hints before it in its block were right, and then the draft has read exactly the target's text: so these ranks
hold every hint that can be accepted, for any block length, and walking a text is counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Ranks = Sequence[int]

NUM_RANKED: Final = 4
UNRANKED: Final = NUM_RANKED


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a target step commits with so many hints. Lengths in tokens a step, the target's own one included."""

    num_hints: int  # γ
    num_steps: int  # counted
    mean_length: float  # τ, counted
    iid_length: float  # what independent positions of the same acceptance rate would give
    histogram: tuple[int, ...]  # steps by tokens committed: [0] is of 1 token, [γ] of γ + 1
    text_min: float  # the mean length of the worst text, of those long enough for a step
    text_max: float


def coverage(texts: Sequence[Ranks], num_guesses: int) -> float:
    """Share of tokens that are among the draft's first `num_guesses`; 1 gives the acceptance rate α."""
    num_tokens = sum(map(len, texts))
    return sum(rank < num_guesses for ranks in texts for rank in ranks) / num_tokens if num_tokens else 0.0


def hit_rate_after_miss(texts: Sequence[Ranks], num_guesses: int) -> float:
    """Of the positions where the first guess is wrong, the share that another of the first ones gets right.

    That often a draft which also continued its alternatives has hints ready after a rejection (enumeration).
    """
    missed = [rank for ranks in texts for rank in ranks if rank > 0]
    return sum(rank < num_guesses for rank in missed) / len(missed) if missed else 0.0


def num_agreeing(ranks: Ranks, start: int, num_hints: int) -> int:
    """Accepted of `num_hints` hints for the positions from `start` on."""
    for count, rank in enumerate(ranks[start : start + num_hints]):
        if rank != 0:
            return count
    return min(num_hints, max(len(ranks) - start, 0))


def committed_lengths(ranks: Ranks, num_hints: int) -> list[int]:
    """Tokens that each step commits while one text is generated, `num_hints` hints a step.

    Only steps that could commit `num_hints` + 1 tokens count: the last ones are cut short by the text's end, not by
    the draft.
    """
    lengths, position = [], 0
    while position + num_hints < len(ranks):
        lengths.append(num_agreeing(ranks, position, num_hints) + 1)
        position += lengths[-1]
    return lengths


def iid_length(rate: float, num_hints: int) -> float:
    """(1 − α^(γ+1)) / (1 − α): the mean length were positions independent (Leviathan et al. 2211.17192, eq. 1)."""
    return float(num_hints + 1) if rate >= 1.0 else (1.0 - rate ** (num_hints + 1)) / (1.0 - rate)


def acceptance(texts: Sequence[Ranks], num_hints: int) -> Acceptance | None:
    """Counted over all texts; None when no text is long enough for a single step."""
    by_text = [lengths for ranks in texts if (lengths := committed_lengths(ranks, num_hints))]
    if not by_text:
        return None
    counts = Counter(length for lengths in by_text for length in lengths)
    means = [sum(lengths) / len(lengths) for lengths in by_text]
    num_steps = counts.total()
    return Acceptance(
        num_hints,
        num_steps,
        mean_length=sum(length * count for length, count in counts.items()) / num_steps,
        iid_length=iid_length(coverage(texts, 1), num_hints),
        histogram=tuple(counts[length] for length in range(1, num_hints + 2)),
        text_min=min(means),
        text_max=max(means),
    )


def acceptances(texts: Sequence[Ranks], num_hints_max: int) -> tuple[Acceptance, ...]:
    """For γ = 1 to `num_hints_max`, those that the texts can judge."""
    found = (acceptance(texts, num_hints) for num_hints in range(1, num_hints_max + 1))
    return tuple(each for each in found if each is not None)
