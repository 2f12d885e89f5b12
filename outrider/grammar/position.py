"""A position in a grammar: one llguidance matcher, which moves forward, and back to where it was.

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

from outrider.grammar.effort import Effort, GrammarTooCostly, GrammarViolation, forced_text_refusal

MAX_REASON_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the grammar library reads it."""

    tokenizer: LLTokenizer
    num_usable: int  # ids known to both tokenizer and model: [0, num_usable)
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class _Answers:
    """The matcher's answers at one position. Copies of it share them until they move."""

    bits: bytes | None = None  # the matcher's mask
    forced: Sequence[int] | None = None  # forced text's tokens, from where it began
    num_passed: int = 0  # of these; the others must follow

    def after_one(self) -> _Answers:
        """Returns what is known after the next token."""
        if self.forced is None or self.num_passed + 1 >= len(self.forced):
            return _Answers()
        return _Answers(forced=self.forced, num_passed=self.num_passed + 1)


@dataclass(frozen=True, slots=True)
class Place:
    """A place to which a position can move back."""

    num_consumed: int
    is_ended: bool
    answers: _Answers
    matcher: LLMatcher | None  # as it was there, of a grammar that cannot be taken back


class Position:
    """One llguidance matcher, and whether the sequence has ended.

    The end of sequence never reaches the matcher: it would have to be undone, and there may be several ids.

    Forced text is tokenized once, where it begins: the matcher would tokenize the rest of it again at each of its
    tokens, in time proportional to the square of its length.
    """

    __slots__ = ("_answers", "_is_ended", "_matcher", "_num_consumed", "can_go_back", "effort", "vocabulary")

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, effort: Effort | None = None) -> None:
        """`effort`: None where no batch waits, so that there is no limit."""
        self.vocabulary = vocabulary
        self.effort = effort
        # Whether the matcher can take tokens back: else it is copied instead, in time proportional to the text.
        self.can_go_back = False
        self._matcher = matcher
        self._num_consumed = 0
        self._is_ended = False
        self._answers = _Answers()

    def copy(self) -> Position:
        position = Position(self.vocabulary, self._matcher.deep_copy(), self.effort)
        position.can_go_back = self.can_go_back
        position._num_consumed = self._num_consumed
        position._is_ended = self._is_ended
        position._answers = self._answers
        return position

    def place(self) -> Place:
        matcher = None if self.can_go_back else self._matcher.deep_copy()
        return Place(self._num_consumed, self._is_ended, self._answers, matcher)

    def go_back(self, place: Place) -> None:
        """Moves back to an earlier place of this position. Raises GrammarViolation if the matcher has failed since."""
        num_taken_back = self._num_consumed - place.num_consumed
        if place.matcher is not None:
            self._matcher = place.matcher.deep_copy() if num_taken_back else self._matcher
        elif num_taken_back:
            self._matcher.rollback(num_taken_back)
        self._num_consumed, self._is_ended, self._answers = place.num_consumed, place.is_ended, place.answers
        self._check_matcher()

    def learn_to_go_back(self) -> None:
        """Finds out whether the matcher can take tokens back. Raises GrammarViolation if no first token works: the
        parser checks its limits when a token is read."""
        permitted = set(self.mask().nonzero()[0].tolist()) - self.vocabulary.eos_token_ids
        first = min(permitted, default=None)
        if first is not None:
            ahead = self.copy()
            self.can_go_back = ahead.consume(first) and ahead._matcher.rollback(1)

    def consume(self, token_id: int) -> bool:
        """Consumes a token if it is permitted; returns whether it was."""
        if self._is_ended:
            return False
        if token_id in self.vocabulary.eos_token_ids:
            self._is_ended = self._is_accepting()
            return self._is_ended
        if not 0 <= token_id < self.vocabulary.num_usable:
            return False  # llguidance would never recover from it
        forced = self.forced_token_ids(1)
        if forced and forced[0] != token_id:
            return False  # the matcher would accept any other tokenization of the forced text
        is_permitted = self._matcher.try_consume_tokens([int(token_id)]) == 1
        self._num_consumed += is_permitted
        self.check()
        if is_permitted:
            self._answers = self._answers.after_one()
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
            if forced := self.forced_token_ids(1):
                mask[[token_id for token_id in forced if token_id < vocabulary.num_usable]] = True
            else:
                bits = np.frombuffer(self._bits(), dtype=np.uint8)
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

    def only_token_ids(self, limit: int) -> Sequence[int]:
        """The next tokens, at most `limit`, as far as each is known to be the only one that may follow; empty when
        several may, or none. Behind them there may be more."""
        if self._is_ended:
            return ()
        if self.is_complete():
            end = min(self.vocabulary.eos_token_ids, default=None)
            return () if end is None else (end,)
        return self.forced_token_ids(limit)

    def forced_token_ids(self, limit: int) -> Sequence[int]:
        """The next tokens of text without a choice, at most `limit`, as the tokenizer splits it."""
        answers = self._answers
        if answers.forced is None:
            num_bytes = len(self._matcher.compute_ff_bytes())
            self.check()
            if refusal := forced_text_refusal(num_bytes):
                raise GrammarTooCostly(refusal) if self.effort is None else self.effort.refuse(refusal)
            answers.forced = self._matcher.compute_ff_tokens() if num_bytes else ()
            self.check()
        return answers.forced[answers.num_passed : answers.num_passed + limit]

    def check(self) -> None:
        """Must follow a call of the matcher. Raises GrammarViolation when it has failed, and GrammarTooCostly when the
        sequence has had its time."""
        self._check_matcher()
        if self.effort is not None:
            self.effort.count()

    def _check_matcher(self) -> None:
        if self._matcher.is_error():
            # The text after the first marker describes the parser, for its authors.
            reason = self._matcher.get_error().split("\n<", 1)[0]
            if len(reason) > MAX_REASON_CHARS:  # it quotes the grammar in the middle
                half = MAX_REASON_CHARS // 2
                reason = f"{reason[:half]} … {reason[-half:]}"
            raise GrammarViolation(reason)

    def _bits(self) -> bytes:
        if self._answers.bits is None:
            bits = self._matcher.compute_bitmask()
            self.check()
            self._answers.bits = bits
        return self._answers.bits

    def _is_accepting(self) -> bool:
        is_accepting = self._matcher.is_accepting()
        self.check()
        return is_accepting
