"""Writes large answers as JSON piece by piece. Pure.

`json.dumps` is one call of C code that keeps the interpreter's lock: for a million log probabilities no other thread of
this process would run for 1 s. Between two pieces other threads can run.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Final

_ITEMS_AT_ONCE: Final = 256
_VALUES_AT_ONCE: Final = 1024  # nested ones too; a piece for each would take more memory than the values


def to_json_text(value: Any) -> str:
    """Writes the same text as `_dumped`. Raises ValueError for NaN and infinities."""
    pieces: list[str] = []
    _write(value, pieces)
    return "".join(pieces)


def finite(value: Any) -> Any:
    """Returns a copy of what a client sent that can be written as JSON again: Python reads 1e999 as infinity, which
    becomes the largest double, and NaN null. It is nested no deeper than a body may be."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else math.copysign(sys.float_info.max, value)


def _write(value: Any, pieces: list[str]) -> None:
    if _is_small(value):
        pieces.append(_dumped(value))
    elif isinstance(value, dict) and len(value) <= _ITEMS_AT_ONCE and any(map(_is_container, value.values())):
        mark = "{"
        for name, item in value.items():
            pieces.append(f"{mark}{_dumped(name)}:")
            _write(item, pieces)
            mark = ","
        pieces.append("}")
    elif isinstance(value, list) and len(value) > _ITEMS_AT_ONCE:
        pieces.append("[")
        for start in range(0, len(value), _ITEMS_AT_ONCE):
            pieces.append("," if start else "")
            pieces.append(_dumped(value[start : start + _ITEMS_AT_ONCE])[1:-1])
        pieces.append("]")
    elif isinstance(value, list) and any(map(_is_container, value)):
        for index, item in enumerate(value):
            pieces.append("," if index else "[")
            _write(item, pieces)
        pieces.append("]")
    else:
        pieces.append(_dumped(value))


def _is_small(value: Any) -> bool:
    num_values, pending = 0, [value]
    while pending and num_values <= _VALUES_AT_ONCE:
        each = pending.pop()
        items = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        num_values += len(items)
        pending += filter(_is_container, items)
    return num_values <= _VALUES_AT_ONCE


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
