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
        datetime.date.fromisoformat(value)
    return True


@_CHECKER.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    if isinstance(value, str):
        datetime.datetime.fromisoformat(value.upper())
    return True


def check(text: str, schema: dict[str, Any]) -> None:
    """Raises ValueError or jsonschema.ValidationError when it is not."""
    jsonschema.Draft202012Validator(schema, format_checker=_CHECKER).validate(json.loads(text))
