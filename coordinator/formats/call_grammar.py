"""The grammar of an answer with calls, content and a reasoning before them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from coordinator.formats.answer_parts import AnswerRules, ReasoningStart, ToolMode, ToolUse
from coordinator.formats.call_syntax import CallSyntax
from coordinator.formats.lark import LINE_FEEDS, LarkWriter
from coordinator.formats.reasoning import ReasoningSyntax
from coordinator.formats.xml_arguments import write_xml_arguments
from outrider.sampling_params import GrammarSpec

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
# The parts in which llguidance reads JSON.
_JSON_PARTS: Final = re.compile(r'("[^"]*"|[{}]|, |: )')


def answer_grammar(
    rules: AnswerRules,
    calls: CallSyntax,
    reasoning: ReasoningSyntax | None,
    added_token_ids: Mapping[str, int],
) -> GrammarSpec | None:
    """Builds the grammar of an answer; None if any text is permitted. `added_token_ids` are the tokenizer's tokens
    besides its vocabulary."""
    if rules.tools is None and rules.structure is None:
        return None
    marks = (*calls.marks, *(reasoning.marks if reasoning else ()))
    return _AnswerGrammar(rules, calls, reasoning, LarkWriter(marks, added_token_ids)).build()


class _AnswerGrammar:
    def __init__(
        self, rules: AnswerRules, calls: CallSyntax, reasoning: ReasoningSyntax | None, lark: LarkWriter
    ) -> None:
        self._rules = rules
        self._calls = calls
        self._reasoning = reasoning
        self._lark = lark

    def build(self) -> GrammarSpec:
        lark, start = self._lark, self._rules.reasoning
        if self._rules.tools is not None:
            self._write_calls(self._rules.tools)
        if self._rules.structure is not None:
            lark.structure("structure", self._rules.structure)
        if self._reasoning is None or start is ReasoningStart.ABSENT:
            lark.rule("start", self._answer("answer"))
            return lark.grammar()
        thought = lark.until("thought", lark.text("thought_text"), self._reasoning.closing)
        lark.rule("LINE_FEEDS", f"/{LINE_FEEDS}/")
        reasoned = f"{thought} {self._answer('conclusion', is_after_reasoning=True)}"
        if start is ReasoningStart.POSSIBLE:
            opening = lark.literal(self._reasoning.opening)
            reasoned = f"{opening} {reasoned} | {self._answer('answer', forbidden=self._reasoning.opening)}"
        lark.rule("start", reasoned)
        return lark.grammar()

    def _answer(self, name: str, *, is_after_reasoning: bool = False, forbidden: str = "") -> str:
        """Adds the rule of the answer itself, whose text must not begin with `forbidden`; returns its name."""
        lark, calls, use = self._lark, self._calls, self._rules.tools
        gap = "LINE_FEEDS? " if is_after_reasoning else ""  # text has line feeds of its own
        if self._rules.structure is not None or use is None or use.mode is ToolMode.REQUIRED:
            may_call = [] if use is None else ["calls"]
            if self._rules.structure is not None and (use is None or use.mode is ToolMode.AUTO):
                may_call.append("structure")
            return lark.rule(name, f"{gap}({' | '.join(may_call)})")
        prefixes = [forbidden] if forbidden else []
        if not calls.trigger:
            text = lark.text(f"{name}_text", [*prefixes, *calls.beginnings])
            return lark.rule(name, f"{text} | first_calls")
        text = lark.text(f"{name}_text", prefixes)
        before = lark.until(f"{name}_before", text, calls.trigger)
        return lark.rule(name, f"{text} | {before} triggered_calls")

    def _write_calls(self, use: ToolUse) -> None:
        """Adds the rules of calls: `calls`, `triggered_calls` behind their trigger, or `first_calls`, which may follow
        line feeds."""
        lark, calls = self._lark, self._calls
        for index, (_, parameters) in enumerate(use.functions):
            if calls.is_xml:
                write_xml_arguments(lark, f"arguments_{index}", parameters)
            else:  # each schema stays separate, so that its references keep their root
                lark.rule(f"arguments_{index}", f"%json {json.dumps(arguments_schema(parameters))}")
            lark.rule(f"body_{index}", f"arguments_{index} {lark.literal(calls.closing)}")
        rest = lark.literal(calls.ending)
        if use.is_parallel:
            other = lark.rule("other", self._any_call(use, calls.separator + calls.before_name))
            rest = f"{other}* {rest}"
        if use.mode is ToolMode.REQUIRED or self._rules.structure is not None:
            # JSON of the structure competes with JSON of calls, so both are read in the same parts.
            is_split = self._rules.structure is not None and not calls.trigger
            options = [self._any_call(use, each, is_split=is_split) for each in calls.beginnings]
            lark.rule("calls", f"({' | '.join(options)}) {rest}")
        elif calls.trigger:
            options = [self._any_call(use, each.removeprefix(calls.trigger)) for each in calls.beginnings]
            lark.rule("triggered_calls", f"({' | '.join(options)}) {rest}")
        else:
            options = [
                f"{lark.literal_after_line_feeds(f'first_{place}_{index}', header)} body_{index}"
                for index, name in enumerate(use.names)
                for place, header in enumerate(calls.first_headers(name))
            ]
            lark.rule("first_calls", f"({' | '.join(options)}) {rest}")

    def _any_call(self, use: ToolUse, before_name: str, *, is_split: bool = False) -> str:
        """A call of any function, whose name follows `before_name`."""
        options = []
        for index, name in enumerate(use.names):
            header = before_name + name + self._calls.after_name
            parts = _JSON_PARTS.split(header) if is_split else [header]
            options.append(" ".join([*(self._lark.literal(part) for part in parts if part), f"body_{index}"]))
        return f"({' | '.join(options)})"


def arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the schema that a call's arguments follow."""
    return _NO_ARGUMENTS if parameters is None else parameters
