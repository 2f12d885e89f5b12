"""Incremental detokenization: whole characters only, up to a stop string.

Two pure pieces. `IncrementalDetokenizer` never emits half a character, wherever tokens split it. `StopStringMatcher`
never emits text that turns out to belong to a stop string. Both give the same text for the same tokens, however the
tokens were grouped into steps, which keeps text independent of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"
# A character spans at most four byte tokens; a longer run that still ends in U+FFFD will not become one.
_PENDING_TOKENS_MAX: Final = 8
# A run of tokens without text (special ones, skipped) must not make every later decode longer.
_WINDOW_TOKENS_MAX: Final = 32
# Enough of the prompt for a decoder to see whether the first generated word follows a space; more where these tokens
# begin within a character.
_CONTEXT_TOKENS: Final = 6
_CONTEXT_TOKENS_MAX: Final = 32
# Tokens at the end of a prompt that may be the beginning of a character.
_UNFINISHED_TOKENS_MAX: Final = 3


class Decoder(Protocol):
    """The part of a tokenizer that the detokenizer needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Decodes a growing sequence; `push` costs two decodes of a few tokens, whatever the length so far.

    `_token_ids[:_read]` has been emitted. A decoder may treat its first token specially (dropping a leading space, for
    example), so each decode starts at `_prefix`, a little before, and only the difference is emitted.
    """

    def __init__(
        self, decoder: Decoder, *, context_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._prefix = 0
        start, self._read = self._readable_part(context_token_ids)
        self._token_ids = list(context_token_ids[start:])
        self._read -= start
        # The prompt's text for these tokens, until more than that is emitted.
        prompt, readable = self._decode(self._token_ids), self._decode(self._token_ids[: self._read])
        self._shown_before: str | None = prompt.rstrip(_REPLACEMENT) if prompt.startswith(readable) else readable

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; empty while a character is unfinished."""
        self._token_ids.append(token_id)
        text = self._pending_text()
        is_incomplete = text.endswith(_REPLACEMENT)
        if is_incomplete and len(self._token_ids) - self._read < _PENDING_TOKENS_MAX:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Returns the rest at the end of the sequence; an unfinished character becomes U+FFFD."""
        return self._show(self._pending_text())

    def _readable_part(self, context: Sequence[int]) -> tuple[int, int]:
        """The part of a prompt's end that reads as whole characters; what follows begins another one."""
        num_tokens = len(context)
        ends = range(num_tokens, max(num_tokens - _UNFINISHED_TOKENS_MAX, 0) - 1, -1)
        first = max(num_tokens - _CONTEXT_TOKENS, 0)
        for end in ends:
            for start in range(min(first, end), max(num_tokens - _CONTEXT_TOKENS_MAX, 0) - 1, -1):
                if _REPLACEMENT not in self._decode(context[start:end]):
                    return start, end
        # The prompt itself contains something unreadable.
        for end in ends:
            if not self._decode(context[first:end]).endswith(_REPLACEMENT):
                return first, end
        return first, num_tokens

    def _pending_text(self) -> str:
        shown = self._shown_before
        if shown is None:
            shown = self._decode(self._token_ids[self._prefix : self._read])
        text = self._decode(self._token_ids[self._prefix :])
        if text.startswith(shown):
            return text[len(shown) :]
        # A vocabulary that spells bytes makes a whole run of them unreadable when the last one is: what has been
        # emitted of the run was readable all the same.
        return self._decode(self._token_ids[self._read :])

    def _show(self, text: str) -> str:
        if text or len(self._token_ids) - self._prefix > _WINDOW_TOKENS_MAX:
            self._prefix = self._read
            self._shown_before = None
        self._read = len(self._token_ids)
        # Drop what no later decode reads.
        del self._token_ids[: self._prefix]
        self._read -= self._prefix
        self._prefix = 0
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStringMatcher:
    """Truncates text at the first stop string and holds back what may yet become one.

    "First" means the one whose last character comes first, the longest of those: the only rule that does not depend on
    how the text was split into pieces.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """`stop` holds non-empty strings; an empty sequence matches nothing and holds nothing back."""
        assert all(stop), "an empty stop string would end every text"
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that may be emitted now. After a match, `matched` is set and everything else is dropped."""
        if self.matched is not None or not self._stop:
            return text if self.matched is None else ""
        self._held += text
        match = self._first_match()
        if match is not None:
            start, self.matched = match
            end = start + len(self.matched) if self._include else start
            shown, self._held = self._held[:end], ""
            return shown
        keep = self._held_back_len()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def flush(self) -> str:
        """Returns the text held back, when the sequence ended without a match."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _held_back_len(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
