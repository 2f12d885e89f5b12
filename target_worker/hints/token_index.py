"""Index of a token sequence: finds earlier occurrences of its last tokens and what followed them. Pure.

SuffixDecoding (arXiv 2411.04975) and prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) ask for
the longest match of a sequence's end within earlier tokens. Suffix trees answer that exactly at hundreds of bytes and
several dictionaries a token. This index keeps what LZ77 compressors keep (RFC 1951, section 4): one hash map from each
gram of `min_match` tokens to its latest position, and chains of the positions before. A token costs one entry, however
long a match may be, and a lookup walks a bounded part of one chain.
"""

from __future__ import annotations

from collections.abc import Sequence

NOWHERE = -1
SEQUENCE_END = -1
"""Separates sequences of one index. No token id is negative, so no match or continuation crosses it."""

MIN_MATCH = 2
MAX_MATCH = 32
MAX_CANDIDATES = 8
"""Longest part of a chain that is searched. Searching more finds longer matches but no better ones: 4, 16 and 64 gave
the same tokens per step to 0.2 %."""


class TokenIndex:
    """Positions of grams in a growing sequence, which its owner bounds: about 200 bytes a token.

    Among the latest `max_candidates` positions that follow the same `min_match` tokens, the longest match wins, of at
    most `max_match` tokens; among equals the latest.
    """

    def __init__(
        self, *, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH, max_candidates: int = MAX_CANDIDATES
    ) -> None:
        if not 1 <= min_match <= max_match or max_candidates < 1:
            raise ValueError("1 <= min_match <= max_match and 1 <= max_candidates must hold")
        self.min_match, self.max_match, self.max_candidates = min_match, max_match, max_candidates
        self._token_ids: list[int] = []
        # A position is the one after a gram of `min_match` tokens. It is entered once a token stands there,
        # so that every position has something to propose and the end of the sequence does not find itself.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []  # [len(tokens)], the previous position with the same gram

    def __len__(self) -> int:
        """The number of tokens read."""
        return len(self._token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Indexes further tokens, at constant cost per token apart from the dictionary's growth."""
        tokens, latest, earlier, size = self._token_ids, self._latest, self._earlier, self.min_match
        tokens.extend(token_ids)
        earlier.extend([NOWHERE] * (min(len(tokens), size) - len(earlier)))
        first, end = len(earlier), len(tokens)
        grams = zip(*(tokens[first - size + i : end - size + i] for i in range(size)), strict=True)
        for position, gram in enumerate(grams, first):
            earlier.append(latest.get(gram, NOWHERE))
            latest[gram] = position

    def window(self, suffix: Sequence[int] = ()) -> list[int]:
        """The last tokens of the sequence followed by `suffix`, as many as a match may have."""
        rest = self.max_match - len(suffix)
        return [*self._token_ids[-rest:], *suffix] if rest > 0 else list(suffix[-self.max_match :])

    def find(self, window: list[int]) -> tuple[int, int]:
        """Returns (position, match length) for the end of `window`; (NOWHERE, 0) where too few tokens match."""
        size, longest = self.min_match, min(len(window), self.max_match)
        position = self._latest.get(tuple(window[-size:]), NOWHERE) if longest >= size else NOWHERE
        tokens, best, best_len = self._token_ids, NOWHERE, size - 1
        for _ in range(self.max_candidates):
            if position == NOWHERE:
                break
            length = best_len + 1
            # Compare the token that would lengthen the match first: most candidates fail there.
            if (
                length <= position
                and tokens[position - length] == window[-length]
                and tokens[position - length : position] == window[-length:]
                and tokens[position] != SEQUENCE_END  # nothing follows
            ):
                while length < longest and length < position and tokens[position - length - 1] == window[-length - 1]:
                    length += 1
                best, best_len = position, length
                if length == longest:
                    break
            position = self._earlier[position]
        return (best, best_len) if best != NOWHERE else (NOWHERE, 0)

    def following(self, position: int, max_len: int) -> list[int]:
        """The tokens from `position` on, up to the end of their sequence."""
        token_ids = self._token_ids[position : position + max_len]
        return token_ids[: token_ids.index(SEQUENCE_END)] if SEQUENCE_END in token_ids else token_ids

    def continuation(self, suffix: Sequence[int], max_len: int) -> tuple[list[int], int]:
        """Returns (at most `max_len` tokens after the sequence followed by `suffix`, match length).

        A match that reaches the end of the sequence continues with its own proposal, so that a repetition goes on:
        after "abab" comes "abab…", however short the sequence.
        """
        position, match_len = self.find(self.window(suffix))
        if position == NOWHERE or max_len <= 0:
            return [], 0
        token_ids = self.following(position, max_len)
        if len(token_ids) < max_len and position + len(token_ids) == len(self._token_ids):
            period = [*token_ids, *suffix]
            token_ids = (period * -(-max_len // len(period)))[:max_len]
        return token_ids, match_len
