"""An artificial language in which a draft agrees with its target as often as is asked for. Pure.

Every token has one successor, and all tokens but the end token follow each other in one cycle. The target always says
the successor. The draft says it for a share of the tokens, the acceptance rate, which is drawn once: along a greedy
output, whose tokens all differ for a whole cycle, its hints are accepted independently of each other, each with that
probability. For some of the other tokens the successor is the draft's second candidate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

END_TOKEN_ID: Final = 0
NONE: Final = -1
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Language:
    """Candidates for the token after each token.  # int64 [vocab_size] each"""

    successors: Ids  # what the target says
    guesses: Ids  # the draft's first candidate
    seconds: Ids  # its second candidate; NONE: no particular one

    @property
    def acceptance(self) -> float:
        """Share of the tokens after which the draft's first candidate is the target's token."""
        return float((self.guesses == self.successors)[_real(len(self.successors))].mean())

    def walk(self, start: int, num_tokens: int) -> list[int]:
        """The target's greedy output after a prompt that ends in `start`."""
        found: list[int] = []
        for _ in range(num_tokens):
            start = int(self.successors[start])
            found.append(start)
        return found

    def ranks(self, start: int, num_tokens: int) -> tuple[int, ...]:
        """Rank of each token of that output among the draft's candidates, as `outrider tune` counts them."""
        before = [start, *self.walk(start, num_tokens)[:-1]]
        unranked = 4
        return tuple(
            0
            if self.guesses[token] == self.successors[token]
            else 1
            if self.seconds[token] == self.successors[token]
            else unranked
            for token in before
        )


def make_language(vocab_size: int, acceptance: float, second_share: float, seed: int) -> Language:
    """A language with this acceptance rate, to the nearest token.

    second_share: of the tokens after which the first candidate is wrong, the share whose second one is right. Raises
    ValueError for shares outside 0 to 1, and for fewer than four tokens.
    """
    if not (0.0 <= acceptance <= 1.0 and 0.0 <= second_share <= 1.0):
        raise ValueError(f"acceptance {acceptance} and second_share {second_share} must lie between 0 and 1")
    if vocab_size < 4:
        raise ValueError(f"{vocab_size} tokens are too few for a language")
    generator = np.random.default_rng(seed)
    cycle = generator.permutation(_real(vocab_size))
    successors = np.empty(vocab_size, dtype=np.int64)
    successors[cycle] = np.roll(cycle, -1)
    successors[END_TOKEN_ID] = cycle[0]
    guesses, seconds = successors.copy(), np.full(vocab_size, NONE, dtype=np.int64)
    num_wrong = round((1.0 - acceptance) * len(cycle))
    wrong = generator.choice(len(cycle), num_wrong, replace=False)
    # A token further along the cycle than the successor is another one.
    steps = generator.integers(2, len(cycle), num_wrong)
    guesses[cycle[wrong]] = cycle[(wrong + steps) % len(cycle)]
    foreseen = cycle[wrong[: round(second_share * num_wrong)]]
    seconds[foreseen] = successors[foreseen]
    return Language(successors, guesses, seconds)


def _real(vocab_size: int) -> Ids:
    """All tokens but the end token."""
    return np.arange(END_TOKEN_ID + 1, vocab_size)


ACCEPTANCE: Final = 0.8
SECOND_SHARE: Final = 0.5
SEED: Final = 1
VOCAB_SIZES: Final = {False: 128256, True: 1024}


def made_language(*, is_tiny: bool) -> Language:
    """The language of a session."""
    return make_language(VOCAB_SIZES[is_tiny], ACCEPTANCE, SECOND_SHARE, SEED)
