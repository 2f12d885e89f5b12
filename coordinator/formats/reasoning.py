"""Reasoning between two marks, before the answer: the formats, and the parser that takes it off. Pure.

A template may open the reasoning at the end of the prompt, or close it there so that the model does not reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.formats.answer_parts import NOTHING, AnswerParser, ParsedText, ReasoningStart
from coordinator.formats.lark import without_possible_mark
from coordinator.formats.names import ReasoningParserName


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """The marks around the reasoning."""

    opening: str
    closing: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def start_after(self, prompt_end: str) -> ReasoningStart:
        """Tells from the end of the prompt where the reasoning of the answer begins."""
        end = prompt_end.rstrip()
        if end.endswith(self.opening):
            return ReasoningStart.OPEN
        return ReasoningStart.ABSENT if end.endswith(self.closing) else ReasoningStart.POSSIBLE


_THINK: Final = ReasoningSyntax("<think>", "</think>")
REASONING_SYNTAXES: Final = {
    ReasoningParserName.DEEPSEEK_R1: _THINK,
    ReasoningParserName.QWEN3: _THINK,
    ReasoningParserName.MISTRAL: ReasoningSyntax("[THINK]", "[/THINK]"),
}


def recognize_reasoning(chat_template: str) -> ReasoningParserName | None:
    """Finds the format of the reasoning that a chat template writes or removes; None if there is none."""
    for name, syntax in REASONING_SYNTAXES.items():
        if syntax.closing in chat_template:
            return name
    return None


class PlainParser:
    """The parser of answers that are only content."""

    num_complete_calls = 0

    def push(self, text: str) -> ParsedText:
        """Parses the next piece of the answer."""
        return ParsedText(text)

    def finish(self) -> ParsedText:
        """Returns the rest: nothing."""
        return NOTHING


class ReasoningParser:
    """Takes the reasoning off the beginning of an answer; another parser reads what follows.

    Line feeds beside the marks, and white space at the end of the reasoning, belong to neither part. Some models open
    the reasoning once more where the prompt has opened it.
    """

    def __init__(self, syntax: ReasoningSyntax, start: ReasoningStart, answer: AnswerParser) -> None:
        self._syntax = syntax
        self._answer = answer
        self._state = start  # ABSENT: the reasoning is over
        self._may_open = start is not ReasoningStart.ABSENT
        self._held = ""  # may still become part of a mark, or of white space that is dropped
        self._skips_line_feeds = False

    @property
    def num_complete_calls(self) -> int:
        return self._answer.num_complete_calls

    def push(self, text: str) -> ParsedText:
        """Parses the next piece of the answer."""
        self._held += text
        if self._may_open and not self._look_for_opening():
            return NOTHING
        reasoning = self._take_reasoning() if self._state is ReasoningStart.OPEN else ""
        if self._state is not ReasoningStart.ABSENT:
            return ParsedText("", reasoning=reasoning)
        if self._skips_line_feeds:
            self._held = self._held.lstrip("\n")
            self._skips_line_feeds = not self._held
        rest, self._held = self._held, ""
        return ParsedText("", reasoning=reasoning) + self._answer.push(rest)

    def finish(self) -> ParsedText:
        """Returns the rest when the answer has ended, possibly within the reasoning."""
        rest, self._held = self._held, ""
        if self._state is ReasoningStart.OPEN:
            return ParsedText("", reasoning=(rest.lstrip("\n") if self._may_open else rest).rstrip())
        return self._answer.push(rest) + self._answer.finish()

    def _look_for_opening(self) -> bool:
        """Reads the opening mark, if the answer begins with it. False while that is not known."""
        lead = self._held.lstrip("\n")
        if self._syntax.opening.startswith(lead) and lead != self._syntax.opening:
            return False
        self._may_open = False
        if lead.startswith(self._syntax.opening):
            self._state = ReasoningStart.OPEN
            self._held = lead.removeprefix(self._syntax.opening)
        elif self._state is ReasoningStart.POSSIBLE:
            self._state = ReasoningStart.ABSENT
        self._skips_line_feeds = self._state is ReasoningStart.OPEN
        return True

    def _take_reasoning(self) -> str:
        """Takes the reasoning off the held text as far as it is unambiguous."""
        if self._skips_line_feeds:
            self._held = self._held.lstrip("\n")
            self._skips_line_feeds = not self._held
        end = self._held.find(self._syntax.closing)
        if end >= 0:
            shown, self._held = self._held[:end].rstrip(), self._held[end + len(self._syntax.closing) :]
            self._state, self._skips_line_feeds = ReasoningStart.ABSENT, True
            return shown
        shown = without_possible_mark(self._held, self._syntax.closing).rstrip()
        self._held = self._held[len(shown) :]
        return shown
