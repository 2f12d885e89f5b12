"""The state of one sequence in its grammar, over llguidance. Never imports torch.

Invariant: the permitted tokens are a function of the grammar and the committed tokens. Queries about hints go
back to where they began, so no hint, however wrong or hostile, changes the answer of a later query.

Where the grammar forces text, exactly one token may follow: the one the tokenizer itself would produce. So a forced
token is certain, and a draft that proposes it is always accepted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.grammar.compile_queue import on_a_deep_stack
from outrider.grammar.effort import Effort, GrammarTooCostly, GrammarViolation
from outrider.grammar.position import Position

MAX_RESTARTS: Final = 2
"""Times that a sequence is parsed again from its beginning because of hints; then it goes on without them."""


@dataclass(slots=True)
class _SharedLexer:
    """The lexer state that all forks of one compiled grammar share."""

    has_failed: bool = False


class GrammarState:
    """The state of one sequence in its grammar. Not thread-safe: one thread at a time.

    Token ids may be any integers: invalid ones are simply not permitted. Queries raise GrammarViolation when a limit of
    the parser is reached, and when the sequence has had its time (`Effort`).
    """

    def __init__(self, position: Position, start: Callable[[], Position], effort: Effort) -> None:
        self._position = position
        self._start = start
        self._effort = position.effort = effort
        self._committed_token_ids: list[int] = []
        self._is_suspect = False
        self._stays = False  # where the current walk ends
        self._num_restarts = 0
        self._lexer = _SharedLexer()

    @property
    def num_committed(self) -> int:
        return len(self._committed_token_ids)

    @property
    def has_failed(self) -> bool:
        """Whether this position's lexer, which forks share, has reached a limit."""
        return self._lexer.has_failed

    @property
    def affords_hints(self) -> bool:
        """Whether there is time to look further than the next token."""
        return self._effort.affords_hints and self._num_restarts <= MAX_RESTARTS

    @property
    def refusal(self) -> str | None:
        """Why the sequence must end, since its grammar takes more of the batch's time than it may. None: it need
        not."""
        return self._effort.refusal

    def advance(self, token_ids: Sequence[int]) -> None:
        """Appends committed tokens; raises GrammarViolation and leaves the state unchanged when one is not
        permitted."""
        with self._walking(num_paid=len(token_ids)) as walker:
            num_valid = walker.consume_all(token_ids)
            self._stays = num_valid == len(token_ids)
        if num_valid < len(token_ids):
            place = len(self._committed_token_ids) + num_valid
            raise GrammarViolation(f"the grammar does not permit token {token_ids[num_valid]} at position {place}")
        self._committed_token_ids += token_ids

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end of sequence."""
        return self.is_complete_after(())

    def is_complete_after(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens are permitted, and nothing can follow them but the end of sequence."""
        with self._walking() as walker:
            return walker.consume_all(token_ids) == len(token_ids) and walker.is_complete()

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens in a row the grammar permits from here; nothing follows an end."""
        with self._walking(is_for_hints=True) as walker:
            return walker.consume_all(token_ids)

    def masks(self, continuations: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
        """Permitted tokens after each continuation of the current position, [len(continuations), vocab_size]. All False
        after a continuation that is itself not permitted, and after an end of sequence."""
        rows = np.zeros((len(continuations), self._position.vocabulary.vocab_size), dtype=np.bool_)
        with self._walking() as walker:
            path, places = list[int](), [walker.place()]  # place[i]: after path[:i]
            for row, continuation in zip(rows, continuations, strict=True):
                self._effort.is_for_hints = bool(continuation)
                num_shared = sum(1 for _ in takewhile(bool, map(operator.eq, path, continuation)))
                if num_shared < len(path):
                    walker.go_back(places[num_shared])
                    del path[num_shared:], places[num_shared + 1 :]
                for token_id in continuation[num_shared:]:
                    if not walker.consume(token_id):
                        break
                    path.append(token_id)
                    places.append(walker.place())
                if len(path) == len(continuation):
                    row[:] = walker.mask()
        return rows

    def forced_after(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """The tokens, at most `limit`, that must follow the current position extended by `token_ids`; none when that is
        not permitted. The last one may be the lowest end-of-sequence id."""
        forced: list[int] = []
        with self._walking(is_for_hints=True) as walker:
            if walker.consume_all(token_ids) == len(token_ids):
                while (missing := limit - len(forced)) > 0 and (only := walker.only_token_ids(missing)):
                    forced += only
                    if len(only) == missing or walker.consume_all(only) < len(only):
                        break
        return forced

    def fork(self, effort: Effort | None = None) -> GrammarState:
        """Returns an independent copy, of another owner if its effort is given. The two share a lexer until either
        reaches a limit, which both then report once."""
        state = GrammarState(self._position.copy(), self._start, effort or self._effort.sibling())
        state._committed_token_ids = list(self._committed_token_ids)
        state._is_suspect = self._is_suspect
        state._lexer = self._lexer
        return state

    @contextmanager
    def _walking(self, *, num_paid: int = 0, is_for_hints: bool = False) -> Iterator[Position]:
        """The current position to walk on; it goes back afterwards unless it stays. num_paid: tokens that pay for it.

        All sequences of a grammar share one lexer, and an error in it persists. So after one the next walk starts on a
        new lexer: a hint that reached a limit must not end a sequence that would never have gone there.
        """
        if self._is_suspect:
            self._restart()
        self._effort.begin(num_paid, is_for_hints=is_for_hints)
        self._stays = False
        here = self._position.place()
        try:
            try:
                yield self._position
            except GrammarTooCostly:
                self._position.go_back(here)
                raise  # the lexer is as good as before
            if not self._stays:
                self._position.go_back(here)
        except GrammarTooCostly:
            raise
        except GrammarViolation:
            self._is_suspect = self._lexer.has_failed = True
            raise

    def _restart(self) -> None:
        self._num_restarts += 1
        position, compile_s = on_a_deep_stack(self._start)
        self._effort.begin(len(self._committed_token_ids))
        self._effort.add(compile_s)
        position.effort, position.can_go_back = self._effort, self._position.can_go_back
        if position.consume_all(self._committed_token_ids) < len(self._committed_token_ids):
            raise GrammarViolation("the grammar no longer permits what is committed")
        self._position = position
        self._lexer = _SharedLexer()
        self._is_suspect = False
