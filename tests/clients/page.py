"""The table of clients in the documentation, which the run writes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from docs.generate.markdown import table

COLUMNS: Final = ("Client", "Package", "Run against Outrider", "Result", "Day", "Commit")
_INTRODUCTION: Final = """\
<!-- Written by `python -m tests.clients --write`; change the clients in `tests/clients/`, not this page. -->

# Clients that are tested

Other people's clients, not modified and each in an environment of its own, against `outrider serve` with the demo pair.
[Testing](../development/testing.md#clients) says how to run them; the program of each one is in `tests/clients/`.
[Clients](../guides/clients.md) and [Responses and Messages](../guides/other-apis.md) say what is served.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One client's last run."""

    client: str
    package: str
    run: str
    result: str
    day: str
    commit: str

    def cells(self) -> tuple[str, ...]:
        return (self.client, self.package, self.run, self.result, self.day, self.commit)


def read_rows(page: str) -> dict[str, Row]:
    """The rows of a written page by client; none for a page without the table."""
    rows: dict[str, Row] = {}
    for line in page.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(COLUMNS) and cells[0] != COLUMNS[0] and set(cells[0]) != {"-"}:
            rows[cells[0]] = Row(*cells)
    return rows


def write_page(names: Sequence[str], old: Mapping[str, Row], new: Mapping[str, Row]) -> str:
    """The page with a row for each of these clients that was ever run, by name, new rows in place of old ones."""
    rows = {**old, **new}
    known = sorted((name for name in names if name in rows), key=str.casefold)
    return f"{_INTRODUCTION}\n{table(COLUMNS, (rows[name].cells() for name in known))}\n"
