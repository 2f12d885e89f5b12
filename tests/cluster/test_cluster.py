"""The rendered chart comes up without a cluster, answers, keeps strangers out, and leaves nothing (`make cluster`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line.checkout import ROOT
from tests.cluster.isolation import why_not
from tests.e2e.system import needs_the_pair


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_the_pair
def test_the_chart_comes_up_answers_and_leaves_nothing(tmp_path: Path) -> None:
    """The run itself asserts all of it, and that no process, device, mount or control group is left."""
    if reason := why_not():
        pytest.skip(reason)
    words = [sys.executable, "-m", "tests.cluster", "--short", f"--logs={tmp_path}"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=220)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert "everything has ended" in result.stdout
