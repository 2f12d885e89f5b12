"""Text from elsewhere, such that a terminal or a log shows it and does nothing else. Pure.

A model's output, the name of a model, a server's message or an exception's text may hold escape sequences, with which a
terminal retitles its window, moves the cursor or writes the clipboard (OSC 52), line ends that forge a line of a log,
or signs that reverse what stands beside them. All of these are control characters, and are written out instead.
"""

from __future__ import annotations

import re
from typing import Final

# C0 and DEL, C1 (one character of which, U+009B, begins a sequence like ESC and a bracket), embeddings, overrides and
# isolates of bidirectional text, and unpaired surrogates, which cannot be written at all. The marks U+200E and U+200F
# stay: they occur in ordinary text, and move nothing that is not beside them. In one line the separators of lines and
# paragraphs are escaped, too: no terminal obeys them, but programs that read logs end a line there.
_UNSEEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSEEN_BUT_BLANKS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, *, is_one_line: bool = False) -> str:
    """The text with each control character as \\u and its four digits, which is also how JSON writes it.

    Line feeds and tabs stay, unless the text is to be one line.
    """
    return (_UNSEEN if is_one_line else _UNSEEN_BUT_BLANKS).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
