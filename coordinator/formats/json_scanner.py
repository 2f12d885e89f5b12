"""Finds the end of a JSON value in text that arrives in pieces. Pure."""

from __future__ import annotations

import string
from typing import Final

_SCALAR: Final = frozenset(string.ascii_letters + string.digits + "+-.")  # numbers, true, false, null


class JsonScanner:
    """Finds the end of one JSON value. It does not check the value: the grammar has."""

    def __init__(self) -> None:
        self._depth = 0  # of open objects and lists
        self._is_in_string = False
        self._is_escaped = False
        self._is_in_scalar = False

    def push(self, text: str) -> int | None:
        """Returns the number of characters of `text` that belong to the value; None while it may go on."""
        for place, character in enumerate(text):
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_in_string = False
                    if not self._depth:
                        return place + 1
            elif self._is_in_scalar and character not in _SCALAR:
                return place
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return place + 1
            elif not self._depth and not character.isspace():
                if character not in _SCALAR:
                    return place  # no JSON
                self._is_in_scalar = True
        return None


class JsonArguments:
    """Reads the arguments of one call in pieces, which are JSON already."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text of the arguments, and the text behind them; None while they may go on."""
        end = self._scanner.push(text)
        return (text, None) if end is None else (text[:end], text[end:])
