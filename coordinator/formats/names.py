"""Names of the output formats, as the flags have them: vLLM's names where vLLM has the format. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class ToolCallParserName(StrEnum):
    """A format of tool calls."""

    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    MISTRAL_V11 = "mistral_v11"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    OPENAI = "openai"


class ReasoningParserName(StrEnum):
    """A format of reasoning. NONE leaves the reasoning in the content."""

    DEEPSEEK_R1 = "deepseek_r1"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"
    OPENAI_GPTOSS = "openai_gptoss"
    NONE = "none"


HARMONY_NAMES: Final = frozenset({ToolCallParserName.OPENAI, ReasoningParserName.OPENAI_GPTOSS})
"""Names of the format of gpt-oss, which has calls and reasoning in one."""


def check_combination(calls: ToolCallParserName | None, reasoning: ReasoningParserName | None) -> None:
    """Raises ValueError for names that cannot be combined."""
    if (calls in HARMONY_NAMES) != (reasoning in HARMONY_NAMES) and None not in (calls, reasoning):
        raise ValueError(
            f"--tool-call-parser {calls} and --reasoning-parser {reasoning} cannot be combined, because the format of "
            "gpt-oss has calls and reasoning in one; leave one of the two out"
        )
