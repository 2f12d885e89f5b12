"""The tokens before the positions that a forward pass decides. Plain data, and loads without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.grammar import GrammarState


@dataclass(frozen=True, slots=True)
class LogitContext:
    """The tokens before each row's position: `token_ids`, then `continuations[row]`."""

    token_ids: Sequence[int]  # committed, prompt first
    num_prompt_tokens: int
    continuations: Sequence[Sequence[int]]  # [num_rows][...]
    end_token_ids: frozenset[int] = frozenset()  # what min_tokens rules out: end of sequence, stop_token_ids
    grammar: GrammarState | None = None  # having read the committed output

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
