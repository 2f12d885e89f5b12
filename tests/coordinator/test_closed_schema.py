"""Objects of a schema get the declared properties only, unless the schema permits or combines more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.intake.closed_schema import closed, closed_grammar
from outrider.sampling_params import GrammarKind, GrammarSpec

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"properties": {"x": OPEN}}, {"properties": {"x": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/o", "$defs": {"o": OPEN}}, {"$ref": "#/$defs/o", "$defs": {"o": CLOSED}}),
        ({"additionalProperties": OPEN}, {"additionalProperties": CLOSED}),
    ],
    ids=["plain", "items", "nested", "alternatives", "definitions", "any property"],
)  # fmt: skip
def test_an_object_that_declares_properties_gets_no_others(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": {"type": "string"}},
        OPEN | {"patternProperties": {"^x": {}}},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        OPEN | {"anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"allOf": [{"$ref": "#/$defs/o"}, {"properties": {"b": {}}}], "$defs": {"o": OPEN}},
        OPEN | {"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"b": {}}}}},
    ],
)
def test_what_permits_or_combines_more_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


def test_only_schemas_that_can_be_read_are_changed() -> None:
    assert json.loads(closed_grammar(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(OPEN))).text) == CLOSED
    for kept in (
        GrammarSpec(GrammarKind.REGEX, "{}"),
        GrammarSpec(GrammarKind.JSON_SCHEMA, "{"),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"items":' * 10_000 + "{}" + "}" * 10_000),
    ):
        assert closed_grammar(kept) == kept
