"""Regular expressions without what a grammar cannot hold. Pure.

A grammar has no assertions about what is before or behind a place, which Python and JavaScript have. Without one a
pattern permits all that it permitted before, and more.
"""

from __future__ import annotations

import re
from typing import Final

_ASSERTIONS: Final = ("(?=", "(?!", "(?<=", "(?<!")
# Escapes, character classes, and the beginnings of groups; an unclosed class takes the rest, so that reading is linear.
_PART: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\(\?(?:<?[=!]|[^()]{0,64}?[:>)])?|.", re.DOTALL)
_QUANTIFIERS: Final = frozenset("*+?{")
# Escapes of letters and digits that Rust's regular expressions share with other languages'.
_SHARED_ESCAPES: Final = frozenset("dDwWsSnrtfvxupPU")
_WORD_BOUNDARIES: Final = ("\\b", "\\B")


def loosened_pattern(pattern: str) -> str | None:
    """Returns the pattern without assertions about its surroundings; the same if it has none.

    None if it has something else that no grammar holds, such as a reference to an earlier group.
    """
    parts = _PART.findall(pattern)
    kept: list[str] = []
    place = 0
    while place < len(parts):
        part = parts[place]
        is_assertion = part in _WORD_BOUNDARIES or part in _ASSERTIONS
        if is_assertion:
            end = place + 1 if part in _WORD_BOUNDARIES else _end_of_group(parts, place)
            if end is None or (end < len(parts) and parts[end] in _QUANTIFIERS):
                return None
            place = end
            continue
        if not _is_held(part):
            return None
        kept.append(part)
        place += 1
    return "".join(kept)


def _end_of_group(parts: list[str], start: int) -> int | None:
    """The place behind the group that begins at `start`."""
    depth = 0
    for place in range(start, len(parts)):
        part = parts[place]
        depth += part.startswith("(") and not part.endswith(")")
        depth -= part == ")"
        if depth == 0:
            return place + 1
    return None


def _is_held(part: str) -> bool:
    if part.startswith("("):  # plain groups, and those without a number, with a name or with flags
        return re.fullmatch(r"\((\?(:|P?<[A-Za-z_]\w*>|[imsux-]+[:)]))?", part) is not None
    escapes = re.findall(r"\\(.)", part, re.DOTALL)
    if part.startswith("[") and (not part.endswith("]") or "[:" in part):
        return False
    return part != "\\" and all(each in _SHARED_ESCAPES or not each.isalnum() for each in escapes)
