"""Where a client stopped reading, so that another replica can go on from there. Pure.

What a client has seen of a text is a function of how many of its tokens have been shown, whatever steps they came in:
text is decoded and searched for stop strings token by token. So a place in a stream is one number for each text, and a
replica that has never heard of the request says the rest: it makes the same tokens again, as far as the journal does
not have them, and shows those that the client lacks. That the tokens are the same is what greedy decoding and seeds are
for (invariant I2).

As text, which is the id of a server-sent event: `12`, or for several texts `12.7e.-`: 12 tokens of the first, all 7
of the second with its end, nothing of the third.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from outrider.errors import InvalidRequest

_POINT: Final = re.compile(r"-|\d{1,9}e?")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Of one text: how much of it the client has."""

    num_tokens: int = 0
    has_begun: bool = False  # what is shown of the prompt included
    has_ended: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        if text == "-":
            return cls()
        return cls(int(text.rstrip("e")), True, text.endswith("e"))

    def __str__(self) -> str:
        return f"{self.num_tokens}{'e' if self.has_ended else ''}" if self.has_begun else "-"


NOTHING_SEEN: Final = ResumePoint()


class StreamPosition:
    """How far a stream has come, one point for each text."""

    def __init__(self, num_texts: int) -> None:
        self._points = [NOTHING_SEEN] * num_texts

    def advance(self, index: int, num_tokens: int, *, has_ended: bool = False) -> None:
        """So many more tokens of a text have been shown, perhaps none, perhaps with its end."""
        self._points[index] = ResumePoint(self._points[index].num_tokens + num_tokens, True, has_ended)

    def __str__(self) -> str:
        return ".".join(map(str, self._points))


def parse_position(text: str, num_texts: int, parameter: str) -> tuple[ResumePoint, ...]:
    """Raises InvalidRequest, naming the parameter it came in, for what is no position in this many texts."""
    parts = text.split(".")
    if len(parts) != num_texts or not all(_POINT.fullmatch(part) for part in parts):
        raise InvalidRequest(
            parameter, f"{parameter} must be the id of an event of this stream, for {num_texts} texts"
        )
    return tuple(map(ResumePoint.parse, parts))


@dataclass(frozen=True, slots=True)
class Resumption:
    """What is known of a stream that goes on here."""

    points: tuple[ResumePoint, ...]  # one for each text
    token_ids: tuple[Sequence[int], ...]  # of each text, from its beginning, as far as the journal has them
    has_begun: bool  # known to have, and not only by its client's word

    @classmethod
    def of_nothing(cls, num_texts: int) -> Self:
        """A stream that begins."""
        return cls((NOTHING_SEEN,) * num_texts, ((),) * num_texts, has_begun=False)

    def known(self, index: int) -> list[int]:
        """Tokens of a text that need not be made again. What the client lacks is, with all that belongs to it."""
        return list(self.token_ids[index][: self.points[index].num_tokens])
