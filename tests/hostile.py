"""Input that nobody who means well would send, and how tests try it out.

`try_out` runs a check on examples: on some that are the same everywhere as part of `make test`, on many that are new
each time where a test is `long`. `messages` makes hostile messages of any kind that the contract knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

WAIT_S: Final = 30.0
"""Longer than anything here may take, on a busy machine too."""
LATE_MS: Final = 10_000
"""A request with a deadline below this may end with 504 without a fault of the server; no other request may."""
LONG: Final = 40
EFFORTS: Final = pytest.mark.parametrize(
    "effort", [1, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"]
)


def try_out(check: Callable[..., None], effort: int, num_examples: int, **examples: SearchStrategy[Any]) -> None:
    """Calls `check` with examples by name, `num_examples` times, or `effort` times as often."""
    settings(
        max_examples=num_examples * effort,
        derandomize=effort == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(given(**examples)(check))()


# Values at the edges of what a field can hold, and beyond what it may.
UINT32 = st.sampled_from([0, 1, 2, 3, 63, 64, 65, 2**16, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
INT32 = st.sampled_from([0, 1, -1, 1000, -1001, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1)
UINT64 = st.sampled_from([0, 1, 2**53 + 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
ENUM = st.sampled_from([0, 1, 2, 77, -1, 2**31 - 1, -(2**31)])
FLOAT = st.sampled_from(
    [0.0, -0.0, 1.0, 0.5, 1e-45, -1e-45, 3.4e38, -3.4e38, math.nan, math.inf, -math.inf]
) | st.floats(width=32)
# No surrogates: what cannot be UTF-8 never becomes a message, see `mangled`.
TEXT = st.sampled_from(
    ["", "a", "\0", "x" * 64, "x" * 65, "é" * 65, "\U0010ffff", "a\r\nb: c", "%s%n", "'", "[]"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
MANY: Final = 100_000

_SCALARS: Final[dict[int, SearchStrategy[Any]]] = {
    FieldDescriptor.TYPE_UINT32: UINT32,
    FieldDescriptor.TYPE_INT32: INT32,
    FieldDescriptor.TYPE_UINT64: UINT64,
    FieldDescriptor.TYPE_FLOAT: FLOAT,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: TEXT,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=300),
    FieldDescriptor.TYPE_ENUM: ENUM,
}


def messages(kind: type[Message], **given_fields: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Messages of a kind whose fields hold anything, or what `given_fields` says; each may be left out."""
    return _fields(kind.DESCRIPTOR, given_fields).map(lambda fields: kind(**fields))


def _fields(descriptor: Any, given_fields: dict[str, SearchStrategy[Any]]) -> SearchStrategy[Any]:
    fields = {
        field.name: given_fields[field.name] if field.name in given_fields else _values(field)
        for field in descriptor.fields
    }
    # One of several that exclude each other: the last one stands.
    return st.fixed_dictionaries({}, optional=fields)


def _values(field: Any) -> SearchStrategy[Any]:
    own = field.message_type
    if own is not None and own.GetOptions().map_entry:
        return st.dictionaries(_values(own.fields_by_name["key"]), _values(own.fields_by_name["value"]), max_size=5)
    value = _fields(own, {}) if own is not None else _SCALARS[field.type]
    if not field.is_repeated:
        return value
    some = st.lists(value, max_size=5)
    if own is not None:
        return some
    return some | st.builds(lambda each, count: [each] * count, value, st.sampled_from([65, 257, 1025, MANY]))


@st.composite
def mangled(draw: st.DrawFn, message: SearchStrategy[Any]) -> bytes:
    """A message's bytes with some of them changed, left out or put in: mostly no message any more."""
    raw = bytearray(draw(message).SerializeToString()[:4096])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(raw)))
        raw[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(raw)
