"""The real thing, for as long as a test may take; `make fuzz` sends ten thousand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.deployment import DEMO_DRAFT, DEMO_TARGET
from tests.e2e.fuzz.__main__ import parse
from tests.e2e.fuzz.experiment import MAKERS
from tests.e2e.system import ROOT, environment

NUM_INPUTS = 300
SEED = 22
SECONDS_MAX = 240.0  # on a machine with other work; alone it takes a minute


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(SECONDS_MAX + 90)
@pytest.mark.xdist_group("system")
@pytest.mark.skipif(
    not (DEMO_TARGET.is_dir() and DEMO_DRAFT.is_dir()), reason="the demo pair is not in this checkout"
)
def test_no_bad_input_is_answered_wrongly_or_leaves_anything(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.e2e.fuzz", "--inputs", str(NUM_INPUTS), "--seed", str(SEED)]
    words += ["--tolerate-lag", "--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=said, stderr=said)
        try:
            status: int | None = process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            status = None
        said.seek(0)
        print(text := said.read())
    assert status == 0, text[-8000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_right"]
    assert report["num_inputs"] == NUM_INPUTS
    assert len(report["answers"]) == len(MAKERS) + 1, (
        "one kind of input was not sent, or no good request in between"
    )


@pytest.mark.parametrize(
    "words",
    [["--inputs", "0"], ["--only", "earthquakes"], ["--replay", "/nowhere"], ["--clients", "0"]],
    ids=["none", "no such kind", "no such file", "nobody"],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(words)
    assert refused.value.code == 2
