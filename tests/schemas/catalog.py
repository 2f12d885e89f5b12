"""Fifty JSON schemas by name.

Every one is bounded, so that even a model with random weights comes to an end: strings have a maxLength, arrays a
maxItems, numbers bounds on both sides and a number of digits, objects no open additionalProperties, recursion a depth.
"""

from __future__ import annotations

from typing import Any

WORD: dict[str, Any] = {"type": "string", "maxLength": 8}
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others; all are required unless told otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items: Any, min_items: int, max_items: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


SCHEMAS: dict[str, dict[str, Any]] = {
    # Scalars.
    "boolean": {"type": "boolean"},
    "boolean that must be false": {"type": "boolean", "const": False},
    "zero, which is not false": {"type": "integer", "enum": [0, 1]},
    "null": {"type": "null"},
    "short string": {"type": "string", "maxLength": 12},
    "string of a length": {"type": "string", "minLength": 5, "maxLength": 5},
    "string in bounds": {"type": "string", "minLength": 3, "maxLength": 9},
    "empty string": {"type": "string", "maxLength": 0},
    # Numbers.
    "integer in bounds": {"type": "integer", "minimum": -273, "maximum": 1000},
    "integer with exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    "negative integer": {"type": "integer", "minimum": -999, "maximum": -1},
    "integer that is a multiple": {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 7},
    "one integer": {"type": "integer", "minimum": 42, "maximum": 42},
    "number in quarters": {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
    "number among a few": {"enum": [0.5, 1, 2.25, -3]},
    # Enumerations and constants.
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of one beginning": {"enum": ["car", "cart", "carton", "cat"]},
    "enum of everything": {"enum": ["a", 1, None, True, {"k": [1, 2]}, [3]]},
    "const object": {"const": {"version": 2, "tags": ["x", "y"]}},
    "const with a control token's text": {"const": "a <|eos|> is text"},
    "const with quotes and newlines": {"const": 'say "hi"\n\\ tab\t'},
    # Unicode.
    "unicode constants": {"enum": ["žluťoučký kůň", "日本語", "🦜🚀", "Ω≈ç√"]},
    "unicode property names": record(größe=DIGIT, 名前=WORD),
    # Patterns and formats.
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern with choices": {"type": "string", "pattern": "^(GET|POST|PUT) /[a-z]{1,6}$"},
    "pattern and length": {"type": "string", "pattern": "^[ab]*$", "minLength": 2, "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "date-time": {"type": "string", "format": "date-time", "maxLength": 25},
    # Arrays.
    "array of integers": array({"type": "integer", "minimum": 0, "maximum": 99}, 2, 5),
    "array of strings": array(WORD, 0, 3),
    "array of arrays": array(array(DIGIT, 3, 3), 3, 3),
    "array of a length": array({"type": "boolean"}, 8, 8),
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {
        "type": "array",
        "prefixItems": [WORD, DIGIT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "tuple with a tail": {
        "type": "array",
        "prefixItems": [{"const": "sum"}],
        "items": DIGIT,
        "minItems": 2,
        "maxItems": 4,
    },
    # Objects.
    "flat object": record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "nested objects": record(
        user=record(name=WORD, address=record(city=WORD, zip={"pattern": "^[0-9]{5}$", "type": "string"}))
    ),
    "some optional": record(["id"], id=DIGIT, note=WORD, done={"type": "boolean"}),
    "all optional": record([], a=DIGIT, b=DIGIT, c=DIGIT),
    "empty object": record(),
    "map by pattern": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "array of objects": array(record(x=DIGIT, y=DIGIT, label={"enum": ["a", "b"]}), 1, 4),
    # Unions.
    "nullable": record(nickname={"type": ["string", "null"], "maxLength": 6}),
    "anyOf": {"anyOf": [DIGIT, WORD, array(DIGIT, 1, 2)]},
    "oneOf with a tag": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=DIGIT),
            record(kind={"const": "square"}, side=DIGIT),
        ]
    },
    # References.
    "references": {
        **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
        "$defs": {"point": record(x=DIGIT, y=DIGIT)},
    },
    "tree of bounded depth": {
        "$ref": "#/$defs/level0",
        "$defs": {
            **{
                f"level{depth}": record(value=DIGIT, children=array({"$ref": f"#/$defs/level{depth + 1}"}, 0, 2))
                for depth in range(3)
            },
            "level3": record(value=DIGIT),
        },
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}, {"multipleOf": 2}]},
}
