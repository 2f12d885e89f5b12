"""A position in a grammar: one llguidance matcher that only moves forward.

Invariant: no token id ever puts the matcher into its error state; only a limit of the parser, or a sequence that cannot
continue, makes it fail, as GrammarViolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

MAX_REASON_CHARS: Final = 500


class GrammarViolation(Exception):
    """The sequence cannot continue: the grammar forbids a committed token, or a limit of the parser was reached.

    A failed query about hints leaves the state unchanged; without the hints it may succeed.
    """


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the grammar library reads it."""

    tokenizer: LLTokenizer
    num_usable: int  # ids known to both tokenizer and model: [0, num_usable)
    vocab_size: int
    eos_token_ids: frozenset[int]


class Position:
    """One llguidance matcher that only moves forward, and whether the sequence has ended.

    The end of sequence never reaches the matcher: it would have to be undone, and there may be several ids.
    """

    __slots__ = ("_is_ended", "_known", "_matcher", "vocabulary")

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._is_ended = False
        # The matcher's last answer here; copies share it until they move.
        self._known: dict[str, bytes] = {}

    def copy(self) -> Position:
        position = Position(self.vocabulary, self._matcher.deep_copy())
        position._is_ended = self._is_ended
        position._known = self._known
        return position

    def consume(self, token_id: int) -> bool:
        """Consumes a token if it is permitted; returns whether it was."""
        if self._is_ended:
            return False
        if token_id in self.vocabulary.eos_token_ids:
            self._is_ended = self._is_accepting()
            return self._is_ended
        if not 0 <= token_id < self.vocabulary.num_usable:
            return False  # llguidance would never recover from it
        forced = self._forced_token_ids()
        if forced and forced[0] != token_id:
            return False  # the matcher would accept any other tokenization of the forced text
        is_permitted = self._matcher.try_consume_tokens([int(token_id)]) == 1
        self._known = {}
        self.check()
        return is_permitted

    def consume_all(self, token_ids: Sequence[int]) -> int:
        """Consumes tokens up to the first that is not permitted; returns how many."""
        for index, token_id in enumerate(token_ids):
            if not self.consume(token_id):
                return index
        return len(token_ids)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Permitted tokens, [vocab_size]. Raises GrammarViolation when none is although the sequence has not ended."""
        vocabulary = self.vocabulary
        mask = np.zeros(vocabulary.vocab_size, dtype=np.bool_)
        if self._is_ended:
            return mask
        is_accepting = self._is_accepting()
        if not self._matcher.is_stopped():
            packed = self._known.get("bits")
            if packed is None:
                packed = self._matcher.compute_bitmask()
                self.check()
                self._known["bits"] = packed
            bits = np.frombuffer(packed, dtype=np.uint8)
            mask[: vocabulary.num_usable] = np.unpackbits(bits, count=vocabulary.num_usable, bitorder="little")
        mask[list(vocabulary.eos_token_ids)] = is_accepting
        if not is_accepting and not mask.any():
            raise GrammarViolation("no token of the model can continue the output within the grammar")
        return mask

    def is_complete(self) -> bool:
        """Whether the output may end here."""
        if self._is_ended or self._matcher.is_stopped():
            self.check()
            return True
        if not self._is_accepting():
            return False
        return set(np.flatnonzero(self.mask()).tolist()) <= self.vocabulary.eos_token_ids

    def forced_token_id(self) -> int | None:
        """The only token that may follow; None when there are several or none."""
        if self._is_ended:
            return None
        if self.is_complete():
            return min(self.vocabulary.eos_token_ids, default=None)
        return next(iter(self._forced_token_ids()), None)

    def check(self) -> None:
        """Raises GrammarViolation when the matcher has failed."""
        if self._matcher.is_error():
            # The text after the first marker describes the parser, for its authors.
            reason = self._matcher.get_error().split("\n<", 1)[0]
            if len(reason) > MAX_REASON_CHARS:  # it quotes the grammar in the middle
                half = MAX_REASON_CHARS // 2
                reason = f"{reason[:half]} … {reason[-half:]}"
            raise GrammarViolation(reason)

    def _is_accepting(self) -> bool:
        is_accepting = self._matcher.is_accepting()
        self.check()
        return is_accepting

    def _forced_token_ids(self) -> list[int]:
        token_ids = self._matcher.compute_ff_tokens()
        self.check()
        return token_ids
