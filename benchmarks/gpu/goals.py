"""Goals of a session on a GPU, and whether its figures meet them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

BANDWIDTH_LEAST: Final = 0.8
EIGHT_OVER_ONE_MOST: Final = 1.15

Parts = Mapping[str, Mapping[str, Any]]
"""By a part's name: its status, seconds, error and figures."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, and what was found of it."""

    words: str
    is_met: bool | None  # None: not measured
    found: str


def figure(parts: Parts, part: str, *names: str) -> Any:
    """A figure of a part by the names that lead to it; None where there is none."""
    found: Any = parts.get(part, {}).get("figures", {})
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def goals(parts: Parts) -> list[Goal]:
    """All goals, in the order of the page."""
    failed, passed = (figure(parts, "tests", name) for name in ("failed", "passed"))
    changed, self_test = (figure(parts, "engine", name) for name in ("changed_compositions", "self_test_failures"))
    outputs = [
        found
        for part in ("pair", "own_gpu", "cpu_draft")
        for found in (
            figure(parts, part, "equal_outputs"),
            *(figure(parts, part, streams, "same_outputs") for streams in ("1", "8")),
        )
        if found is not None
    ]
    return [
        Goal(
            "tests/engine/test_cuda.py is green",
            None if failed is None else failed == 0 and bool(passed),
            "not run" if failed is None else f"{passed} passed, {failed} failed",
        ),
        _bounded(
            f"a plain step uses at least {BANDWIDTH_LEAST:.0%} of the measured bandwidth",
            figure(parts, "engine", "share_of_measured_bandwidth"),
            lambda share: share >= BANDWIDTH_LEAST,
            "{:.0%}",
        ),
        _bounded(
            f"a step of 8 rows takes at most {EIGHT_OVER_ONE_MOST}× one of 1 row",
            figure(parts, "engine", "eight_over_one"),
            lambda ratio: ratio <= EIGHT_OVER_ONE_MOST,
            "{:.2f}×",
        ),
        Goal(
            "bits of a sequence are equal in any batch composition",
            None if changed is None else not changed and not self_test,
            "not measured" if changed is None else _named([*changed, *(self_test or [])]),
        ),
        Goal(
            "greedy outputs through workers are equal with the draft and without it",
            all(outputs) if outputs else None,
            f"{sum(outputs)} of {len(outputs)} comparisons equal" if outputs else "not measured",
        ),
    ]


def _bounded(words: str, value: Any, is_met: Callable[[float], bool], form: str) -> Goal:
    if not isinstance(value, (int, float)):
        return Goal(words, None, "not measured")
    return Goal(words, is_met(value), form.format(value))


def _named(failures: list[str]) -> str:
    return "changed: " + "; ".join(failures) if failures else "all equal"
