"""JSON schemas of the OpenAPI document in a few words. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

from docs.generate.markdown import code

Schema = dict[str, Any]

_POWERS: Final = {(1 << 32) - 1: "2^32 - 1", (1 << 64) - 1: "2^64 - 1"}


def words(schema: Schema) -> str:
    """Type and bounds, such as "integer, 0 to 32 or null"; null is left out, for it means not given."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](http-api.md#{name.lower()})"
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        kinds = dict.fromkeys(words(each) for each in branches if each != {"type": "null"} and len(each) > 0)
        return " or ".join(filter(None, kinds)) + _note(schema)
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        values = [value for value in schema["enum"] if value is not None]
        return _enumerated(values) + _note(schema)
    return _typed(schema) + _note(schema)


def _enumerated(values: list[Any]) -> str:
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) == len(values) > 3:
        head = [value for value in numbers if value + 1 not in numbers and value - 1 not in numbers]
        rest = [value for value in numbers if value not in head]
        return ", ".join(map(str, head)) + f" or {rest[0]} to {rest[-1]}"
    return " or ".join(code(json.dumps(value)) for value in values)


def _typed(schema: Schema) -> str:
    kind = schema.get("type", "")
    if isinstance(kind, list):
        return " or ".join(each for each in kind if each != "null")
    match kind:
        case "integer" | "number":
            return kind + _range(schema)
        case "string":
            return "string" + _size(schema, "minLength", "maxLength", "characters")
        case "array":
            inner = words(schema["items"]) if schema.get("items") else "anything"
            return f"array{_size(schema, 'minItems', 'maxItems', 'items')} of {inner}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {words(schema['additionalProperties'])}"
    return str(kind)


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f", above 0, at most {high}"
    if low is None and high is None:
        return ""
    if high is None:
        return f", at least {low}"
    return f", {low} to {_POWERS.get(high, high)}"


def _size(schema: Schema, least: str, most: str, unit: str) -> str:
    low, high = schema.get(least, 0), schema.get(most)
    if high is not None:
        return f", {low} to {high:,} {unit}" if low else f", at most {high:,} {unit}"
    return f", at least {low} {unit}" if low > 1 else ""


def _note(schema: Schema) -> str:
    return f"; {schema['description']}" if "description" in schema else ""
