"""A block as a draft with mask tokens drafts it. Pure.

A pass feeds the tokens that were guessed last and masks behind them. The row of a token says what follows it, so it
confirms or replaces the guess of a mask there; what stood behind a replaced guess is dropped. The rows of the masks
guess one token more each. The draft worker does the same (docs/concepts/speculation.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def num_leading(guesses: Sequence[int], actual: Sequence[int]) -> int:
    """Number of guesses that are right before the first wrong one."""
    for count, (guess, token_id) in enumerate(zip(guesses, actual, strict=False)):
        if guess != token_id:
            return count
    return min(len(guesses), len(actual))


def accepted_by_length(num_accepted: int, num_hints: int) -> tuple[int, ...]:
    """Accepted hints of a block of 1 to `num_hints` tokens, where `num_accepted` of the longest one are."""
    return tuple(min(num_accepted, count) for count in range(1, num_hints + 1))


@dataclass(slots=True)
class MaskPath:
    """One block while it grows, beside the tokens of the target that it is to guess."""

    actual: Sequence[int]  # tokens that the block is judged by; it is complete when it is as long
    token_ids: list[int] = field(default_factory=list)
    num_read: int = 0  # of token_ids, fed and not replaced since
    num_passes: int = 0
    accepted: list[int] = field(default_factory=list)  # by length, when the block first was so long
    passes: list[int] = field(default_factory=list)  # by length, passes until then

    @property
    def unread(self) -> list[int]:
        """Tokens to feed in the next pass, in front of the masks; none in the first one."""
        return self.token_ids[self.num_read :]

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) == len(self.actual)

    def take(self, guesses: Sequence[int], num_masks: int) -> None:
        """Takes the guesses of a pass: those of the rows of its tokens, then those of its masks.

        In the first pass the only row of a token is that of the last committed one.
        """
        first = self.num_read + 1 if self.num_passes else 0
        self.num_passes += 1
        num_own, known = len(guesses) - num_masks, len(self.token_ids)
        for index, guess in enumerate(guesses[:num_own], first):
            if index == known or self.token_ids[index] != guess:
                self.token_ids[index:], self.num_read = [guess], index
                if index == known:
                    self.token_ids += guesses[num_own:]
                break
        self._note()

    def _note(self) -> None:
        num_right = num_leading(self.token_ids, self.actual)
        for length in range(len(self.accepted) + 1, min(len(self.token_ids), len(self.actual)) + 1):
            self.accepted.append(min(num_right, length))
            self.passes.append(self.num_passes)


def mean_passes(blocks: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Mean passes until a block is 1, 2, ... tokens long, over the blocks that became so long; never falling."""
    means: list[float] = []
    for length in range(1, max(map(len, blocks), default=0) + 1):
        counts = [passes[length - 1] for passes in blocks if len(passes) >= length]
        means.append(max(sum(counts) / len(counts), *means[-1:]) if means else sum(counts) / len(counts))
    return tuple(means)
