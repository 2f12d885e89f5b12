"""A process under a clock of ours sees the time jump, and no other clock with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.chaos.clocks import Clock, find_library

CODE = "import time; print(time.time(), time.monotonic())"


@pytest.mark.skipif(find_library() is None, reason="libfaketime is not installed")
def test_a_clock_jumps_for_those_who_go_by_it(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock", find_library())
    clock.set(3600)
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(
        words, env=os.environ | clock.environment, capture_output=True, text=True, check=True
    )
    shown, monotonic = map(float, done.stdout.split())
    assert abs(shown - time.time() - 3600) < 60
    assert abs(monotonic - time.monotonic()) < 60


def test_without_the_library_nothing_is_changed(tmp_path: Path) -> None:
    assert Clock(tmp_path / "clock", None).environment == {}
