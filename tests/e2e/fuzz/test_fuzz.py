"""The real thing, for as long as a test may take; `make fuzz` sends ten thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fuzz.__main__ import parse
from tests.e2e.fuzz.experiment import MAKERS
from tests.e2e.reports import report_of
from tests.e2e.system import needs_the_pair

NUM_INPUTS = 300
SEED = 22
SECONDS_MAX = 240.0  # on a machine with other work; alone it takes a minute


@needs_the_pair
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(SECONDS_MAX + 90)
def test_no_bad_input_is_answered_wrongly_or_leaves_anything(tmp_path: Path) -> None:
    report = report_of(
        "fuzz", tmp_path, SECONDS_MAX, "--inputs", str(NUM_INPUTS), "--seed", str(SEED), "--tolerate-lag"
    )
    assert report["is_right"]
    assert report["num_inputs"] == NUM_INPUTS
    assert len(report["answers"]) == len(MAKERS) + 1, "one kind of input was not sent, or no good request in between"


@pytest.mark.parametrize(
    "words",
    [["--inputs", "0"], ["--only", "earthquakes"], ["--replay", "/nowhere"], ["--clients", "0"]],
    ids=["none", "no such kind", "no such file", "nobody"],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(words)
    assert refused.value.code == 2
