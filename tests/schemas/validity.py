"""Whether a text is JSON of a schema, formats included."""

from __future__ import annotations

import datetime
import json
from typing import Any

import jsonschema

_CHECKER = jsonschema.FormatChecker(["uuid", "ipv4"])


@_CHECKER.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    if isinstance(value, str):
        datetime.date.fromisoformat(_in_our_years(value))
    return True


@_CHECKER.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    if isinstance(value, str):
        datetime.datetime.fromisoformat(_in_our_years(value).upper().replace(":60", ":59"))  # a leap second
    return True


def _in_our_years(value: str) -> str:
    """RFC 3339 has a year 0, which was a leap year like 2000; Python's calendar begins with 1."""
    return "2000" + value[4:] if value.startswith("0000-") else value


def check(text: str, schema: dict[str, Any]) -> None:
    """Raises ValueError or jsonschema.ValidationError when it is not."""
    jsonschema.Draft202012Validator(schema, format_checker=_CHECKER).validate(json.loads(text))
