"""Tells whether two JSON schemas exclude each other, so that one of them holds where any does. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coordinator.intake.loosening.schema_references import References

_OPTIONS_MAX: Final = 64
"""Most schemas that are compared, each with each."""
_DEPTH_MAX: Final = 1
"""Levels of properties that are compared: a tag is one of the first."""


def exclude_each_other(schemas: Sequence[Any], references: References) -> bool:
    """Whether no value is valid under two of the schemas, as far as types, constants and required properties show it.

    False where that is not certain. `references` are those of the schema that they are in.
    """
    if len(schemas) > _OPTIONS_MAX:
        return False
    return all(_are_disjoint(one, other, references, 0) for one, other in itertools.combinations(schemas, 2))


def _are_disjoint(one: Any, other: Any, references: References, depth: int) -> bool:
    first, second = references.resolved(one), references.resolved(other)
    if first is False or second is False:
        return True
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return False
    types, other_types = _types(first), _types(second)
    if types is not None and other_types is not None and not types & other_types:
        return True
    values, other_values = _values(first), _values(second)
    if values is not None and other_values is not None:
        return not values & other_values
    if types != {"object"} or other_types != {"object"} or depth == _DEPTH_MAX:
        return False
    if _forbids_any(second, _required(first)) or _forbids_any(first, _required(second)):
        return True
    known, other_known = _properties(first), _properties(second)
    return any(
        _are_disjoint(known[name], other_known[name], references, depth + 1)
        for name in _required(first) & _required(second) & known.keys() & other_known.keys()
    )


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema lists, as JSON; None if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(each, sort_keys=True) for each in listed} if isinstance(listed, list) else None


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema permits; None if it does not say. An integer is a number."""
    told = schema.get("type")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if told is None and isinstance(listed, list):
        return {_type_of(each) for each in listed}
    types = [each for each in (told if isinstance(told, list) else [told]) if isinstance(each, str)]
    return {"number" if each == "integer" else each for each in types} or None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "number"


def _required(schema: Mapping[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _forbids_any(schema: Mapping[str, Any], names: set[str]) -> bool:
    """Whether an object with all these properties is certainly not valid."""
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return is_closed and not names <= _properties(schema).keys()
