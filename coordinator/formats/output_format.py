"""The output format of a model: how it writes reasoning, content and calls. Pure.

To add a format: describe it in `call_syntax` or `reasoning`, with a name in `names`. A format that is not of that shape
is a class of its own with the three methods of `OutputFormat`, as gpt-oss's is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from coordinator.formats import harmony
from coordinator.formats.answer_parts import AnswerParser, AnswerRules, ReasoningStart, ToolUse
from coordinator.formats.call_grammar import answer_grammar
from coordinator.formats.call_parser import CallParser
from coordinator.formats.call_syntax import CALL_SYNTAXES, CallSyntax, recognize_calls
from coordinator.formats.names import HARMONY_NAMES, ReasoningParserName, ToolCallParserName, check_combination
from coordinator.formats.reasoning import (
    REASONING_SYNTAXES,
    PlainParser,
    ReasoningParser,
    ReasoningSyntax,
    recognize_reasoning,
)
from outrider.sampling_params import GrammarSpec

PROMPT_END_TOKENS: Final = 16
"""Tokens at the end of a prompt that show whether it has opened or closed the reasoning."""


class OutputFormat(Protocol):
    """How a model writes reasoning, content and calls."""

    @property
    def description(self) -> str:
        """The formats for people, by their names."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must stay in the text, even if they are special tokens."""
        ...

    def reasoning_after(self, prompt_end: str) -> ReasoningStart:
        """Tells from the end of the prompt where the reasoning of the answer begins."""
        ...

    def grammar(self, rules: AnswerRules, added_token_ids: Mapping[str, int]) -> GrammarSpec | None:
        """Builds the grammar of an answer; None if any text is permitted."""
        ...

    def parser(self, rules: AnswerRules) -> AnswerParser | None:
        """Makes the parser of one answer; None if all of it is content."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """A format of calls, and of the reasoning before the answer if the model reasons."""

    calls_name: ToolCallParserName
    reasoning_name: ReasoningParserName

    @property
    def description(self) -> str:
        return f"tool calls: {self.calls_name}, reasoning: {self.reasoning_name}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self._calls.marks, *(self._reasoning.marks if self._reasoning else ()))

    def reasoning_after(self, prompt_end: str) -> ReasoningStart:
        return self._reasoning.start_after(prompt_end) if self._reasoning else ReasoningStart.ABSENT

    def grammar(self, rules: AnswerRules, added_token_ids: Mapping[str, int]) -> GrammarSpec | None:
        return answer_grammar(rules, self._calls, self._reasoning, added_token_ids)

    def parser(self, rules: AnswerRules) -> AnswerParser | None:
        answer: AnswerParser | None = None
        if rules.tools is not None:
            answer = CallParser(self._calls, rules.tools, calls_begin_answer=rules.structure is not None)
        if self._reasoning is None or rules.reasoning is ReasoningStart.ABSENT:
            return answer
        return ReasoningParser(self._reasoning, rules.reasoning, answer or PlainParser())

    @property
    def _calls(self) -> CallSyntax:
        return CALL_SYNTAXES[self.calls_name]

    @property
    def _reasoning(self) -> ReasoningSyntax | None:
        return REASONING_SYNTAXES.get(self.reasoning_name)


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """The format of gpt-oss, which always has channels."""

    description = f"tool calls: {ToolCallParserName.OPENAI}, reasoning: {ReasoningParserName.OPENAI_GPTOSS}"
    marks = harmony.MARKS

    def reasoning_after(self, prompt_end: str) -> ReasoningStart:
        return ReasoningStart.POSSIBLE

    def grammar(self, rules: AnswerRules, added_token_ids: Mapping[str, int]) -> GrammarSpec | None:
        return harmony.harmony_grammar(rules, added_token_ids)

    def parser(self, rules: AnswerRules) -> AnswerParser | None:
        return harmony.HarmonyParser(() if rules.tools is None else rules.tools.names)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The format of a request's answers, and what they may be."""

    form: OutputFormat
    rules: AnswerRules

    def with_tools(self, tools: ToolUse) -> AnswerPlan:
        """Returns the plan of answers that may call other functions."""
        return replace(self, rules=replace(self.rules, tools=tools))

    def grammar(self, added_token_ids: Mapping[str, int]) -> GrammarSpec | None:
        """Builds the grammar of an answer; None if any text is permitted."""
        return self.form.grammar(self.rules, added_token_ids)

    def new_parser(self) -> AnswerParser | None:
        """Makes the parser of one answer; None if all of it is content."""
        return self.form.parser(self.rules)


def choose_format(
    chat_template: str,
    calls_name: ToolCallParserName | None = None,
    reasoning_name: ReasoningParserName | None = None,
) -> OutputFormat:
    """Returns the format of a model by its chat template, unless names are given. Hermes' calls if nothing is known.

    Raises ValueError for a combination that does not exist.
    """
    check_combination(calls_name, reasoning_name)
    asked = {calls_name, reasoning_name} - {None}
    is_harmony = harmony.CHANNEL in chat_template and harmony.MESSAGE in chat_template
    if asked & HARMONY_NAMES or (is_harmony and not asked):
        return HarmonyFormat()
    return MarkedFormat(
        calls_name or recognize_calls(chat_template) or ToolCallParserName.HERMES,
        reasoning_name or recognize_reasoning(chat_template) or ReasoningParserName.NONE,
    )
