"""The tokens before the positions that a forward pass decides. Plain data, and loads without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.grammar import GrammarState

Indices = npt.NDArray[np.int64]
"""Elements of a request's logits [num_rows, vocab_size], as `row * vocab_size + token id`; each occurs once."""
Values = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of a growing text, from some position on, and how often each occurs.

    Every token of the text is read once, however many steps ask: only what was added since the last `read` is new.
    """

    def __init__(self, start: int) -> None:
        self._num_read = start
        self._columns: dict[int, int] = {}  # by token id, in the order of first occurrence
        # Arrays of which the first `len(_columns)` entries count; the rest is room to grow. Counts are whole numbers,
        # which have no rounding error in this type below 2**24.
        self._token_ids: Indices = np.empty(0, dtype=np.int64)
        self._counts: Values = np.empty(0, dtype=np.float32)
        self._largest_id = -1

    def read(self, token_ids: Sequence[int]) -> None:
        """Counts what the text has gained: `token_ids` is all of it, and begins with what was read before."""
        assert self._num_read <= len(token_ids), "a text only grows"
        if self._num_read == len(token_ids):
            return
        added = Counter(token_ids[self._num_read :])
        self._num_read = len(token_ids)
        for token_id in added:
            self._columns.setdefault(token_id, len(self._columns))
        if len(self._columns) > len(self._counts):
            num_more = len(self._columns)  # at least twice as many in all
            self._token_ids = np.concatenate([self._token_ids, np.zeros(num_more, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(num_more, dtype=np.float32)])
        columns = [self._columns[token_id] for token_id in added]
        self._token_ids[columns] = list(added)
        self._counts[columns] += list(added.values())
        self._largest_id = max(self._largest_id, *added)

    def before_rows(self, continuations: Sequence[Sequence[int]], vocab_size: int) -> tuple[Indices, Values]:
        """The tokens below `vocab_size` that occur in the text followed by each continuation, and how often.

        Tokens are elements of logits [len(continuations), vocab_size]: `row * vocab_size + token id`, each once.
        """
        num_distinct = len(self._columns)
        starts = np.arange(len(continuations), dtype=np.int64)[:, None] * vocab_size
        indices = (starts + self._token_ids[:num_distinct]).reshape(-1)
        counts = np.tile(self._counts[:num_distinct], len(continuations))
        new = Counter[int]()
        for row, continuation in enumerate(continuations):
            for token_id in continuation:
                if (column := self._columns.get(token_id)) is not None:
                    counts[row * num_distinct + column] += 1
                elif token_id < vocab_size:
                    new[row * vocab_size + token_id] += 1
        if self._largest_id >= vocab_size:
            is_known = np.tile(self._token_ids[:num_distinct] < vocab_size, len(continuations))
            indices, counts = indices[is_known], counts[is_known]
        if new:
            indices = np.concatenate([indices, np.array(list(new), dtype=np.int64)])
            counts = np.concatenate([counts, np.array(list(new.values()), dtype=np.float32)])
        return indices, counts


@dataclass(frozen=True, slots=True)
class LogitContext:
    """The tokens before each row's position: `token_ids`, then `continuations[row]`."""

    token_ids: Sequence[int]  # committed, prompt first
    num_prompt_tokens: int
    continuations: Sequence[Sequence[int]]  # [num_rows][...]
    end_token_ids: frozenset[int] = frozenset()  # what min_tokens rules out: end of sequence, stop_token_ids
    grammar: GrammarState | None = None  # having read the committed output
    # By the position from which they count: a sequence passes the same ones to each step, so that a step counts what is
    # new. Only steps whose parameters depend on counts fill them.
    counts: dict[int, TokenCounts] = field(default_factory=dict)

    @property
    def positions(self) -> list[int]:
        """Each row's position in the sequence."""
        return [len(self.token_ids) + len(continuation) for continuation in self.continuations]

    def tail(self, row: int, length: int) -> list[int]:
        """The last `length` tokens before a row's position, or as many as there are."""
        continuation = self.continuations[row]
        missing = length - len(continuation)
        before = self.token_ids[-missing:] if missing > 0 else []
        return [*before, *continuation][-length:] if length else []

    def num_output_tokens(self, row: int) -> int:
        """Number of tokens after the prompt, before the token of this row."""
        return len(self.token_ids) - self.num_prompt_tokens + len(self.continuations[row])

    def counted_from(self, start: int) -> TokenCounts:
        """The counts of the committed tokens from position `start` on."""
        counts = self.counts.setdefault(start, TokenCounts(start))
        counts.read(self.token_ids)
        return counts
