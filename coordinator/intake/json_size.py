"""Bounds the size of a JSON text before it is parsed, and of JSON schemas without writing them out. Pure.

The parser is one call of C code that keeps the interpreter's lock, so a thread does not help: while it builds a million
values, nothing else in this process runs. Its time depends on the number of values and the length of numbers, hardly on
the length of strings. Counting takes 10 ms for the longest permitted body.
"""

from __future__ import annotations

from typing import Any, Final

from outrider.errors import InvalidRequest
from outrider.sampling_params import MAX_GRAMMAR_BYTES

ITEMS_MAX: Final = (1 << 18) + (1 << 16)
"""Most commas between values, hence values: the token ids of the longest prompt, and those of other fields."""
PARTS_MAX: Final = 1 << 16
"""Most objects, lists and member names, which take longer to parse."""
BARE_BYTES_MAX: Final = 1 << 20
"""Most bytes outside of strings, besides ITEM_BYTES for each value: numbers of thousands of digits parse slowly."""
ITEM_BYTES: Final = 8
"""The length of a token id of six digits, a comma and a space."""
UNCOUNTED_BYTES_MAX: Final = 1 << 15
"""A text up to this length is not counted, since it is parsed quickly."""


def check_json_size(raw: bytes, parameter: str | None = None, what: str = "the body") -> None:
    """Refuses a text that would take too long to parse. Raises InvalidRequest. A text that is not
    JSON is refused here or by the parser."""
    if len(raw) <= UNCOUNTED_BYTES_MAX or _is_small(raw):  # as if it had no strings
        return
    # Without escapes each quotation mark begins or ends a string, so every second piece is outside of strings.
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    if bare.count(b'"') > 2 * (ITEMS_MAX + PARTS_MAX) or not _is_small(b"".join(bare.split(b'"')[::2])):
        raise InvalidRequest(
            parameter,
            f"{what} holds too much JSON; permitted: {ITEMS_MAX} values, {PARTS_MAX} objects, lists and members "
            f"together, and {BARE_BYTES_MAX} bytes outside of strings besides {ITEM_BYTES} for each value",
        )


def _is_small(bare: bytes) -> bool:
    num_items = bare.count(b",")
    return (
        num_items <= ITEMS_MAX
        and len(bare) <= BARE_BYTES_MAX + ITEM_BYTES * num_items
        and bare.count(b"{") + bare.count(b"[") + bare.count(b":") <= PARTS_MAX
    )


def check_schema_sizes(parameter: str, *schemas: Any) -> None:
    """Refuses schemas that together are longer than a grammar may be. Raises InvalidRequest naming the parameter.

    It stops once that is certain: writing out a body of 8 MB to measure it would block the event loop for 0.5 s.
    """
    left = MAX_GRAMMAR_BYTES
    pending = list(schemas)
    while pending:
        value = pending.pop()
        left -= 2  # quotes, brackets, or one character and a comma: a lower bound
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, list | dict):
            if len(value) > left:
                left = -1
            else:
                pending += [*value, *value.values()] if isinstance(value, dict) else value
        if left < 0:
            raise InvalidRequest(parameter, f"{parameter}: the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")
