"""The rendered chart comes up without a cluster, answers, keeps strangers out, and leaves nothing (`make cluster`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line.checkout import ROOT
from tests.cluster.isolation import why_not
from tests.e2e.system import needs_the_pair

pytestmark = needs_the_pair


def run(logs: Path, *flags: str, timeout_s: float) -> None:
    """The run itself asserts all of it, and that no process, device, mount or control group is left."""
    if reason := why_not():
        pytest.skip(reason)
    words = [sys.executable, "-m", "tests.cluster", *flags, f"--logs={logs}"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert "everything has ended" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_chart_comes_up_answers_and_leaves_nothing(tmp_path: Path) -> None:
    run(tmp_path, "--short", timeout_s=220)


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("kind", ["--ray", "--pairs"])
def test_coordinators_on_ray_and_pairs_that_come_and_go_serve(tmp_path: Path, kind: str) -> None:
    run(tmp_path, kind, timeout_s=1200)
