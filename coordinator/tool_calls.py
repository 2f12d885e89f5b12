"""Calls of functions in a model's text: the grammar that forces well-formed ones, and the parser that finds them.

Pure. A call is written as Hermes and Qwen models learnt it:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

Invariant: whatever the grammar permits, the parser reads; it may meet the text in any pieces and finds the same. A
raw newline cannot stand within JSON's strings, and between its parts the grammar permits none, so "}\\n</tool_call>"
is the end of a call wherever it stands.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
_END: Final = "}\n" + CLOSING
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolMode(enum.Enum):
    """AUTO: text, in which calls may come; REQUIRED: nothing but calls."""

    AUTO = enum.auto()
    REQUIRED = enum.auto()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that may be called in an answer. `parameters` are JSON schemas, None for no arguments."""

    functions: tuple[tuple[str, Mapping[str, Any] | None], ...]  # (name, parameters), at least one
    mode: ToolMode
    is_parallel: bool  # whether an answer may hold several calls


def tool_grammar(use: ToolUse, added_token_ids: Mapping[str, int]) -> str:
    """The grammar of an answer, in llguidance's Lark. `added_token_ids`: the tokenizer's tokens beside its
    vocabulary; where a mark is one of them, models say that token and do not spell it."""
    opening, closing = (
        f"<[{added_token_ids[mark]}]>" if mark in added_token_ids else f'"{mark}"'
        for mark in (OPENING, CLOSING)
    )
    lines = [
        "call: " + " | ".join(f"call_{index}" for index in range(len(use.functions))),
        f'body: "\\n" call "\\n" {closing}',
        f'rest: ("\\n" {opening} body)*' if use.is_parallel else "rest:",
    ]
    if use.mode is ToolMode.REQUIRED:
        lines.append(f"start: {opening} body rest")
    else:
        # A lazy rule ends at the first mark, so that text cannot run over it, spelt or not.
        lines += [
            "start: TEXT | first body rest",
            "first: spelt" + (f" | TEXT {opening}" if OPENING in added_token_ids else ""),
            f'spelt[lazy]: TEXT "{OPENING}"',
            "TEXT: /(.|\\n)*/",
        ]
    for index, (name, parameters) in enumerate(use.functions):
        # The schema stands alone, so that references within it go on meaning its own root.
        schema = json.dumps(_NO_ARGUMENTS if parameters is None else parameters)
        lines.append(f'call_{index}: {_quoted(_header(name))} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {schema}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one call. `name` is set where the call begins; arguments come in pieces, JSON when put together."""

    index: int  # of the call within the answer, from 0
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What some text brought: `content` outside of calls, and news of calls, in order."""

    content: str
    calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser:
    """Splits an answer into content and calls as it arrives.

    White space around calls is nobody's content. What looks like a call and does not become one is content.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._headers = {OPENING + "\n" + _header(name): name for name in names}
        self._held = ""  # may yet become part of a mark
        self._is_in_call = False
        self._num_calls = 0
        self.num_complete_calls = 0

    def push(self, text: str) -> ParsedText:
        """Takes the next piece of the answer."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._read_arguments(calls) if self._is_in_call else self._read_text(content, calls):
            pass
        return ParsedText("".join(content), tuple(calls))

    def finish(self) -> ParsedText:
        """The rest: the answer has ended, if need be within a call."""
        rest, self._held = self._held, ""
        if self._is_in_call:
            return ParsedText("", (ToolCallDelta(self._num_calls - 1, None, rest),) if rest else ())
        return ParsedText("" if self._num_calls and not rest.strip() else rest)

    def _read_text(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """Moves on as far as is certain. True when there is more to read behind that."""
        start = self._held.find(OPENING)
        if start < 0:
            shown = len(self._held) - _held_back_len(self._held, OPENING)
            shown = len(self._held[:shown].rstrip())
            content.append(self._held[:shown])
            self._held = self._held[shown:]
            return False
        before = self._held[:start].rstrip()
        content.append(before)
        self._held = self._held[len(before) :]
        rest = self._held.lstrip()
        for header, name in self._headers.items():
            if rest.startswith(header):
                calls.append(ToolCallDelta(self._num_calls, name, ""))
                self._num_calls += 1
                self._is_in_call, self._held = True, rest[len(header) :]
                return True
        if any(header.startswith(rest) for header in self._headers):
            return False
        end = len(self._held) - len(rest) + len(OPENING)
        content.append(self._held[:end])
        self._held = self._held[end:]
        return True

    def _read_arguments(self, calls: list[ToolCallDelta]) -> bool:
        end = self._held.find(_END)
        shown = end if end >= 0 else len(self._held) - _held_back_len(self._held, _END)
        if shown:
            calls.append(ToolCallDelta(self._num_calls - 1, None, self._held[:shown]))
        if end < 0:
            self._held = self._held[shown:]
            return False
        self._held = self._held[end + len(_END) :]
        self._is_in_call = False
        self.num_complete_calls += 1
        return True


def _header(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _quoted(text: str) -> str:
    """A Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def _held_back_len(text: str, mark: str) -> int:
    """Length of the longest end of the text with which the mark begins."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
