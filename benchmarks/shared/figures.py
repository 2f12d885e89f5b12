"""Medians, quartiles and percentiles over rounds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Median and quartiles to four digits; None of an empty list."""
    known = sorted(values)
    if not known:
        return None
    low, middle, high = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return {"median": rounded(middle), "quartiles": [rounded(low), rounded(high)], "rounds": len(known)}


def rounded(value: float) -> float:
    """A value to four digits."""
    return float(f"{value:.4g}")


def with_quartiles(name: str, values: Sequence[float], digits: int) -> dict[str, Any]:
    """The figures `name` and `name_quartiles`; a single value is median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return {
        name: round(statistics.median(values), digits),
        f"{name}_quartiles": [round(low, digits), round(high, digits)],
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; nan of an empty list."""
    ordered = sorted(values) or [float("nan")]
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
