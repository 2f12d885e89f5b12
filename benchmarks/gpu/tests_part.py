"""Runs the tests that need a GPU, and reads what became of them.

Without the plugins and fixtures of the other tests, so that a machine needs no more than pytest, torch and
transformers.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final
from xml.etree import ElementTree

from benchmarks.gpu.outcome import Outcome, Setting, say
from benchmarks.shared.machine import ROOT

TESTS: Final = "tests/engine/test_cuda.py"
LINES_SHOWN: Final = 12  # of each failure
CHARS_SHOWN: Final = 160  # of each line
FAILURES_SHOWN: Final = 8
MARGIN_S: Final = 5.0


def read_report(text: str) -> dict[str, Any]:
    """Counts and failures of a JUnit report: {"passed": 3, ..., "failures": {test: last lines}}."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: dict[str, list[str]] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        wrong = next((each for each in case if each.tag in ("failure", "error")), None)
        kind = "failed" if wrong is not None else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if wrong is not None:
            lines = [line.rstrip() for line in (wrong.text or "").splitlines() if line.strip()]
            failures[case.get("name", "?")] = [line[:CHARS_SHOWN] for line in lines[-LINES_SHOWN:]]
    shown = dict(list(failures.items())[:FAILURES_SHOWN])
    return counts | {"failures": shown, "failures_not_shown": len(failures) - len(shown)}


def run(setting: Setting, outcome: Outcome) -> None:
    """Writes the counts and the failures. Raises RuntimeError where pytest did not run to its end."""
    setting.scratch.mkdir(parents=True, exist_ok=True)
    options, report = setting.scratch / "pytest.ini", setting.scratch / "tests.xml"
    options.write_text("[pytest]\n")
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", str(ROOT / TESTS), "-c", str(options), "--rootdir", str(ROOT), "-v"]
    words += ["--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", f"pythonpath={ROOT}"]
    words += [f"--junitxml={report}", "--tb=short"]
    try:
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=setting.seconds_left - MARGIN_S
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        outcome.put("printed", [line[:CHARS_SHOWN] for line in printed.splitlines()[-LINES_SHOWN:]])
        raise RuntimeError(f"the tests took longer than {setting.seconds_left:.0f} s") from error
    say(done.stdout[-2000:])
    if not report.is_file():
        tail = (done.stdout + done.stderr).splitlines()[-LINES_SHOWN:]
        raise RuntimeError("pytest wrote no report: " + " | ".join(tail))
    for name, value in read_report(report.read_text()).items():
        outcome.put(name, value)
