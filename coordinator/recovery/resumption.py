"""The position at which a client stopped reading, from which another replica goes on. Pure.

The number of shown tokens decides what a client has seen of a sequence, whatever steps they came in: tokens are
detokenized and searched for stop strings one at a time. So a position in a stream is one number per sequence, and a
replica that does not know the request can resume it: it generates the same tokens again, except those in the journal,
and shows the ones that the client lacks. Greedy decoding and seeds make them the same (invariant I2).

Its text form is the id of a server-sent event: the run's fingerprint (`coordinator.intake.run_identity`), a colon, and
`12`, or for several sequences `12.7e.-`: 12 tokens of the first, all 7 of the second with its end, nothing of the
third.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from coordinator.intake.run_identity import RunIdentity, parse_fingerprint
from outrider.errors import InvalidRequest

_POINT: Final = re.compile(r"-|\d{1,9}e?")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position of a client in one sequence."""

    num_tokens: int = 0
    has_begun: bool = False  # including what is shown of the prompt
    has_ended: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the form that `str` writes: the number of tokens, `e` if the sequence has ended, or `-`."""
        if text == "-":
            return cls()
        return cls(int(text.rstrip("e")), True, text.endswith("e"))

    def __str__(self) -> str:
        return f"{self.num_tokens}{'e' if self.has_ended else ''}" if self.has_begun else "-"


NOTHING_SEEN: Final = ResumePoint()


class StreamPosition:
    """A client's position in a run, one point per sequence. It includes output shown by another replica: the connection
    may break again before this replica has generated that anew."""

    def __init__(self, points: Sequence[ResumePoint], run: RunIdentity) -> None:
        self._points = list(points)
        self._run = run

    def advance(self, index: int, num_tokens: int, *, has_ended: bool = False) -> None:
        """Records that `num_tokens` more tokens of a sequence are shown, perhaps none, perhaps with its end."""
        self._points[index] = ResumePoint(self._points[index].num_tokens + num_tokens, True, has_ended)

    def __str__(self) -> str:
        return f"{self._run.fingerprint}:{'.'.join(map(str, self._points))}"


@dataclass(frozen=True, slots=True)
class Claim:
    """The position that a client claims to have. It is compared with what is known, and proves nothing by itself."""

    request_digest: str  # the two halves of the run's fingerprint
    weights_digest: str
    points: tuple[ResumePoint, ...]  # one for each sequence, at least one of them begun

    @classmethod
    def of(cls, fingerprint: str, points: tuple[ResumePoint, ...], parameter: str) -> Self | None:
        """Makes a claim; None for a client that has seen nothing. Raises InvalidRequest, naming the fingerprint's
        parameter."""
        if not any(point.has_begun for point in points):
            return None
        halves = parse_fingerprint(fingerprint)
        if halves is None:
            raise InvalidRequest(parameter, f"{parameter} must name the run of the stream, as its events do")
        return cls(*halves, points)


def parse_position(text: str, num_sequences: int, parameter: str) -> Claim | None:
    """Parses a position; None if nothing has been seen. Raises InvalidRequest, naming its parameter, for text that is
    no position in this many sequences."""
    fingerprint, _, position = text.rpartition(":")
    parts = position.split(".", num_sequences)
    if len(parts) != num_sequences or not all(_POINT.fullmatch(part) for part in parts):
        raise InvalidRequest(
            parameter,
            f"{parameter} must be the id of an event of this stream; the request has n = {num_sequences}",
        )
    return Claim.of(fingerprint, tuple(map(ResumePoint.parse, parts)), parameter)


@dataclass(frozen=True, slots=True)
class Resumption:
    """The known part of a stream that is resumed here."""

    points: tuple[ResumePoint, ...]  # one for each sequence
    token_ids: tuple[Sequence[int], ...]  # of each, from its beginning, as far as the journal has them

    @classmethod
    def of_nothing(cls, num_sequences: int) -> Self:
        """A stream that begins."""
        return cls((NOTHING_SEEN,) * num_sequences, ((),) * num_sequences)

    def has_begun(self, index: int) -> bool:
        """Whether a sequence had tokens, by the journal and not by its client's claim."""
        return bool(self.token_ids[index])

    def known(self, index: int) -> list[int]:
        """Tokens of a sequence that need not be generated again. Those that the client lacks are, with all that belongs
        to them."""
        return list(self.token_ids[index][: self.points[index].num_tokens])
