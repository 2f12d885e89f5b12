"""Parameters that clients of other servers know and this one does not serve yet.

Each is accepted at the values that change nothing and refused at any other; none is ever dropped in silence.
A parameter leaves this table on the day it is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from outrider.errors import InvalidRequest

# Parameter -> values that change nothing, None aside. To be served by later work.
_NEUTRAL_COMMON: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "priority": (0,),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
NEUTRAL_COMPLETION: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({
    **_NEUTRAL_COMMON, "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (),
})  # fmt: skip
NEUTRAL_CHAT: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        **_NEUTRAL_COMMON,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "web_search_options": (),
    }
)
NEUTRAL_MESSAGE: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({
    "tool_calls": ([],), "tool_call_id": (), "function_call": (), "refusal": (), "audio": (), "annotations": ([],),
})  # fmt: skip


def without_neutral(
    content: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str
) -> dict[str, Any]:
    """Drops what changes nothing and refuses what would change something that is not served yet."""
    for name in neutral.keys() & content.keys():
        value = content[name]
        if value is not None and value not in neutral[name]:
            raise InvalidRequest(where + name, f"{where}{name} is not supported yet")
    return {name: value for name, value in content.items() if name not in neutral}
