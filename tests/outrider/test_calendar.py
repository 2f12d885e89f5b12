"""Dates and times of a schema are those of the calendar, in every year, and nothing else of the schema changes."""

from __future__ import annotations

import calendar
import datetime
import itertools
import json
import re
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.grammar.calendar import PATTERNS, replace_formats
from outrider.sampling_params import GrammarKind, GrammarSpec
from tests import grammars
from tests.outrider.test_grammar import COMPILER, EOS, encode

DATE = {"type": "string", "format": "date"}
EXACT = {"type": "string", "pattern": PATTERNS["date"]}


def permits(schema: Any, value: object, kind: GrammarKind = GrammarKind.JSON_SCHEMA) -> bool:
    text = schema if kind is GrammarKind.LARK else json.dumps(schema)
    token_ids = [*encode(json.dumps(value)), EOS]
    return grammars.compiled(COMPILER, GrammarSpec(kind, text)).num_valid(token_ids) == len(token_ids)


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_29_february_is_in_leap_years_alone() -> None:
    pattern = re.compile(PATTERNS["date"])
    for year in range(10_000):
        assert bool(pattern.match(f"{year:04}-02-28")) == (year > 0)
        assert bool(pattern.match(f"{year:04}-02-29")) == (year > 0 and calendar.isleap(year)), year


@pytest.mark.parametrize("year", [1, 100, 400, 1900, 1999, 2000, 2023, 2024, 9996, 9999])
def test_every_day_that_the_calendar_has_and_no_other(year: int) -> None:
    for month, day in itertools.product(range(100), repeat=2):
        text = f"{year:04}-{month:02}-{day:02}"
        assert bool(re.match(PATTERNS["date"], text)) == is_date(text), text


@pytest.mark.parametrize("text", ["00:00:00Z", "23:59:59z", "12:30:45.123456+05:30", "08:00:00-23:59", "08:00:00.5Z"])
def test_a_time_has_an_offset_and_perhaps_a_fraction(text: str) -> None:
    assert permits({"format": "time", "type": "string"}, text)
    assert permits({"format": "date-time", "type": "string"}, f"2024-02-29T{text}")
    assert permits({"format": "date-time", "type": "string"}, f"2024-02-29t{text}")
    assert not permits({"format": "date-time", "type": "string"}, f"2023-02-29T{text}")


@pytest.mark.parametrize(
    "text",
    ["12:00:00", "24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00Z", "12:00:00.Z", "12:00:00+24:00", "1:00:00Z"],
)
def test_what_is_no_time_is_not_permitted(text: str) -> None:
    assert not permits({"format": "time", "type": "string"}, text)
    assert not permits({"format": "date-time", "type": "string"}, f"2024-02-29T{text}")


@pytest.mark.parametrize("text", ["2023-02-29", "1900-02-29", "0000-02-29", "0000-01-01", "2023-04-31"])
def test_a_grammar_ends_before_a_day_that_does_not_exist(text: str) -> None:
    assert permits(DATE, "2024-02-29")
    assert not permits(DATE, text)
    assert not permits({"type": "array", "prefixItems": [DATE]}, [text])
    assert not permits({"$defs": {"day": DATE}, "$ref": "#/$defs/day"}, text)
    assert not permits(f"start: %json {json.dumps(DATE)}", text, GrammarKind.LARK)


def test_a_date_keeps_its_schemas_other_conditions() -> None:
    schema = {**DATE, "pattern": "^2", "allOf": [{"pattern": "9$"}]}
    assert permits(schema, "2024-02-29")
    for text in ("2023-02-29", "1924-02-29", "2024-02-28"):
        assert not permits(schema, text)
    assert permits({"format": "date"}, 5)  # a format speaks of strings alone


def test_what_is_not_a_schema_stays_as_it_is() -> None:
    """Values that look like schemas, and properties that are called like keywords."""
    value = {"format": "date"}
    schema: dict[str, Any] = {"properties": {"const": DATE, "properties": {"items": DATE}}, "enum": [value]}
    assert replace_formats(schema)
    assert schema == {"properties": {"const": EXACT, "properties": {"items": EXACT}}, "enum": [value]}
    untouched: dict[str, Any] = {
        "const": value,
        "default": [value],
        "properties": {"format": {"const": "date"}},
    }
    before = json.dumps(untouched)
    assert not replace_formats(untouched)
    assert json.dumps(untouched) == before
    assert permits({"const": value}, value)


@pytest.mark.parametrize("schema", [{"format": ["date"]}, {"format": "date", "allOf": 5}, {"allOf": {"format": 5}}])
def test_a_malformed_schema_is_refused_with_its_cause(schema: object) -> None:
    with pytest.raises(InvalidRequest, match="does not compile"):
        permits(schema, "2024-02-29")
