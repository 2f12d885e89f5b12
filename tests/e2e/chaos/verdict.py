"""Comparison of one answer with the output known to be right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

ALIGNMENT_LEN = 6
"""The number of consecutive tokens that make a gap or a repetition, rather than wrong tokens, if they are right
elsewhere."""


@dataclass(frozen=True)
class Right:
    """One of the sequences that an undisturbed system generates for a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_string: str | None


@dataclass
class Choice:
    """One sequence of an answer, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_string: str | None = None
    has_begun: bool = False  # a chunk of it has come, perhaps without a token


@dataclass(frozen=True)
class Incident:
    """Something in between that the client got over by asking again."""

    at_s: float
    is_refusal: bool  # told by the system, with the cause; otherwise a connection broke or nobody took it
    words: str


@dataclass
class Answer:
    """The answer that a client has received, and when. Times are in seconds on the client's monotonic clock."""

    asked_s: float
    choices: list[Choice] = field(default_factory=lambda: [Choice()])
    chunk_times_s: list[float] = field(default_factory=list)
    has_left: bool = False  # the client, on purpose
    incidents: list[Incident] = field(default_factory=list)
    event_id: str = ""  # of the last event, where there are such
    run: str = ""  # over gRPC: the fingerprint that the chunks carried
    error: str | None = None  # why there is no end
    ended_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def is_complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def begin_anew(self) -> None:
        """Forgets what has come: it is asked for once more, from its beginning."""
        self.choices = [Choice() for _ in self.choices]
        self.event_id = self.run = ""

    def as_right(self) -> tuple[Right, ...]:
        """The sequences of this answer as those that others are compared with."""
        return tuple(
            Right(tuple(each.token_ids), each.text, each.finish_reason or "", each.stop_string) for each in self.choices
        )


class Kind(Enum):
    """Kinds of verdicts, from best to worst."""

    RIGHT = "right"
    REFUSED = "refused"  # before the first token
    LOST = "lost"
    REPEATED = "repeated"
    WRONG = "wrong"


SEVERITY = {kind: number for number, kind in enumerate(Kind)}


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    num_tokens: int = 0  # lost, repeated or wrong; at least 1 unless right
    detail: str = ""


def judge(answer: Answer, rights: Sequence[Right]) -> Verdict:
    """The worst verdict on any of the sequences. For a client that left, they have to be beginnings of the right
    ones."""
    verdicts = [_judge_one(choice, right, answer) for choice, right in zip(answer.choices, rights, strict=True)]
    worst = max(range(len(verdicts)), key=lambda index: SEVERITY[verdicts[index].kind])
    kind, detail = verdicts[worst].kind, verdicts[worst].detail
    if kind is not Kind.RIGHT and len(rights) > 1:
        detail = f"text {worst} of {len(rights)}: {detail}"
    return Verdict(kind, sum(each.num_tokens for each in verdicts if each.kind is kind), detail)


def _judge_one(choice: Choice, right: Right, answer: Answer) -> Verdict:
    """Compares token by token, then the text, then how it ended."""
    got, known = choice.token_ids, right.token_ids
    at = common_len(got, known)
    if at < len(got):
        return _diverged(got, known, at)
    if not right.text.startswith(choice.text):
        return Verdict(Kind.WRONG, 1, f"the tokens are right, the text is not: {choice.text[-40:]!r}")
    if answer.has_left:
        return Verdict(Kind.RIGHT)
    missing = max(1, len(known) - len(got))
    if answer.error is not None and choice.finish_reason is None:
        kind = Kind.LOST if answer.num_tokens else Kind.REFUSED
        return Verdict(kind, missing, f"after {len(got)} of {len(known)} tokens: {answer.error}")
    if len(got) < len(known):
        return Verdict(Kind.LOST, missing, f"complete after {len(got)} of {len(known)} tokens")
    if choice.text != right.text:
        return Verdict(Kind.LOST, 1, f"every token came, {len(right.text) - len(choice.text)} characters did not")
    ends = (choice.finish_reason, choice.stop_string), (right.finish_reason, right.stop_string)
    if ends[0] != ends[1]:
        return Verdict(Kind.WRONG, 1, f"ended by {ends[0]}, not by {ends[1]}")
    return Verdict(Kind.RIGHT)


def common_len(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix."""
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
    return Verdict(Kind.WRONG, num_wrong, f"from {where} on: {list(following)} for {list(known[at : at + 6])}")
