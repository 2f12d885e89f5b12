"""Tables of the documentation, from rows of values. Pure."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

RowT = TypeVar("RowT", bound=Any)  # a dataclass


def markdown_table(titles: str, rows: Iterable[Sequence[object]]) -> str:
    """`titles` of the columns, with " | " between them."""
    lines = [f"| {titles} |", "|---" * len(titles.split(" | ")) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def add_up(total: RowT, rows: Iterable[RowT], leaving_out: Container[str]) -> RowT:
    """`total`, with every other field of the rows added to its own: numbers, counters and lists."""
    for row in rows:
        for each in fields(row):
            if each.name not in leaving_out:
                summed = operator.iadd(getattr(total, each.name), getattr(row, each.name))
                setattr(total, each.name, summed)
    return total
