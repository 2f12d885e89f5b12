"""Whether JSON values are too large to be worth writing out. Pure."""

from __future__ import annotations

from typing import Any

from outrider.errors import InvalidRequest
from outrider.sampling_params import MAX_GRAMMAR_BYTES


def check_schema_sizes(parameter: str, *schemas: Any) -> None:
    """Raises InvalidRequest, naming the parameter, for schemas that together are longer than a grammar may be.

    It stops where that is certain: writing the eight megabytes that a body may have, to measure them, would keep the
    event loop for half a second.
    """
    left = MAX_GRAMMAR_BYTES
    pending = list(schemas)
    while pending:
        value = pending.pop()
        left -= 2  # quotes, brackets, or one character and a comma: never more than it will take
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, list):
            if len(value) <= left:
                pending += value
            else:
                left = -1
        elif isinstance(value, dict):
            if len(value) <= left:
                pending += value.keys()
                pending += value.values()
            else:
                left = -1
        if left < 0:
            raise InvalidRequest(
                parameter, f"{parameter}: the JSON schema is longer than {MAX_GRAMMAR_BYTES} bytes"
            )
