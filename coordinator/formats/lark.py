"""Writes grammars in llguidance's Lark. Pure.

llguidance reads the longest lexeme, and does not go back. So free text that competes with a mark is written such that
it ends where the mark becomes certain, and a mark that may follow free text is part of a lazy lexeme.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from outrider.sampling_params import GrammarKind, GrammarSpec

ANY_TEXT: Final = "(.|\\n)*"
LINE_FEEDS: Final = "\\n{1,2}"


class LarkWriter:
    """Collects the rules of one grammar."""

    def __init__(self, marks: Sequence[str], added_token_ids: Mapping[str, int]) -> None:
        """`marks` of the format that are added tokens are generated as those tokens, not spelt."""
        self._token_ids = {mark: added_token_ids[mark] for mark in marks if mark in added_token_ids}
        # The longest first, where one mark begins with another.
        ordered = sorted(self._token_ids, key=len, reverse=True)
        self._border = re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None
        self._rules: dict[str, str] = {}
        self.any_whitespace = False

    def rule(self, name: str, body: str) -> str:
        """Adds a rule or a terminal; returns its name."""
        self._rules[name] = body
        return name

    def literal(self, text: str) -> str:
        """Writes fixed text, whose marks are tokens where the tokenizer has them; empty for no text."""
        return " ".join(self._parts(text))

    def literal_after_line_feeds(self, name: str, text: str) -> str:
        """Writes fixed text that up to two line feeds may precede, within its first lexeme."""
        first, *others = self._parts(text)
        if first.startswith("<"):
            first = f"{self.rule('LINE_FEEDS', '/' + LINE_FEEDS + '/')}? {first}"
        else:
            first = self.rule(name.upper(), f"/({LINE_FEEDS})?/ {first}")
        return " ".join([first, *others])

    def _parts(self, text: str) -> list[str]:
        parts = self._border.split(text) if self._border else [text]
        return [f"<[{self._token_ids[part]}]>" if part in self._token_ids else quoted(part) for part in parts if part]

    def text(self, name: str, forbidden: Iterable[str] = ()) -> str:
        """Adds the terminal of free text that, after line feeds, begins with none of `forbidden`."""
        prefixes = list(forbidden)
        pattern = f"\\n*({_not_starting([*prefixes, chr(10)])})?" if prefixes else ANY_TEXT
        return self.rule(name.upper(), f"/{pattern}/")

    def until(self, name: str, text: str, mark: str) -> str:
        """Adds the rule of free text up to the first `mark`, that included; `text` is a terminal."""
        # A lazy rule ends at the first mark, so that the text cannot contain one, spelt or not.
        spelt = f"{name}_spelt"
        self.rule(f"{spelt}[lazy]", f"{text} {quoted(mark)}")
        is_token = mark in self._token_ids
        return self.rule(name, f"{spelt} | {text} {self.literal(mark)}" if is_token else spelt)

    def structure(self, name: str, spec: GrammarSpec) -> str:
        """Adds a grammar of the client as one rule."""
        self.any_whitespace |= spec.any_whitespace
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                return self.rule(name, f"%json {spec.text}")
            case GrammarKind.REGEX:
                # As a grammar of its own, like the client's Lark: names and flags do not meet ours.
                return self.rule(name, f"%lark {{\nstart: /{_slashed(spec.text)}/\n}}")
            case GrammarKind.LARK:
                return self.rule(name, f"%lark {{\n{spec.text}\n}}")

    def grammar(self) -> GrammarSpec:
        """Returns the grammar of the rules so far, of which `start` is one."""
        text = "".join(f"{name}: {body}\n" for name, body in self._rules.items())
        return GrammarSpec(GrammarKind.LARK, text, self.any_whitespace)


def quoted(text: str) -> str:
    """Quotes a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def without_possible_mark(text: str, mark: str) -> str:
    """Removes the longest end of the text with which the mark may begin."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return text[:-length]
    return text


def _not_starting(prefixes: Sequence[str]) -> str:
    """A regular expression of all texts with at least one character that begin with none of the prefixes."""
    rests: dict[str, list[str]] = {}
    for prefix in prefixes:
        rests.setdefault(prefix[0], []).append(prefix[1:])
    options = [f"[^{''.join(map(_escaped, rests))}]{ANY_TEXT}"]
    options += [
        f"{_escaped(character)}({_not_starting(others)})?" for character, others in rests.items() if "" not in others
    ]
    return "|".join(options)


def _escaped(character: str) -> str:
    return "\\n" if character == "\n" else "\\/" if character == "/" else re.escape(character)


def _slashed(pattern: str) -> str:
    """Escapes the slashes of a regular expression that are not yet."""
    return re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
