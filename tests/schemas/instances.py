"""Values that mostly, but not always, follow a JSON schema: what is generated here knows nothing of grammars."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Final

import referencing
from jsonschema.validators import Draft202012Validator, validator_for

TEXTS: Final = (
    "", "a", "ab", "abc", "admin", "x_a", "x-y", "$", "id", "name", "red", "blue", "b.txt", "a.txt", "2024-02-29",
    "2024-02-29T12:00:00Z", "12:00:00", "P1D", "someone@example.com", "a..b@example.com", "https://example.com/a",
    "1.2.3.4", "a1b2c3d4", "abcdefgh", "C123456", "12:30", "#00ff00", "12.5", "7", "two words", "\n", "é",
    "123e4567-e89b-12d3-a456-426614174000", "/tmp", "main", "main.lock", "-x",
)  # fmt: skip
NUMBERS: Final = (0, 1, -1, 2, 3, 5, 9, 30, 100, 0.25, 0.5, 0.75, -0.5, 65537, 1e6, 12)
_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_APPLICATORS: Final = ("$ref", "allOf", "anyOf", "oneOf")
_MISS: Final = 0.04  # of values that pay no heed to their schema


def is_valid(value: Any, schema: Any) -> bool:
    """Whether a value follows a schema of any draft. References to other documents raise."""
    kind = validator_for(schema, default=Draft202012Validator)
    return bool(kind(schema, registry=referencing.Registry()).is_valid(value))


def instance(schema: Any, chance: random.Random) -> Any:
    """Returns a value for a schema."""
    return _value(schema, schema, chance, 0)


def _any_value(chance: random.Random, depth: int) -> Any:
    return _value({"type": chance.choice(_TYPES if depth < 4 else _TYPES[:5])}, {}, chance, depth)


def _value(schema: Any, root: Any, chance: random.Random, depth: int) -> Any:
    if depth > 8:
        return chance.choice((None, 1, "a", [], {}))
    if not isinstance(schema, Mapping) or not schema or chance.random() < _MISS:
        return _any_value(chance, depth + 1)
    schema = _flat(schema, root, chance, 0)
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return chance.choice(schema["enum"])
    told = schema.get("type", "object" if schema.keys() & {"properties", "required", "patternProperties"} else None)
    kind = chance.choice(told) if isinstance(told, list) else told or chance.choice(_TYPES)
    match kind:
        case "null":
            return None
        case "boolean":
            return chance.random() < 0.5
        case "integer" | "number":
            return _number(schema, chance, is_whole=kind == "integer")
        case "string":
            return _text(schema, chance)
        case "array":
            return _list(schema, root, chance, depth)
        case "object":
            return _object(schema, root, chance, depth)
    return _any_value(chance, depth + 1)


def _flat(schema: Mapping[str, Any], root: Any, chance: random.Random, depth: int) -> dict[str, Any]:
    """The schema with those that apply to the same value, one of each list of alternatives, merged into it."""
    parts = [schema] if depth < 8 else []
    while parts and (part := parts[-1]) and isinstance(part.get("$ref"), str) and len(parts) < 8:
        target: Any = root
        for key in part["$ref"].removeprefix("#").split("/")[1:]:
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                target = target.get(key, {}) if isinstance(target, Mapping) else {}
        parts.append(target if isinstance(target, Mapping) else {})
    made: dict[str, Any] = {}
    for part in parts:
        made = _merged(made, {name: value for name, value in part.items() if name not in _APPLICATORS})
        chosen = [*part.get("allOf", ()), *(chance.choice(part[name]) for name in ("anyOf", "oneOf") if part.get(name))]
        for each in chosen:
            if isinstance(each, Mapping):
                made = _merged(made, _flat(each, root, chance, depth + 1))
    return made


def _merged(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    made = {**one, **other}
    for name, empty in (("properties", {}), ("required", [])):
        first, second = one.get(name, empty), other.get(name, empty)
        if isinstance(first, dict) and isinstance(second, dict):
            made |= {name: {**first, **second}} if first or second else {}
        elif isinstance(first, list) and isinstance(second, list):
            made |= {name: [*first, *second]} if first or second else {}
    return made


def _number(schema: Mapping[str, Any], chance: random.Random, *, is_whole: bool) -> float:
    unit = schema.get("multipleOf", 0)
    pool = [*NUMBERS, *(unit * factor for factor in (1, 2, 3))] if unit else [*NUMBERS]
    fitting = [
        each for each in pool
        if schema.get("minimum", each) <= each <= schema.get("maximum", each)
        and (not is_whole or each == int(each))
    ]  # fmt: skip
    return chance.choice(fitting or pool)


def _text(schema: Mapping[str, Any], chance: random.Random) -> str:
    pattern, shortest = schema.get("pattern", ""), schema.get("minLength", 0)
    fitting = [each for each in TEXTS if re.search(pattern, each) and len(each) >= (shortest or 0)]
    return chance.choice(fitting or TEXTS)


def _list(schema: Mapping[str, Any], root: Any, chance: random.Random, depth: int) -> list[Any]:
    items, first = schema.get("items", {}), schema.get("prefixItems", ())
    if isinstance(items, list):
        items, first = {}, items
    length = max(schema.get("minItems", 0), len(first) if chance.random() < 0.8 else 0) + chance.choice((0, 0, 1, 2))
    length = min(length, schema.get("maxItems", length))
    wanted = [_value(schema["contains"], root, chance, depth + 1)] if "contains" in schema else []
    return wanted + [_value(first[i] if i < len(first) else items, root, chance, depth + 1) for i in range(length)]


def _object(schema: Mapping[str, Any], root: Any, chance: random.Random, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    names = [name for name in properties if name in required or chance.random() < 0.5]
    names += [name for name in required if name not in properties]
    made = {name: _value(properties.get(name, {}), root, chance, depth + 1) for name in names}
    patterns = schema.get("patternProperties", {})
    if schema.get("additionalProperties") is not False or patterns:
        for name in chance.sample(TEXTS, chance.choice((0, 0, 1, 2))):
            own = next((each for pattern, each in patterns.items() if re.search(pattern, name)), None)
            more = schema.get("additionalProperties", {}) if own is None else own
            if more is not False and name not in properties:
                made[name] = _value(more, root, chance, depth + 1)
    return made
