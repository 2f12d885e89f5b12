"""The format of gpt-oss, "harmony": messages in channels for the reasoning, the content and the calls. Pure.

After the prompt's `<|start|>assistant` an answer is a sequence of messages

    <|channel|>analysis<|message|>…<|end|><|start|>assistant
    <|channel|>commentary<|message|>…<|end|><|start|>assistant         content before a call
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS
    <|channel|>final<|message|>…

of which the last one ends with the token <|call|> or <|return|>, which ends the sequence, so an answer has at most one
call. The recipient may also stand before the channel.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.formats.answer_parts import AnswerRules, ParsedText, ToolCallDelta, ToolMode, merged_calls
from coordinator.formats.call_grammar import arguments_schema
from coordinator.formats.json_scanner import JsonArguments
from coordinator.formats.lark import LarkWriter, without_possible_mark
from outrider.sampling_params import GrammarSpec

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CONSTRAIN: Final = "<|constrain|>"
MARKS: Final = (START, CHANNEL, MESSAGE, END, CONSTRAIN)
_RECIPIENT: Final = " to="
_FUNCTIONS: Final = "functions."
_HEADER_BEGINNINGS: Final = (START, CHANNEL, _RECIPIENT)
_HEADER_CHARS_MAX: Final = 256  # a longer one is content


def harmony_grammar(rules: AnswerRules, added_token_ids: Mapping[str, int]) -> GrammarSpec | None:
    """Builds the grammar of an answer; None if any text is permitted."""
    if rules.tools is None and rules.structure is None:
        return None
    lark = LarkWriter(MARKS, added_token_ids)
    text = lark.text("text")
    message = lark.rule("message", lark.until("message_text", text, END))
    last = []
    if rules.structure is not None and (rules.tools is None or rules.tools.mode is ToolMode.AUTO):
        last.append(f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} {lark.structure('structure', rules.structure)}")
    elif rules.tools is not None and rules.tools.mode is ToolMode.AUTO:
        last.append(f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} ({text} | {message})")
    functions = rules.tools.functions if rules.tools is not None else ()
    constrain = f"{lark.literal(CONSTRAIN)}? {lark.literal('json' + MESSAGE)}"
    for index, (name, parameters) in enumerate(functions):
        to = f"{_RECIPIENT}{_FUNCTIONS}{name}"
        arguments = lark.rule(f"arguments_{index}", f"%json {json.dumps(arguments_schema(parameters))}")
        for header in (f"{CHANNEL}commentary{to} ", f"{to}{CHANNEL}commentary "):
            last.append(f"{lark.literal(header)} {constrain} {arguments}")
    others = [f"{lark.literal(f'{CHANNEL}{channel}{MESSAGE}')} {message}" for channel in ("analysis", "commentary")]
    lark.rule("other", f"({' | '.join(others)}) {lark.literal(f'{START}assistant')}")
    lark.rule("start", f"other* ({' | '.join(last)})")
    return lark.grammar()


class _State(enum.Enum):
    HEADER = enum.auto()
    REASONING = enum.auto()
    CONTENT = enum.auto()
    ARGUMENTS = enum.auto()
    UNMARKED = enum.auto()  # no message: the rest is content


class HarmonyParser:
    """Splits an answer into reasoning, content and calls as it arrives. Messages of one kind are joined by a line feed.

    Messages to anything but the functions, such as tools that gpt-oss knows from its training, are reasoning.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._state = _State.HEADER
        self._held = ""  # may still become part of a mark
        self._arguments = JsonArguments()
        self._num_calls = 0
        self._num_complete_calls = 0
        self._shown: set[_State] = set()  # kinds of parts that have text
        self._separator = ""  # before the next text of the message

    @property
    def num_complete_calls(self) -> int:
        return self._num_complete_calls

    def push(self, text: str) -> ParsedText:
        """Parses the next piece of the answer."""
        self._held += text
        parts: dict[_State, list[str]] = {_State.REASONING: [], _State.CONTENT: []}
        calls: list[ToolCallDelta] = []
        while self._step(parts, calls):
            pass
        return ParsedText("".join(parts[_State.CONTENT]), merged_calls(tuple(calls)), "".join(parts[_State.REASONING]))

    def finish(self) -> ParsedText:
        """Returns the rest when the answer has ended, possibly within a message."""
        rest, self._held = self._held, ""
        if not rest:
            return ParsedText("")
        match self._state:
            case _State.REASONING:
                return ParsedText("", reasoning=self._separator + rest)
            case _State.CONTENT:
                return ParsedText(self._separator + rest)
            case _:  # a header that was cut off is nothing to show
                return ParsedText("" if rest.startswith(_HEADER_BEGINNINGS) else rest)

    def _step(self, parts: dict[_State, list[str]], calls: list[ToolCallDelta]) -> bool:
        """Reads the held text as far as it is unambiguous. True if there is more to read after it."""
        match self._state:
            case _State.HEADER:
                return self._read_header(calls)
            case _State.REASONING | _State.CONTENT:
                return self._read_message(parts[self._state])
            case _State.ARGUMENTS:
                return self._read_arguments(calls)
            case _State.UNMARKED:
                parts[_State.CONTENT].append(self._held)
                self._held = ""
                return False

    def _read_header(self, calls: list[ToolCallDelta]) -> bool:
        held = self._held
        end = held.find(MESSAGE, 0, _HEADER_CHARS_MAX)
        is_header = any(held.startswith(each) or each.startswith(held) for each in _HEADER_BEGINNINGS)
        if not is_header or (end < 0 and len(held) >= _HEADER_CHARS_MAX):
            self._state = _State.UNMARKED
            return True
        if end < 0:
            return False
        header, self._held = held[:end], held[end + len(MESSAGE) :]
        channel = re.search(re.escape(CHANNEL) + r"(\w+)", header)
        recipient = re.search(re.escape(_RECIPIENT) + r"([^\s<]+)", header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        if name in self._names:
            calls.append(ToolCallDelta(self._num_calls, name, ""))
            self._num_calls += 1
            self._state, self._arguments = _State.ARGUMENTS, JsonArguments()
            return True
        is_reasoning = recipient is not None or (channel is not None and channel[1] == "analysis")
        self._state = _State.REASONING if is_reasoning else _State.CONTENT
        self._separator = "\n" if self._state in self._shown else ""
        return True

    def _read_message(self, part: list[str]) -> bool:
        end = self._held.find(END)
        shown = self._held[:end] if end >= 0 else without_possible_mark(self._held, END)
        if shown:
            part.append(self._separator + shown)
            self._separator = ""
            self._shown.add(self._state)
        self._held = self._held[len(shown) :]
        if end < 0:
            return False
        self._held = self._held.removeprefix(END)
        self._state = _State.HEADER
        return True

    def _read_arguments(self, calls: list[ToolCallDelta]) -> bool:
        shown, rest = self._arguments.push(self._held)
        if shown:
            calls.append(ToolCallDelta(self._num_calls - 1, None, shown))
        self._held = rest or ""
        if rest is not None:
            self._state = _State.HEADER
            self._num_complete_calls += 1
        return rest is not None
