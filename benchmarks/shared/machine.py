"""Description of the machine, for the head of a benchmark's result."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from outrider.engine.loading.machine import GIB, available_memory, hardware

ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, object]:
    """Processor, cores, memory, versions, commit and time (UTC). `commit` is None outside a git checkout."""
    return {
        "hardware": hardware(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "memory_available_gib": round(available_memory() / GIB, 1),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "commit": commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The checkout's commit, with "+" if tracked files differ from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()
