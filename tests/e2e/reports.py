"""A suite that is run by its command line, in a process of its own, for the report that it writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.system import ROOT, environment


def report_of(suite: str, folder: Path, seconds_max: float, *flags: str) -> dict[str, Any]:
    """The report of `python -m tests.e2e.SUITE`, which has to end well in time. `folder` gets it, and all logs."""
    words = [sys.executable, "-m", f"tests.e2e.{suite}", *flags]
    words += ["--logs", str(folder / "logs"), "--json", str(folder / "report.json")]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=said, stderr=said)
        try:
            status: int | None = process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            status = None
        said.seek(0)
        print(text := said.read())
    assert status == 0, text[-8000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report
