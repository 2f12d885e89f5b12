"""Parameters that clients of other servers know and this one does not serve.

Each is accepted at the values that change nothing and refused at any other; none is ever dropped in silence.
A parameter leaves this table on the day it is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from outrider.errors import InvalidRequest

# Parameter -> values that change nothing, None aside.
_NEUTRAL_COMMON: Final[dict[str, tuple[Any, ...]]] = {
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
}
NEUTRAL_COMPLETION: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({
    **_NEUTRAL_COMMON, "suffix": ("",), "add_special_tokens": (True,),
})  # fmt: skip
NEUTRAL_CHAT: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        **_NEUTRAL_COMMON,
        "best_of": (1,),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
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
    "function_call": (), "refusal": (), "audio": (), "annotations": ([],),
})  # fmt: skip
NEUTRAL_STRUCTURED_OUTPUTS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({
    "whitespace_pattern": (), "structural_tag": (), "disable_fallback": (False,),
    "disable_additional_properties": (False,),
})  # fmt: skip
# Names of the past -> what took their place.
SUCCESSORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "guided_json": "structured_outputs.json",
        "guided_regex": "structured_outputs.regex",
        "guided_choice": "structured_outputs.choice",
        "guided_grammar": "structured_outputs.grammar",
        "guided_whitespace_pattern": "structured_outputs.disable_any_whitespace",
        "guided_decoding_backend": "structured_outputs",
        "functions": "tools",
        "function_call": "tool_choice",
    }
)


def without_neutral(
    content: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str
) -> dict[str, Any]:
    """Drops what changes nothing and refuses what would change something that is not served."""
    for name in neutral.keys() & content.keys():
        value = content[name]
        # By kind, too: to Python false is 0 and true is 1.
        if value is not None and (type(value) is bool, value) not in [
            (type(each) is bool, each) for each in neutral[name]
        ]:
            raise InvalidRequest(where + name, f"{where}{name} is not supported{successor(name)}")
    return {name: value for name, value in content.items() if name not in neutral}


def successor(name: str) -> str:
    """What to use instead, as the end of a message; empty for most names."""
    return f"; use {SUCCESSORS[name]}" if name in SUCCESSORS else ""
