"""How models write tool calls: one description for each format. Pure.

The sources are the models' chat templates. An answer with calls is

    opening call (separator call)* ending        where call is: before_name NAME after_name ARGUMENTS closing

and ARGUMENTS is JSON, except for Qwen3-Coder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from coordinator.formats.names import ToolCallParserName

_NAME: Final = ToolCallParserName


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How one format writes calls."""

    marks: tuple[str, ...]  # that may be tokens of their own
    trigger: str  # what begins the first call; text before it is content. Empty: calls begin the answer
    openings: tuple[str, ...] = ("",)  # what may stand before the first call; the usual one is first
    before_name: str
    after_name: str
    closing: str = ""
    separator: str = ""
    ending: str = ""
    is_xml: bool = False  # the arguments are elements instead of JSON (`xml_arguments`)

    def first_headers(self, name: str) -> tuple[str, ...]:
        """The texts that may begin an answer's first call, up to its arguments."""
        return tuple(opening + self.next_header(name) for opening in self.openings)

    def next_header(self, name: str) -> str:
        """The text of any other call after the separator, up to its arguments."""
        return self.before_name + name + self.after_name

    @property
    def beginnings(self) -> tuple[str, ...]:
        """The texts that may begin an answer's first call, up to the name."""
        return tuple(opening + self.before_name for opening in self.openings)


_HERMES: Final = CallSyntax(
    marks=("<tool_call>", "</tool_call>"),
    trigger="<tool_call>",
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    closing="}\n</tool_call>",
    separator="\n",
)
_QWEN3_CODER: Final = CallSyntax(
    marks=("<tool_call>", "</tool_call>"),
    trigger="<tool_call>",
    before_name="<tool_call>\n<function=",
    after_name=">\n",
    closing="</function>\n</tool_call>",
    separator="\n",
    is_xml=True,
)
_LLAMA3_JSON: Final = CallSyntax(
    marks=("<|python_tag|>",),
    trigger="",
    openings=("", "<|python_tag|>"),
    before_name='{"name": "',
    after_name='", "parameters": ',
    closing="}",
    separator="; ",
)
_MISTRAL: Final = CallSyntax(
    marks=("[TOOL_CALLS]",),
    trigger="[TOOL_CALLS]",
    openings=("[TOOL_CALLS][", "[TOOL_CALLS] ["),
    before_name='{"name": "',
    after_name='", "arguments": ',
    closing="}",
    separator=", ",
    ending="]",
)
_MISTRAL_V11: Final = CallSyntax(
    marks=("[TOOL_CALLS]", "[ARGS]"), trigger="[TOOL_CALLS]", before_name="[TOOL_CALLS]", after_name="[ARGS]"
)
# The bars are U+FF5C and the blanks U+2581, as in the tokenizer.
_BEGIN, _END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL_BEGIN, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR: Final = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_MARKS: Final = (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _SEPARATOR)
_DEEPSEEK_V3: Final = CallSyntax(
    marks=_DEEPSEEK_MARKS,
    trigger=_BEGIN,
    openings=(_BEGIN,),
    before_name=_CALL_BEGIN + "function" + _SEPARATOR,
    after_name="\n```json\n",
    closing="\n```" + _CALL_END,
    separator="\n",
    ending=_END,
)
_DEEPSEEK_V31: Final = CallSyntax(
    marks=_DEEPSEEK_MARKS,
    trigger=_BEGIN,
    openings=(_BEGIN,),
    before_name=_CALL_BEGIN,
    after_name=_SEPARATOR,
    closing=_CALL_END,
    ending=_END,
)

CALL_SYNTAXES: Final[Mapping[ToolCallParserName, CallSyntax]] = MappingProxyType({
    _NAME.HERMES: _HERMES,
    _NAME.QWEN3_CODER: _QWEN3_CODER,
    _NAME.LLAMA3_JSON: _LLAMA3_JSON,
    _NAME.MISTRAL: _MISTRAL,
    _NAME.MISTRAL_V11: _MISTRAL_V11,
    _NAME.DEEPSEEK_V3: _DEEPSEEK_V3,
    _NAME.DEEPSEEK_V31: _DEEPSEEK_V31,
})  # fmt: skip


def recognize_calls(chat_template: str) -> ToolCallParserName | None:
    """Finds the format of the calls that a chat template writes; None if it writes none that is known.

    The mark that fewer models have is looked for first: Hermes' models on Llama 3 have marks of both.
    """
    if _BEGIN in chat_template:
        return _NAME.DEEPSEEK_V3 if "```json" in chat_template else _NAME.DEEPSEEK_V31
    if "[TOOL_CALLS]" in chat_template:
        return _NAME.MISTRAL_V11 if "[ARGS]" in chat_template else _NAME.MISTRAL
    if "<tool_call>" in chat_template:
        return _NAME.QWEN3_CODER if "<function=" in chat_template else _NAME.HERMES
    has_llama_roles = "<|start_header_id|>" in chat_template
    if "<|python_tag|>" in chat_template or (has_llama_roles and '"parameters": ' in chat_template):
        return _NAME.LLAMA3_JSON
    return None
