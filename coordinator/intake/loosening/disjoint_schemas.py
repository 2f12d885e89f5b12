"""Tells whether two JSON schemas exclude each other, so that one of them holds where any does. Pure.

Invariant: the effort for one schema is bounded, however many of its alternatives share definitions: what a schema says
is read once, and beyond `EFFORT_MAX` nothing is certain.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.intake.loosening.schema_references import References

EFFORT_MAX: Final = 1 << 22
"""Most effort for one schema: 1 for each value or name that is compared, more for a pair and for what is read."""

_OPTIONS_MAX: Final = 64
"""Most schemas that are compared, each with each."""
_DEPTH_MAX: Final = 1
"""Levels of properties that are compared: a tag is one of the first."""
_PAIR: Final = 32
_READ: Final = 16
"""The effort to read a value or a name, beside one for every four characters of a value."""
_NONE: Final[frozenset[str]] = frozenset()
_OBJECT: Final = frozenset({"object"})


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts that a schema states. They keep the schema, so that no other one gets its id."""

    schema: Mapping[str, Any]
    types: frozenset[str] | None  # that it permits; None if it does not say. An integer is a number
    values: frozenset[str] | None  # that it lists, as JSON; None if it lists none
    required: frozenset[str]
    properties: Mapping[str, Any]
    is_closed: bool  # whether an object has the declared properties only


class DisjointSchemas:
    """The alternatives within one schema, whose references are `references`."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._facts: dict[int, _Facts] = {}  # by the id of a schema
        self._effort_left = EFFORT_MAX

    @property
    def effort(self) -> int:
        """The effort so far."""
        return EFFORT_MAX - self._effort_left

    def exclude_each_other(self, schemas: Sequence[Any]) -> bool:
        """Whether no value is valid under two of the schemas, as far as types, constants and required properties show
        it. False where that is not certain."""
        if len(schemas) > _OPTIONS_MAX:
            return False
        return all(self._are_disjoint(one, other, 0) for one, other in itertools.combinations(schemas, 2))

    def _are_disjoint(self, one: Any, other: Any, depth: int) -> bool:
        resolved, other_resolved = self._references.resolved(one), self._references.resolved(other)
        if resolved is False or other_resolved is False:
            return True
        first, second = self._facts_of(resolved), self._facts_of(other_resolved)
        if first is None or second is None or not self._can_take(first, second):
            return False
        if first.types is not None and second.types is not None and not first.types & second.types:
            return True
        if first.values is not None and second.values is not None:
            return not first.values & second.values
        if first.types != _OBJECT or second.types != _OBJECT or depth == _DEPTH_MAX:
            return False
        if _forbids_any(second, first.required) or _forbids_any(first, second.required):
            return True
        return any(
            self._are_disjoint(first.properties[name], second.properties[name], depth + 1)
            for name in first.required & second.required
            if name in first.properties and name in second.properties
        )

    def _facts_of(self, schema: Any) -> _Facts | None:
        if not isinstance(schema, Mapping) or self._effort_left <= 0:
            return None
        known = self._facts.get(id(schema))
        if known is None:
            known = self._facts[id(schema)] = self._read(schema)
        return known

    def _read(self, schema: Mapping[str, Any]) -> _Facts:
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        required, properties = schema.get("required"), schema.get("properties")
        facts = _Facts(
            schema,
            _types(schema, listed),
            self._written(listed) if isinstance(listed, list) else None,
            frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else _NONE,
            properties if isinstance(properties, Mapping) else {},
            schema.get("additionalProperties") is False and "patternProperties" not in schema,
        )
        self._effort_left -= _READ * (1 + len(facts.required))
        return facts

    def _written(self, values: list[Any]) -> frozenset[str]:
        texts = []
        for value in values:
            texts.append(json.dumps(value, sort_keys=True))
            self._effort_left -= _READ + len(texts[-1]) // 4
        return frozenset(texts)

    def _can_take(self, first: _Facts, second: _Facts) -> bool:
        """Whether there is effort left to compare two schemas, which it takes."""
        values = min(len(first.values or ()), len(second.values or ()))
        self._effort_left -= _PAIR + values + len(first.required) + len(second.required)
        return self._effort_left > 0


def _types(schema: Mapping[str, Any], listed: Any) -> frozenset[str] | None:
    told = schema.get("type")
    if told is None and isinstance(listed, list):
        return frozenset(_type_of(each) for each in listed)
    types = [each for each in (told if isinstance(told, list) else [told]) if isinstance(each, str)]
    return frozenset("number" if each == "integer" else each for each in types) or None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "number"


def _forbids_any(schema: _Facts, names: frozenset[str]) -> bool:
    """Whether an object with all these properties is certainly not valid."""
    return schema.is_closed and not names <= schema.properties.keys()
