"""Finds tool calls in a model's output. Pure."""

from __future__ import annotations

import enum

from coordinator.formats.answer_parts import NOTHING, ParsedText, ToolCallDelta, ToolUse, merged_calls
from coordinator.formats.call_syntax import CallSyntax
from coordinator.formats.json_scanner import JsonArguments
from coordinator.formats.lark import without_possible_mark
from coordinator.formats.xml_arguments import XmlArguments


class _State(enum.Enum):
    START = enum.auto()  # calls stand here or nowhere
    TEXT = enum.auto()  # calls may follow
    ARGUMENTS = enum.auto()
    CLOSING = enum.auto()  # behind the arguments
    BETWEEN = enum.auto()  # behind a call
    CONTENT = enum.auto()  # no calls follow


class CallParser:
    """Splits an answer into content and calls as it arrives.

    White space around calls is dropped. Text that only resembles a call is content.
    """

    def __init__(self, syntax: CallSyntax, use: ToolUse, *, calls_begin_answer: bool = False) -> None:
        """`calls_begin_answer`: content is not searched for calls, even if the format permits calls behind content."""
        self._syntax = syntax
        self._parameters = dict(use.functions)
        self._first = {header: name for name in use.names for header in syntax.first_headers(name)}
        self._next = {syntax.separator + syntax.next_header(name): name for name in use.names}
        self._state = _State.START if calls_begin_answer or not syntax.trigger else _State.TEXT
        self._held = ""  # may still become part of a mark
        self._arguments: JsonArguments | XmlArguments = JsonArguments()  # of the last call
        self._num_calls = 0
        self._num_complete_calls = 0

    @property
    def num_complete_calls(self) -> int:
        return self._num_complete_calls

    def push(self, text: str) -> ParsedText:
        """Parses the next piece of the answer."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._step(content, calls):
            pass
        return ParsedText("".join(content), merged_calls(tuple(calls)))

    def finish(self) -> ParsedText:
        """Returns the rest when the answer has ended, possibly within a call."""
        rest, self._held = self._held, ""
        if self._state in (_State.CLOSING, _State.BETWEEN) or (self._num_calls and not rest.strip()):
            return NOTHING  # only marks and white space
        return ParsedText(rest)

    def _step(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """Reads the held text as far as it is unambiguous. True if there is more to read after it."""
        match self._state:
            case _State.START:
                return self._read_start(calls)
            case _State.TEXT:
                return self._read_text(content, calls)
            case _State.ARGUMENTS:
                return self._read_arguments(calls)
            case _State.CLOSING:
                return self._read_closing()
            case _State.BETWEEN:
                return self._read_between(calls)
            case _State.CONTENT:
                content.append(self._held)
                self._held = ""
                return False

    def _read_start(self, calls: list[ToolCallDelta]) -> bool:
        lead = self._held.lstrip("\n")
        if self._begin_call(lead, self._first, calls):
            return True
        if any(header.startswith(lead) for header in self._first):
            return False
        self._state = _State.CONTENT
        return True

    def _read_text(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        trigger = self._syntax.trigger
        start = self._held.find(trigger) if trigger else -1
        if start < 0:
            shown = len(without_possible_mark(self._held, trigger).rstrip())
            content.append(self._held[:shown])
            self._held = self._held[shown:]
            return False
        before = self._held[:start].rstrip()
        content.append(before)
        rest = self._held[start:]
        if self._begin_call(rest, self._first, calls):
            return True
        self._held = self._held[len(before) :]
        if any(header.startswith(rest) for header in self._first):
            return False
        end = len(self._held) - len(rest) + len(trigger)
        content.append(self._held[:end])
        self._held = self._held[end:]
        return True

    def _read_arguments(self, calls: list[ToolCallDelta]) -> bool:
        shown, rest = self._arguments.push(self._held)
        if shown:
            calls.append(ToolCallDelta(self._num_calls - 1, None, shown))
        self._held = rest or ""
        if rest is not None:
            self._state = _State.CLOSING
        return rest is not None

    def _read_closing(self) -> bool:
        closing = self._syntax.closing
        if self._held.startswith(closing):
            self._held = self._held.removeprefix(closing)
            self._state = _State.BETWEEN
            self._num_complete_calls += 1
            return True
        if closing.startswith(self._held):
            return False
        self._state = _State.TEXT  # no call that the grammar permits
        return True

    def _read_between(self, calls: list[ToolCallDelta]) -> bool:
        if self._begin_call(self._held, self._next, calls):
            return True
        ending = self._syntax.ending
        if ending and self._held.startswith(ending):
            self._held = self._held.removeprefix(ending)
        elif any(each.startswith(self._held) for each in (*self._next, ending)):
            return False
        self._state = _State.TEXT
        return True

    def _begin_call(self, text: str, headers: dict[str, str], calls: list[ToolCallDelta]) -> bool:
        """Begins a call if the text begins with a header."""
        for header, name in headers.items():
            if text.startswith(header):
                calls.append(ToolCallDelta(self._num_calls, name, ""))
                self._num_calls += 1
                self._state, self._held = _State.ARGUMENTS, text[len(header) :]
                self._arguments = XmlArguments(self._parameters[name]) if self._syntax.is_xml else JsonArguments()
                return True
        return False
