"""JSON schemas without what a grammar cannot hold: the nearest looser schema that it can. Pure.

Invariant: everything that a schema permits, its loosened form permits, too. So no keyword is dropped where that would
forbid something: a pattern of property names goes together with the `additionalProperties` that it was exempt from.
Schemas under `not`, `if` and the like, of which a looser one would forbid more, are dropped as a whole. Alternatives
keep their places, since references name them; a reference that leads to something else afterwards is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from coordinator.intake.loosening.disjoint_schemas import DisjointSchemas
from coordinator.intake.loosening.loosened_pattern import loosened_pattern
from coordinator.intake.loosening.schema_references import References

NOT_HELD: Final[Mapping[str, str]] = MappingProxyType({
    "$dynamicRef": "always", "$recursiveRef": "always", "contains": "always", "minContains": "always",
    "maxContains": "always", "dependencies": "always", "dependentRequired": "always", "dependentSchemas": "always",
    "if": "always", "then": "always", "else": "always", "not": "always", "propertyNames": "always",
    "unevaluatedItems": "always", "unevaluatedProperties": "always", "uniqueItems": "always",
    "$ref": "to another document, to nothing, or to itself",
    "$schema": "of a dialect that is not JSON Schema's own",
    "format": "other than those below",
    "maxProperties": "beside optional properties",
    "minProperties": "beside optional properties",
    "multipleOf": "whose common multiple is above 20,000",
    "oneOf": "unless its schemas certainly exclude each other",
    "pattern": "with look-around, word boundaries or references to groups",
    "patternProperties": "with such a pattern, or with two that one name may match",
    "type": "other than JSON's seven",
})  # fmt: skip
"""Keywords that a grammar does not hold, and where."""
FORMATS: Final = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
"""The values of `format` that a grammar holds."""
RISKY: Final = frozenset({"pattern", "patternProperties", "multipleOf", "minProperties", "maxProperties", "enum"})
"""Keywords that a grammar holds only within its bounds, which their values do not show."""
COUNT_MAX: Final = (1 << 32) - 1
"""The largest length or number of items that a grammar holds for every keyword that has one."""

_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DIALECTS: Final = tuple(
    f"{scheme}://json-schema.org/{draft}/schema"
    for scheme, draft in (
        ("https", "draft/2020-12"), ("https", "draft/2019-09"), ("http", "draft-07"), ("http", "draft-06"),
        ("http", "draft-04"),
    )
)  # fmt: skip
TOLD_CHARS_MAX: Final = 1000
"""Characters after which no more places are told of what a schema has lost: a header names no more."""
_SILENT: Final = frozenset({"$dynamicAnchor", "$recursiveAnchor", "$vocabulary"})  # they permit and forbid nothing
_DROPPED: Final = frozenset(name for name, where in NOT_HELD.items() if where == "always")
_SCHEMAS: Final = frozenset({"additionalProperties", "additionalItems", "items"})
_SCHEMA_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_OF_NAMES: Final = frozenset({"type", "pattern", "enum", "const", "title", "description"})
_NAME_TYPES: Final = (None, "string")
_COUNTS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


class Loosened(NamedTuple):
    """A looser schema, and the keywords that it lost, each by its place: `properties.tags.uniqueItems`.

    After `TOLD_CHARS_MAX` characters no more are named, and the last place is cut.
    """

    schema: Any
    dropped: tuple[str, ...]


def loosened(schema: Any, without: frozenset[str] = frozenset()) -> Loosened:
    """Returns the nearest looser schema that a grammar holds; the keywords of `without` are dropped everywhere."""
    writer = _Writer(schema, without)
    made = writer.loosen(schema, ())
    writer.drop_broken_references(made)
    return Loosened(made, tuple(writer.dropped))


def outline(schema: Any) -> Any:
    """Returns a schema of the same names, required names and types of properties, and nothing else."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {"type": "object"}
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return {
        "type": "object",
        "properties": {name: _typed(each) for name, each in properties.items()},
        "required": [name for name in names if name in properties],
    }


def _typed(schema: Any) -> dict[str, Any]:
    told = schema.get("type") if isinstance(schema, Mapping) else None
    return {"type": told} if isinstance(told, str) and told in _TYPES else {}


class _Writer:
    def __init__(self, root: Any, without: frozenset[str]) -> None:
        self._references = References(root)
        self._disjoint = DisjointSchemas(self._references)
        self._without = without
        self._forms: dict[int, dict[int, Any]] = {}  # looser forms by their ids, by the id of what was sent
        self._places: dict[int, tuple[str, ...]] = {}  # of what was sent, by the ids of looser forms
        self.dropped: dict[str, None] = {}
        self._told_chars_left = TOLD_CHARS_MAX

    def loosen(self, schema: Any, place: tuple[str, ...]) -> Any:
        made = self._loosened(schema, place)
        self._forms.setdefault(id(schema), {})[id(made)] = made
        self._places[id(made)] = place
        return made

    def _loosened(self, schema: Any, place: tuple[str, ...]) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._drop(*place)
            return True
        if _forbids_all(schema):
            return False
        made: dict[str, Any] = {}
        schema = self._with_names(schema)
        for name, value in schema.items():
            self._keep(made, name, value, schema, place)
        return made

    def drop_broken_references(self, made: Any) -> None:
        """Drops, in place, references that lead nowhere, in a circle without a value in between, or to another schema
        than those that were sent."""
        references = References(made)
        pending = [made]
        while pending:
            node = pending.pop()
            if not isinstance(node, dict):
                continue
            if "$ref" in node and (references.resolved(node) is None or not self._is_kept(node["$ref"], references)):
                del node["$ref"]
                self._drop(*self._places[id(node)], "$ref")
            pending += _subschemas(node)

    def _is_kept(self, reference: str, references: References) -> bool:
        """Whether a reference leads to a looser form of the schema that it led to, or to one that was kept as sent."""
        sent, made = self._references.target(reference), references.target(reference)
        return made is sent or id(made) in self._forms.get(id(sent), ())

    def _drop(self, *place: str) -> None:
        # Each place repeats the client's names around it, so that all places may be far longer than the schema.
        if self._told_chars_left <= 0:
            return
        told = ".".join(place)[:TOLD_CHARS_MAX]
        if told not in self.dropped:
            self.dropped[told] = None
            self._told_chars_left -= len(told)

    def _keep(
        self, made: dict[str, Any], name: str, value: Any, schema: Mapping[str, Any], place: tuple[str, ...]
    ) -> None:
        """Adds a keyword to the schema that is made, as far as a grammar holds it."""
        here = (*place, name)
        if name in _SILENT or _is_neutral(name, value):
            return
        if name in self._without or name in _DROPPED or name == "x-guidance" or not _is_held(name, value, schema):
            self._drop(*here)
            if name == "patternProperties":
                made["additionalProperties"] = True
        elif name == "additionalProperties" and made.get(name) is True:
            return  # a pattern before it was dropped
        elif name == "oneOf":
            self._keep_one_of(made, value, here)
        elif name == "patternProperties":
            self._keep_pattern_properties(made, value, here)
        elif name == "pattern":
            self._keep_pattern(made, value, here)
        elif name in _SCHEMA_MAPS:
            made[name] = {key: self.loosen(each, (*here, key)) for key, each in value.items()}
        elif name in _SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
            options = [self.loosen(each, (*here, str(index))) for index, each in enumerate(value)]
            made[name] = [*options, *made.get(name, ())]  # those of `oneOf` stand behind, and change no place
        elif name in _SCHEMAS:
            made[name] = self.loosen(value, here)
        elif name in _COUNTS:
            made[name] = int(value)
        else:
            made[name] = value

    def _with_names(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Writes `propertyNames` of a map by patterns or names of properties, which a grammar holds."""
        names = self._references.resolved(schema.get("propertyNames"))
        others = schema.keys() & {"properties", "patternProperties", "unevaluatedProperties"}
        if not isinstance(names, Mapping) or others or names.keys() - _OF_NAMES or names.get("type") not in _NAME_TYPES:
            return schema
        kept = {name: value for name, value in schema.items() if name not in ("propertyNames", "additionalProperties")}
        values = schema.get("additionalProperties", True)
        listed, pattern = [names["const"]] if "const" in names else names.get("enum"), names.get("pattern")
        if isinstance(listed, list) and pattern is None:
            known = dict.fromkeys((name for name in listed if isinstance(name, str)), values)
            return {**kept, "properties": known, "additionalProperties": False}
        if isinstance(pattern, str) and listed is None and loosened_pattern(pattern) == pattern:
            return {**kept, "patternProperties": {pattern: values}, "additionalProperties": False}
        return schema

    def _keep_one_of(self, made: dict[str, Any], options: list[Any], here: tuple[str, ...]) -> None:
        if not self._disjoint.exclude_each_other(options):
            self._drop(*here)
        loose = [self.loosen(each, (*here, str(index))) for index, each in enumerate(options)]
        made["allOf"] = [*made.get("allOf", ()), {"anyOf": loose}]

    def _keep_pattern(self, made: dict[str, Any], pattern: str, here: tuple[str, ...]) -> None:
        loose = loosened_pattern(pattern)
        if loose != pattern:
            self._drop(*here)
        if loose is not None:
            made["pattern"] = loose

    def _keep_pattern_properties(self, made: dict[str, Any], patterns: dict[str, Any], here: tuple[str, ...]) -> None:
        kept = {key: self.loosen(each, (*here, key)) for key, each in patterns.items() if loosened_pattern(key) == key}
        if len(kept) < len(patterns):
            self._drop(*here)
            made["additionalProperties"] = True
        if kept:
            made["patternProperties"] = kept


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas directly within a loosened one."""
    for name, value in schema.items():
        if name in _SCHEMA_MAPS:
            yield from value.values()
        elif name in _SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
            yield from value
        elif name in _SCHEMAS:
            yield value


def _forbids_all(schema: Mapping[str, Any]) -> bool:
    """Whether no value can be valid: clients write that as `{"not": {}}`."""
    return "not" in schema and schema["not"] in (True, {})


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a keyword that a grammar does not hold permits everything here."""
    if name == "propertyNames":
        return value in (True, {}, {"type": "string"})
    if name in ("uniqueItems", "not"):
        return value is False
    return name in ("if", "then", "else", "unevaluatedProperties", "unevaluatedItems") and value is True


def _is_held(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a grammar holds a keyword with this value, apart from the schemas in it."""
    match name:
        case "$schema":
            return isinstance(value, str) and value.rstrip("#") in _DIALECTS
        case "$ref":
            return isinstance(value, str) and value.startswith("#")
        case "type":
            types = value if isinstance(value, list) and value else [value]
            return all(isinstance(each, str) and each in _TYPES for each in types)
        case "format":
            return (isinstance(value, str) and value in FORMATS) or not _may_be(schema, "string")
        case "pattern":
            return isinstance(value, str)
        case "enum":
            return isinstance(value, list) and bool(value) and _is_in_range(value)
        case "required":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "multipleOf":
            return _is_number(value) and value > 0
        case "minProperties" | "maxProperties":
            return _is_count(value) and not _has_optional(schema)
    if name in _COUNTS:
        return _is_count(value)
    if name in _BOUNDS:
        return _is_number(value) or (name.startswith("exclusive") and isinstance(value, bool))
    if name in _SCHEMA_MAPS:
        return isinstance(value, Mapping)
    if name in _SCHEMA_LISTS:
        return isinstance(value, list) and bool(value)
    return name in _SCHEMAS or _is_in_range(value)


def _may_be(schema: Mapping[str, Any], type_name: str) -> bool:
    types = schema.get("type")
    return types is None or type_name == types or (isinstance(types, list) and type_name in types)


def _has_optional(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return False
    return not (isinstance(required, list) and all(name in required for name in properties))


def _is_number(value: Any) -> bool:
    """Whether it is a number that a double holds: Python reads 1e999 as infinity, and integers of any length."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= COUNT_MAX and value == int(value)


def _is_in_range(value: Any) -> bool:
    """Whether all numbers in a value are such ones."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
        elif isinstance(each, int | float) and not isinstance(each, bool) and not _is_number(each):
            return False
    return True
