"""The wheel, unpacked into an empty folder, starts and serves the demo from another empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_demo_runs_from_the_wheel_alone(tmp_path: Path) -> None:
    build, installed, empty = tmp_path / "build", tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(build), str(ROOT)],
        check=True,
        timeout=200,
    )
    (wheel,) = build.glob("outrider-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "k8s/"))]
    environment = {**os.environ, "PYTHONPATH": str(installed), "OUTRIDER_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-m", "command_line", "demo", "--json"],
        cwd=empty, env=environment, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert json.loads(result.stdout.splitlines()[-1])
    code = "import command_line, outrider.engine; print(command_line.__file__, outrider.engine.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=empty, env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.count(str(installed)) == 2
