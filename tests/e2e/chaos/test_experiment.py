"""Ending a run before its time."""

from __future__ import annotations

import time
from pathlib import Path

from tests.e2e.chaos.experiment import Experiment, Plan


def test_faults_that_have_begun_can_be_ended_early_once(tmp_path: Path) -> None:
    said: list[str] = []
    experiment = Experiment(Plan(faults=[], seed=1, num_faults_max=1, seconds_max=60.0), tmp_path, said.append)
    assert not experiment.end_early(), "there are none yet: whoever wants to stop means all of it"
    experiment._deadline_s = time.monotonic() + 60.0
    assert experiment.end_early()
    assert said == ["No more faults; the report follows."]
    assert not experiment.end_early()
