"""Parameters of other servers that this one does not serve.

What could change the output is accepted at the values that change nothing and refused at any other. What cannot is
accepted, and named in the response's header `x-outrider-ignored`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from outrider.errors import InvalidRequest

# Parameter -> values that change nothing, besides None.
_NEUTRAL_COMMON: Final[dict[str, tuple[Any, ...]]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
}
NEUTRAL_COMPLETION: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({**_NEUTRAL_COMMON, "suffix": ("",)})
NEUTRAL_CHAT: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({
    **_NEUTRAL_COMMON, "best_of": (1,), "modalities": (["text"],), "audio": (), "web_search_options": (),
})  # fmt: skip
NEUTRAL_STRUCTURED_OUTPUTS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({
    "whitespace_pattern": (), "structural_tag": (), "disable_fallback": (False,),
    "disable_additional_properties": (False,),
})  # fmt: skip
# Parameters about accounts, storage, caches and prices: none of them can change the output.
UNUSED_COMPLETION: Final = (
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention", "kv_transfer_params",
)  # fmt: skip
UNUSED_CHAT: Final = (*UNUSED_COMPLETION, "mm_processor_kwargs")
# Former parameter -> its replacement.
SUCCESSORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "guided_json": "structured_outputs.json",
        "guided_regex": "structured_outputs.regex",
        "guided_choice": "structured_outputs.choice",
        "guided_grammar": "structured_outputs.grammar",
        "guided_whitespace_pattern": "structured_outputs.disable_any_whitespace",
        "guided_decoding_backend": "structured_outputs",
    }
)


def without_neutral(content: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str) -> dict[str, Any]:
    """Drops unserved parameters at neutral values and refuses them at others. Raises InvalidRequest."""
    for name in neutral.keys() & content.keys():
        value = content[name]
        # The type is compared too, because Python equates False with 0 and True with 1.
        if value is not None and (type(value) is bool, value) not in [
            (type(each) is bool, each) for each in neutral[name]
        ]:
            raise InvalidRequest(where + name, f"{where}{name} is not supported{successor(name)}")
    return {name: value for name, value in content.items() if name not in neutral}


def successor(name: str) -> str:
    """Names the replacement of a parameter, as the end of a message; empty for most."""
    return f"; use {SUCCESSORS[name]}" if name in SUCCESSORS else ""
