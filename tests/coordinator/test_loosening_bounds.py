"""Schemas with extreme numbers, or of which much must be compared, are loosened in bounds."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.intake.loosening import disjoint_schemas
from coordinator.intake.loosening.disjoint_schemas import EFFORT_MAX, DisjointSchemas
from coordinator.intake.loosening.loosened_schema import COUNT_MAX, loosened
from coordinator.intake.loosening.schema_references import References
from tests.coordinator.test_loosened_schema import refusal


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, 10**400, -(10**400)], ids=["inf", "-inf", "nan", "huge", "-huge"]
)
@pytest.mark.parametrize(
    "name",
    [
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "default", "x-own",
    ],
)  # fmt: skip
def test_numbers_that_no_double_holds_are_dropped(name: str, value: Any) -> None:
    made = loosened({"properties": {"a": {name: value}, "b": {"enum": [{"c": [value]}]}}})
    assert made.dropped == (f"properties.a.{name}", "properties.b.enum")
    assert not refusal(made.schema)


@pytest.mark.parametrize("name", ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"])
def test_counts_beyond_those_of_a_grammar_are_dropped(name: str) -> None:
    for value in (True, -1, 0.5, COUNT_MAX + 1, 2**63 - 1, 1e30):
        assert loosened({name: value}) == ({}, (name,))
    assert loosened({name: COUNT_MAX}) == ({name: COUNT_MAX}, ())
    assert not refusal({name: COUNT_MAX})


def _shared(num_lists: int, num_values: int) -> Any:
    """Many lists of alternatives that share their definitions."""
    width = 64
    definitions = {f"d{index}": {"enum": [f"{index}_{each}" for each in range(num_values)]} for index in range(width)}
    options = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    return {"$defs": definitions, "properties": {f"o{index}": {"oneOf": [*options]} for index in range(num_lists)}}


def test_alternatives_are_read_once_however_many_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    num_written = 0

    def dumps(value: Any, **options: Any) -> str:
        nonlocal num_written
        num_written += 1
        assert num_written <= 64 * 200
        return json.dumps(value, **options)

    monkeypatch.setattr(disjoint_schemas, "json", SimpleNamespace(dumps=dumps))
    made = loosened(_shared(70, 200))
    assert num_written == 64 * 200
    assert "properties.o0.oneOf" not in made.dropped  # it is certain
    assert "properties.o30.oneOf" in made.dropped  # which takes too much


def test_the_effort_for_one_schema_is_bounded() -> None:
    schema = _shared(1, 200)
    disjoint = DisjointSchemas(References(schema))
    for _ in range(70):
        disjoint.exclude_each_other(schema["properties"]["o0"]["oneOf"])
    assert disjoint.effort <= EFFORT_MAX + 1000


def test_a_long_reference_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_followed = 0

    def unquote(text: str) -> str:
        nonlocal num_followed
        num_followed += 1
        return text

    monkeypatch.setattr("coordinator.intake.loosening.schema_references.unquote", unquote)
    loosened({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {}}, "anyOf": [{"$ref": "#/$defs/a"} for _ in range(1000)]})
    assert num_followed <= 4  # two references, in what was sent and in what is made
