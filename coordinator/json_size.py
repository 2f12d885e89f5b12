"""Bounds of a JSON text, counted before it is parsed. Pure.

The parser is one call of C code that keeps the interpreter's lock to its end, so no thread helps: while it builds a
million values, nothing else in this process runs. What it takes depends on the number of values and the length of
numbers, hardly on the length of strings. Counting takes a hundredth of a second for the longest body that may come.
"""

from __future__ import annotations

from typing import Final

from outrider.errors import InvalidRequest

ITEMS_MAX: Final = 1 << 18
"""Commas between values, so about as many values: as many token ids as a prompt may have."""
PARTS_MAX: Final = 1 << 16
"""Objects, lists and names of objects' members, which take longer."""
BARE_BYTES_MAX: Final = 2 << 20
"""Everything that is not within a string: numbers with thousands of digits are slow to read."""
UNCOUNTED_BYTES_MAX: Final = 1 << 15
"""A text that is shorter is within all bounds, or parsed in no time."""


def check_json_size(raw: bytes, parameter: str | None = None, what: str = "the body") -> None:
    """Raises InvalidRequest for a text that would take too long to parse. It need not be JSON; then it may be refused
    either here or by the parser."""
    if len(raw) <= UNCOUNTED_BYTES_MAX or _is_small(raw):  # counted as if there were no strings
        return
    # Without escapes a quotation mark begins a string or ends one, and every second piece is outside of strings.
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    if bare.count(b'"') > 2 * (ITEMS_MAX + PARTS_MAX):
        raise _too_large(parameter, what)
    if not _is_small(b"".join(bare.split(b'"')[::2])):
        raise _too_large(parameter, what)


def _is_small(bare: bytes) -> bool:
    return (
        len(bare) <= BARE_BYTES_MAX
        and bare.count(b",") <= ITEMS_MAX
        and bare.count(b"{") + bare.count(b"[") + bare.count(b":") <= PARTS_MAX
    )


def _too_large(parameter: str | None, what: str) -> InvalidRequest:
    return InvalidRequest(
        parameter,
        f"{what} holds too much JSON: at most {ITEMS_MAX} values, {PARTS_MAX} objects, lists and members, and "
        f"{BARE_BYTES_MAX} bytes outside of strings",
    )
