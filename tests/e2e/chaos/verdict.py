"""What became of one answer, against the text known to be right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

ALIGNMENT_LEN = 6
"""So many tokens in a row that are right somewhere else make a gap or a repetition, rather than wrong tokens."""


@dataclass(frozen=True)
class Right:
    """What an undisturbed system says to a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_string: str | None


@dataclass
class Answer:
    """What a client has seen, and when. Times are in seconds on the client's monotonic clock."""

    asked_s: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    chunk_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None
    has_left: bool = False  # the client, on purpose
    num_reconnects: int = 0  # after which the rest came from another replica
    event_id: str = ""  # of the last event, where there are such
    run: str = ""  # over gRPC: the fingerprint that the chunks carried
    error: str | None = None  # why there is no end
    ended_s: float = 0.0


class Kind(Enum):
    RIGHT = "right"
    LOST = "lost"
    REPEATED = "repeated"
    WRONG = "wrong"
    REFUSED = "refused"  # before the first token


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    num_tokens: int = 0  # lost, repeated or wrong; at least 1 unless right
    detail: str = ""


def judge(answer: Answer, right: Right) -> Verdict:
    """Compares token by token, then the text, then how it ended. A client that left has to have seen a beginning."""
    got, known = answer.token_ids, right.token_ids
    at = common_len(got, known)
    if at < len(got):
        return _diverged(got, known, at)
    if not right.text.startswith(answer.text):
        return Verdict(Kind.WRONG, 1, f"the tokens are right, the text is not: {answer.text[-40:]!r}")
    if answer.has_left:
        return Verdict(Kind.RIGHT)
    missing = max(1, len(known) - len(got))
    if answer.error is not None:
        kind = Kind.LOST if got else Kind.REFUSED
        return Verdict(kind, missing, f"after {len(got)} of {len(known)} tokens: {answer.error}")
    if len(got) < len(known):
        return Verdict(Kind.LOST, missing, f"complete after {len(got)} of {len(known)} tokens")
    if answer.text != right.text:
        return Verdict(
            Kind.LOST, 1, f"every token came, {len(right.text) - len(answer.text)} characters did not"
        )
    ends = (answer.finish_reason, answer.stop_string), (right.finish_reason, right.stop_string)
    if ends[0] != ends[1]:
        return Verdict(Kind.WRONG, 1, f"ended by {ends[0]}, not by {ends[1]}")
    return Verdict(Kind.RIGHT)


def common_len(left: Sequence[int], right: Sequence[int]) -> int:
    """Of the longest common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _diverged(got: Sequence[int], known: Sequence[int], at: int) -> Verdict:
    """From `at` on it is not what it should be: shifted by a repetition or a gap, or just wrong."""
    where = f"token {at} of {len(known)}"
    following = tuple(got[at : at + ALIGNMENT_LEN])
    for shift in range(1, len(known)):
        if at >= shift and following == tuple(known[at - shift : at - shift + len(following)]):
            return Verdict(Kind.REPEATED, shift, f"at {where} it goes back by {shift}")
        if following == tuple(known[at + shift : at + shift + len(following)]):
            return Verdict(Kind.LOST, shift, f"at {where} it leaves out {shift}")
    if at >= len(known):
        return Verdict(Kind.WRONG, len(got) - at, f"{len(got) - at} tokens beyond the end")
    num_wrong = sum(one != other for one, other in zip(got[at:], known[at:], strict=False))
    return Verdict(
        Kind.WRONG, num_wrong, f"from {where} on: {list(following)} for {list(known[at : at + 6])}"
    )
