"""Outcomes of the strangers' requests, counted by kind of fault, and the table made of them. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.chaos.ledger import p50_and_p99, percentile
from tests.e2e.chaos.stranger import Ending, Seen
from tests.e2e.tables import add_up, markdown_table

EXAMPLES_MAX = 5
"""The number of details that are kept of each way to end badly, for each kind of fault."""


@dataclass
class StrangerRow:
    """One kind of fault."""

    name: str
    endings: Counter[Ending] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by status and code, such as "503 unavailable"
    num_told: int = 0  # of those broken off: an error in the stream said why
    num_tried_again: int = 0  # requests of which the package made more than one
    num_saved: int = 0  # of these, complete
    waits_s: list[float] = field(default_factory=list)  # longest of each request
    examples: dict[Ending, list[str]] = field(default_factory=dict)

    @property
    def num_asked(self) -> int:
        return self.endings.total()

    def add(self, seen: Seen) -> None:
        self.endings[seen.ending] += 1
        self.waits_s.append(seen.longest_wait_s)
        if seen.num_tries > 1:
            self.num_tried_again += 1
            self.num_saved += seen.ending is Ending.COMPLETE
        if seen.ending is Ending.REFUSED:
            self.refusals[f"{seen.status} {seen.code or ''}".strip()] += 1
        self.num_told += seen.is_told
        if seen.ending is not Ending.COMPLETE:
            kept = self.examples.setdefault(seen.ending, [])
            if len(kept) < EXAMPLES_MAX:
                kept.append(seen.detail)


class StrangerTable:
    """Collects the outcomes of strangers' requests as they end."""

    def __init__(self) -> None:
        self.rows: dict[str, StrangerRow] = {}

    def add(self, fault: str, seen: Seen) -> None:
        """`fault` is the kind that the request met."""
        self.rows.setdefault(fault, StrangerRow(fault)).add(seen)

    def total(self) -> StrangerRow:
        """All faults together, without examples."""
        return add_up(StrangerRow("**all**"), self.rows.values(), leaving_out=("name", "examples"))

    @property
    def silent(self) -> list[str]:
        """Descriptions of incomplete answers that no client could have noticed; there must be none."""
        return [
            f"{row.name}: {row.endings[Ending.SILENTLY_SHORT]} silently short, such as: {examples[0]}"
            for row in self._sorted()
            if (examples := row.examples.get(Ending.SILENTLY_SHORT))
        ]

    def markdown(self) -> str:
        """The table of `docs/benchmarks/faults.md`."""
        titles = (
            "Stranger during | asked | complete | refused (explicit) | unanswered | broken off (told why) "
            "| silently short | hung | tried again, of these complete | longest wait p50 / p99"
        )
        cells = [
            [
                row.name,
                row.num_asked,
                row.endings[Ending.COMPLETE],
                _with_reasons(row.endings[Ending.REFUSED], row.refusals),
                row.endings[Ending.UNANSWERED],
                f"{row.endings[Ending.BROKEN_OFF]} ({row.num_told})",
                row.endings[Ending.SILENTLY_SHORT],
                row.endings[Ending.HUNG],
                f"{row.num_tried_again}, {row.num_saved}",
                p50_and_p99(row.waits_s),
            ]
            for row in [*self._sorted(), self.total()]
        ]
        return markdown_table(titles, cells)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": row.name.strip("*"),
                "num_asked": row.num_asked,
                **{f"num_{each.name.lower()}": row.endings[each] for each in Ending},
                "num_broken_off_told_why": row.num_told,
                "num_tried_again": row.num_tried_again,
                "num_tried_again_complete": row.num_saved,
                "refusals": dict(row.refusals),
                "longest_wait_p50_s": percentile(row.waits_s, 50),
                "longest_wait_p99_s": percentile(row.waits_s, 99),
                "examples": {each.value: told for each, told in row.examples.items()},
            }
            for row in [*self._sorted(), self.total()]
        ]

    def _sorted(self) -> list[StrangerRow]:
        return [self.rows[name] for name in sorted(self.rows)]


def _with_reasons(num: int, refusals: Counter[str]) -> str:
    if not num:
        return "0"
    return f"{num} ({', '.join(f'{count} × {reason}' for reason, count in sorted(refusals.items()))})"
