"""Agreement of draft and target, counted on the target's own greedy sequences. Pure.

A sequence is stored as ranks. The rank of a position says which of the draft's candidates is the target's token, when
the draft has read the target's tokens up to there (0: the first; `UNRANKED`: none of the first four). A hint is
verified only if all hints before it in its block were accepted, so the draft has then read exactly the target's
tokens. The ranks therefore determine every accepted hint for any block length, and replaying a sequence is counting.

That does not hold where a hint is guessed without the tokens before it having been read in full: by a draft head, which
goes on from its own output, and by mask tokens. There blocks are drafted from every position, and `DraftedRanks` has
what became of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, overload

Ranks = Sequence[int]

NUM_RANKED: Final = 4
UNRANKED: Final = NUM_RANKED


@dataclass(frozen=True, slots=True)
class DraftedRanks(Sequence[int]):
    """Ranks of a sequence, and the blocks that were really drafted from each of its positions."""

    ranks: tuple[int, ...]  # of the first hint of a block
    accepted: tuple[tuple[int, ...], ...]
    """By position, the accepted hints of a block of 1, 2, ... hints there, as far as the sequence goes."""

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.accepted):
            raise ValueError(f"{len(self.ranks)} ranks, and blocks from {len(self.accepted)} positions")

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.ranks[index]

    def num_agreeing(self, start: int, num_hints: int) -> int:
        """Number of accepted hints of a block of `num_hints` from position `start` on, or of the longest one there."""
        if num_hints <= 0 or start >= len(self.accepted) or not self.accepted[start]:
            return 0
        return self.accepted[start][min(num_hints, len(self.accepted[start])) - 1]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens that a target step commits with a given number of hints, the target's own token included."""

    num_hints: int  # γ
    num_steps: int  # steps counted
    mean_length: float  # τ, counted
    iid_length: float  # τ if positions were independent, at the same acceptance rate
    histogram: tuple[int, ...]  # steps by tokens committed: [0] for 1 token, [γ] for γ + 1
    text_min: float  # τ of the worst sequence that is long enough for a step
    text_max: float


def coverage(texts: Sequence[Ranks], num_guesses: int) -> float:
    """Share of tokens among the draft's first `num_guesses` candidates; 1 gives the acceptance rate α."""
    num_tokens = sum(map(len, texts))
    return sum(rank < num_guesses for ranks in texts for rank in ranks) / num_tokens if num_tokens else 0.0


def hit_rate_after_miss(texts: Sequence[Ranks], num_guesses: int) -> float:
    """Share of positions with a wrong first candidate where one of the first `num_guesses` is right.

    This is how often a draft that also continues its alternatives has hints ready after a rejection (enumeration).
    """
    missed = [rank for ranks in texts for rank in ranks if rank > 0]
    return sum(rank < num_guesses for rank in missed) / len(missed) if missed else 0.0


def num_agreeing(ranks: Ranks, start: int, num_hints: int) -> int:
    """Number of accepted hints, of `num_hints` from position `start` on."""
    if isinstance(ranks, DraftedRanks):
        return ranks.num_agreeing(start, num_hints)
    for count, rank in enumerate(ranks[start : start + num_hints]):
        if rank != 0:
            return count
    return min(num_hints, max(len(ranks) - start, 0))


def committed_lengths(ranks: Ranks, num_hints: int) -> list[int]:
    """Tokens that each step commits while one sequence is generated, with `num_hints` hints a step.

    Only steps that could commit `num_hints` + 1 tokens count: the last ones are cut short by the sequence's end.
    """
    lengths, position = [], 0
    while position + num_hints < len(ranks):
        lengths.append(num_agreeing(ranks, position, num_hints) + 1)
        position += lengths[-1]
    return lengths


def iid_length(rate: float, num_hints: int) -> float:
    """(1 − α^(γ+1)) / (1 − α): the mean length if positions were independent (Leviathan et al. 2211.17192, eq. 1)."""
    return float(num_hints + 1) if rate >= 1.0 else (1.0 - rate ** (num_hints + 1)) / (1.0 - rate)


def acceptance(texts: Sequence[Ranks], num_hints: int) -> Acceptance | None:
    """Acceptance counted over all sequences; None if none is long enough for a step."""
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
    """Acceptance for γ = 1 to `num_hints_max`, as far as the sequences can judge it."""
    found = (acceptance(texts, num_hints) for num_hints in range(1, num_hints_max + 1))
    return tuple(each for each in found if each is not None)
