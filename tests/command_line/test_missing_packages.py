"""Without the extras the command line still helps, and says which one a command needs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
EXTRAS_OF_PROCESSES = ("coordinator-plain", "coordinator", "worker", "demo")
# As if nothing of the extras were installed.
PROGRAM = """
import importlib.util, runpy, sys

absent = set(sys.argv[1].split(","))
find_spec = importlib.util.find_spec

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
importlib.util.find_spec = lambda name, package=None: None if name in absent else find_spec(name, package)
sys.argv[:] = ["outrider", *sys.argv[2:]]
runpy.run_module("command_line", run_name="__main__")
"""


def absent() -> set[str]:
    """The names under which the packages of the extras are imported."""
    names = {Requirement(text).name for extra in EXTRAS_OF_PROCESSES for text in EXTRAS[extra]}
    grpc = {
        "grpcio-health-checking": "grpc_health",
        "grpcio-reflection": "grpc_reflection",
        "grpcio-status": "grpc_status",
    }
    return {grpc.get(name, name) for name in names} - {"outrider"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, ",".join(sorted(absent())), *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", [(), ("bench",), ("serve",), ("certificates",)], ids=" ".join)
def test_help_needs_no_extra(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("serve",), "demo"),
        (("demo",), "demo"),
        (("coordinator", "--help"), "coordinator"),
        (("target-worker", "--help"), "worker"),
        (("draft-worker", "--help"), "worker"),
        (("plan", "demo/target"), "worker"),
        (("tune",), "worker"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_command_without_its_packages_names_the_extra_to_install(command: tuple[str, ...], extra: str) -> None:
    result = run(*command)
    assert result.returncode == 1
    assert f"pip install 'outrider[{extra}]'" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
