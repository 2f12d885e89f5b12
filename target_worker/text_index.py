"""Where the last tokens of a text stood before, and what came after them there. Pure.

SuffixDecoding (arXiv 2411.04975) and prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) ask
for the longest match of a text's end within earlier text. Suffix trees answer that exactly at hundreds of bytes and
several dictionaries a token. This keeps what LZ77 compressors keep (RFC 1951, section 4): one hash map from each
gram of `min_match` tokens to the latest place where it stood, and chains of the places before that. A token costs one
entry, however long a match may be, and looking one up walks a bounded part of one chain.
"""

from __future__ import annotations

from collections.abc import Sequence

NOWHERE = -1
TEXT_END = -1
"""Stands between texts of one index. No token id is negative, so that no match or continuation gets past it."""

MIN_MATCH = 2
MAX_MATCH = 32
MAX_CANDIDATES = 8
"""Longer chains found longer matches, and no better ones: 4, 16 and 64 gave the same tokens per step to 0.2 %."""


class TextIndex:
    """Where tokens stood in a growing text, which its owner bounds: some 200 bytes a token.

    Of the latest `max_candidates` places in the text that follow the same `min_match` tokens, the one with the
    longest match is found, `max_match` tokens at most, and among equals the latest.
    """

    def __init__(
        self, *, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH, max_candidates: int = MAX_CANDIDATES
    ) -> None:
        if not 1 <= min_match <= max_match or max_candidates < 1:
            raise ValueError("1 <= min_match <= max_match and 1 <= max_candidates must hold")
        self.min_match, self.max_match, self.max_candidates = min_match, max_match, max_candidates
        self._text: list[int] = []
        # A place is the position after a gram of `min_match` tokens. It is known once a token stands there, so that
        # every place has something to propose and the end of the text does not find itself.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []  # [len(text)], for each place the one before it with the same gram

    def __len__(self) -> int:
        """Tokens read."""
        return len(self._text)

    def append(self, token_ids: Sequence[int]) -> None:
        """Reads on; costs the same for every token, the growth of a dictionary apart."""
        text, latest, earlier, size = self._text, self._latest, self._earlier, self.min_match
        text.extend(token_ids)
        earlier.extend([NOWHERE] * (min(len(text), size) - len(earlier)))
        first, end = len(earlier), len(text)
        grams = zip(*(text[first - size + i : end - size + i] for i in range(size)), strict=True)
        for place, gram in enumerate(grams, first):
            earlier.append(latest.get(gram, NOWHERE))
            latest[gram] = place

    def window(self, said: Sequence[int] = ()) -> list[int]:
        """The last tokens of the text with `said` after it, as many as a match may have."""
        rest = self.max_match - len(said)
        return [*self._text[-rest:], *said] if rest > 0 else list(said[-self.max_match :])

    def find(self, window: list[int]) -> tuple[int, int]:
        """(place, match length) of the last tokens of `window`; (NOWHERE, 0) where too few of them match."""
        size, longest = self.min_match, min(len(window), self.max_match)
        place = self._latest.get(tuple(window[-size:]), NOWHERE) if longest >= size else NOWHERE
        text, best, best_len = self._text, NOWHERE, size - 1
        for _ in range(self.max_candidates):
            if place == NOWHERE:
                break
            length = best_len + 1
            # The token that would make it longer first: most candidates end there.
            if (
                length <= place
                and text[place - length] == window[-length]
                and text[place - length : place] == window[-length:]
                and text[place] != TEXT_END  # nothing was said after it
            ):
                while length < longest and length < place and text[place - length - 1] == window[-length - 1]:
                    length += 1
                best, best_len = place, length
                if length == longest:
                    break
            place = self._earlier[place]
        return (best, best_len) if best != NOWHERE else (NOWHERE, 0)

    def following(self, place: int, max_len: int) -> list[int]:
        """What stands at `place` and after, up to the end of its text."""
        token_ids = self._text[place : place + max_len]
        return token_ids[: token_ids.index(TEXT_END)] if TEXT_END in token_ids else token_ids

    def continuation(self, said: Sequence[int], max_len: int) -> tuple[list[int], int]:
        """(at most `max_len` tokens after the text with `said` after it, match length).

        A match that runs into the end of the text goes on with what it proposes itself, so that text that repeats
        itself goes on repeating itself: after "abab" comes "abab…", however short the text.
        """
        place, match_len = self.find(self.window(said))
        if place == NOWHERE or max_len <= 0:
            return [], 0
        token_ids = self.following(place, max_len)
        if len(token_ids) < max_len and place + len(token_ids) == len(self._text):
            period = [*token_ids, *said]
            token_ids = (period * -(-max_len // len(period)))[:max_len]
        return token_ids, match_len
