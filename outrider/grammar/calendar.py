"""Valid calendar dates: JSON Schema's `date`, `time` and `date-time` as patterns that know leap years.

llguidance permits 29 February in every year, year 0, and second 60 in any minute, which readers of the schema reject.
These patterns permit RFC 3339 without year 0 and leap seconds, which are valid there but which hardly any language's
own dates can hold.
"""

from __future__ import annotations

from typing import Any, Final

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])"  # a multiple of 4 but not of 100
    "|(?:0[48]|[2468][048]|[13579][26])00)"  # a multiple of 400
)
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_MINUTES: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_MINUTES}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_MINUTES})"
PATTERNS: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}

_NAMED_SCHEMAS: Final = frozenset({
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas",
})  # fmt: skip
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})


def replace_formats(schema: Any) -> bool:
    """Replaces each of these formats, in every subschema, by its pattern, in place; returns whether there was one."""
    replaced = False
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            replaced |= _replace_format(node)
            for name, value in node.items():
                if name in _NAMED_SCHEMAS and isinstance(value, dict):
                    pending += value.values()
                elif name not in _VALUES:
                    pending.append(value)
    return replaced


def _replace_format(schema: dict[str, Any]) -> bool:
    name, all_of = schema.get("format"), schema.get("allOf", [])
    if not isinstance(name, str) or name not in PATTERNS or not isinstance(all_of, list):
        return False  # llguidance reports invalid schemas
    pattern = {"pattern": PATTERNS[name]}
    # The schema's own pattern stays: both must match.
    schema.update({"allOf": [*all_of, pattern]} if "pattern" in schema else pattern)
    del schema["format"]
    return True
