"""Where a client stopped reading, so that another replica can go on from there. Pure.

What a client has seen of a text is a function of how many of its tokens have been shown, whatever steps they came in:
text is decoded and searched for stop strings token by token. So a place in a stream is one number for each text, and a
replica that has never heard of the request says the rest: it makes the same tokens again, as far as the journal does
not have them, and shows those that the client lacks. That the tokens are the same is what greedy decoding and seeds are
for (invariant I2).

As text, which is the id of a server-sent event: the run's fingerprint (`coordinator.run_identity`), a colon, and `12`,
or for several sequences `12.7e.-`: 12 tokens of the first, all 7 of the second with its end, nothing of the third.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from coordinator.run_identity import RunIdentity, parse_fingerprint
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
    """How far a client has come, one point for each sequence of the run. What it has already, from another replica, it
    keeps: its connection may break again before this replica has made all of that again."""

    def __init__(self, points: Sequence[ResumePoint], run: RunIdentity) -> None:
        self._points = list(points)
        self._run = run

    def advance(self, index: int, num_tokens: int, *, has_ended: bool = False) -> None:
        """So many more tokens of a text are shown to it, perhaps none, perhaps with its end."""
        self._points[index] = ResumePoint(self._points[index].num_tokens + num_tokens, True, has_ended)

    def __str__(self) -> str:
        return f"{self._run.fingerprint}:{'.'.join(map(str, self._points))}"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a client says it has of a stream. It is compared with what is known, and proves nothing by itself."""

    request_digest: str  # the two halves of the run's fingerprint
    weights_digest: str
    points: tuple[ResumePoint, ...]  # one for each sequence, at least one of them begun

    @classmethod
    def of(cls, fingerprint: str, points: tuple[ResumePoint, ...], parameter: str) -> Self | None:
        """None for a client that has nothing yet. Raises InvalidRequest, naming the parameter of the fingerprint."""
        if not any(point.has_begun for point in points):
            return None
        halves = parse_fingerprint(fingerprint)
        if halves is None:
            raise InvalidRequest(
                parameter, f"{parameter} must name the run that the stream is of, as its events do"
            )
        return cls(*halves, points)


def parse_position(text: str, num_texts: int, parameter: str) -> Claim | None:
    """None where nothing has been seen. Raises InvalidRequest, naming the parameter it came in, for what is no position
    in this many sequences."""
    fingerprint, _, place = text.rpartition(":")
    parts = place.split(".", num_texts)
    if len(parts) != num_texts or not all(_POINT.fullmatch(part) for part in parts):
        raise InvalidRequest(
            parameter,
            f"{parameter} must be the id of an event of this stream; the request has n = {num_texts}",
        )
    return Claim.of(fingerprint, tuple(map(ResumePoint.parse, parts)), parameter)


@dataclass(frozen=True, slots=True)
class Resumption:
    """What is known of a stream that goes on here."""

    points: tuple[ResumePoint, ...]  # one for each sequence
    token_ids: tuple[
        Sequence[int], ...
    ]  # of each sequence, from its beginning, as far as the journal has them

    @classmethod
    def of_nothing(cls, num_texts: int) -> Self:
        """A stream that begins."""
        return cls((NOTHING_SEEN,) * num_texts, ((),) * num_texts)

    def has_begun(self, index: int) -> bool:
        """Whether a sequence had tokens, by what the journal knows and not by its client's word."""
        return bool(self.token_ids[index])

    def known(self, index: int) -> list[int]:
        """Tokens of a text that need not be made again. What the client lacks is, with all that belongs to it."""
        return list(self.token_ids[index][: self.points[index].num_tokens])
