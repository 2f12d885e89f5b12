"""The real thing, for as long as a test may take; `make chaos` runs it for as long as you like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chaos.__main__ import chosen, parse
from tests.e2e.chaos.faults import FAULTS
from tests.e2e.reports import report_of
from tests.e2e.system import needs_the_pair

# Of the part with faults. Start, learning and end take about five minutes more, and the last fault and the last answer
# have a bound of ten each on a slow machine.
SECONDS = float(os.environ.get("OUTRIDER_CHAOS_SECONDS", "45"))
SECONDS_LONG = float(os.environ.get("OUTRIDER_CHAOS_SECONDS_LONG", "1800"))
AROUND_S = 900.0


def break_things(folder: Path, seconds: float, *flags: str) -> dict[str, Any]:
    """The report of a run, which must be clean."""
    return report_of("chaos", folder, seconds + AROUND_S, "--seconds", str(seconds), *flags)


@needs_the_pair
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(SECONDS + AROUND_S + 90)
def test_no_fault_loses_repeats_or_changes_a_token(tmp_path: Path) -> None:
    report = break_things(tmp_path, SECONDS, "--cases", "16", "--targets", "2", "--clients", "18")
    total = report["faults"][-1]
    assert report["is_clean"]
    assert total["num_requests"] > 0, "no fault hit anybody, so this shows nothing"
    batches = report["batches"]
    assert batches["num_lines"] or batches["num_forgotten"], "no batch was run to its end"


@needs_the_pair
@pytest.mark.long
@pytest.mark.timeout(SECONDS_LONG + AROUND_S + 90)
def test_no_fault_does_so_in_half_an_hour_with_two_at_once(tmp_path: Path) -> None:
    report = break_things(tmp_path, SECONDS_LONG, "--at-once", "2")
    assert report["is_clean"]
    assert {row["name"] for row in report["faults"]} >= {
        kind.name for kind in chosen([]) if kind.why_not() is None and not kind.needs_ranks
    }


@needs_the_pair
@pytest.mark.long
@pytest.mark.timeout(60 + AROUND_S + 90)
def test_a_minute_without_redis_is_noticed_by_no_client(tmp_path: Path) -> None:
    report = break_things(tmp_path, 60.0, "--only", "Redis cut for a minute", "--faults", "1")
    total = report["faults"][-1]
    assert report["is_clean"]
    assert total["num_requests"] > 100, "as many were in flight meanwhile"


def test_faults_have_names_of_their_own_and_are_found_by_them() -> None:
    assert len({kind.name for kind in FAULTS}) == len(FAULTS)
    assert all(kind.__doc__ for kind in FAULTS), "--list says what each of them is"
    assert [kind.name for kind in chosen(["target sigkill"])] == ["target SIGKILL"]
    assert {kind.part for kind in chosen(["redis"])} == {"redis"}
    assert chosen([]) == [kind for kind in FAULTS if not kind.is_rare]


@pytest.mark.parametrize("words", [["--only", "earthquake"], ["--at-once", "3"]], ids=["no such fault", "too many"])
def test_what_cannot_be_done_is_refused_before_anything_starts(words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(words)
    assert refused.value.code == 2
