"""The parts of an answer: what a request permits in it, and the pieces that a parser finds. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from outrider.sampling_params import GrammarSpec


class ToolMode(enum.Enum):
    """Whether an answer is text that may contain calls (AUTO), or only calls (REQUIRED)."""

    AUTO = enum.auto()
    REQUIRED = enum.auto()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an answer may call. `parameters` are JSON schemas; None: no arguments."""

    functions: tuple[tuple[str, Mapping[str, Any] | None], ...]  # (name, parameters), at least one
    mode: ToolMode
    is_parallel: bool  # whether an answer may have several calls
    strict: frozenset[str] = frozenset()  # names of those whose schema must be followed as a whole

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.functions)


class ReasoningStart(enum.Enum):
    """Position at which the reasoning of an answer begins, which depends on the end of the prompt."""

    ABSENT = enum.auto()  # the model does not reason, or the prompt has closed the reasoning
    POSSIBLE = enum.auto()  # the answer may open it
    OPEN = enum.auto()  # the prompt has opened it


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Rules that an answer follows."""

    tools: ToolUse | None = None
    structure: GrammarSpec | None = None  # form of the content; calls may stand instead of it
    reasoning: ReasoningStart = ReasoningStart.ABSENT


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call. `name` is set at the start of the call; the pieces of `arguments` form JSON."""

    index: int  # of the call within the answer, from 0
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """The parts of a piece of output, in the order in which models write them. `calls` has one delta per index."""

    content: str
    calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""

    def __add__(self, other: ParsedText) -> ParsedText:
        return ParsedText.joined([self, other])

    @classmethod
    def joined(cls, parts: Sequence[ParsedText]) -> Self:
        """Joins parts that follow each other."""
        return cls(
            "".join(part.content for part in parts),
            merged_calls(tuple(call for part in parts for call in part.calls)),
            "".join(part.reasoning for part in parts),
        )


NOTHING = ParsedText("")


class AnswerParser(Protocol):
    """Splits an answer into reasoning, content and calls as it arrives."""

    @property
    def num_complete_calls(self) -> int: ...
    def push(self, text: str) -> ParsedText:
        """Parses the next piece of the answer."""
        ...

    def finish(self) -> ParsedText:
        """Returns the rest when the answer has ended, possibly within a part."""
        ...


def merged_calls(deltas: tuple[ToolCallDelta, ...]) -> tuple[ToolCallDelta, ...]:
    """Joins deltas of one call that follow each other, since some clients read one delta per chunk and call."""
    merged: list[ToolCallDelta] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index:
            last = merged.pop()
            delta = ToolCallDelta(last.index, last.name, last.arguments + delta.arguments)
        merged.append(delta)
    return tuple(merged)
