"""Assigns the text of an output to its tokens. Pure.

Text may lag behind its tokens: it is held back while a stop string is possible, and a character may be several tokens.
A token counts with the text that completes it, however the steps of a sequence are joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence


class TokenText:
    """Splits the text of one sequence at the ends of its tokens, as it arrives."""

    def __init__(self) -> None:
        self._missing: deque[int] = deque()  # characters still to come, of each token whose text is not complete

    def split(self, text: str, pieces: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yields the parts of `text`, each with the number of tokens that it completes: 0 or 1, and more where tokens
        have no text. `pieces` is the text of each new token, whose text may come later."""
        self._missing.extend(map(len, pieces))
        start = 0
        while start < len(text):
            num_tokens = 0
            while self._missing and not self._missing[0]:
                self._missing.popleft()
                num_tokens += 1
            num_left = len(text) - start
            num_chars = min(self._missing[0], num_left) if self._missing else num_left
            if self._missing:
                self._missing[0] -= num_chars
                if not self._missing[0]:
                    self._missing.popleft()
                    num_tokens += 1
            yield text[start : start + num_chars], num_tokens
            start += num_chars
