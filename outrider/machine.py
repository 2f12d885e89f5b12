"""What the machine has: memory left, and its name for a report. Reads /proc where there is one."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that a new process could use without swapping; within the container's limit where there is one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no limit ("max"), or no such file
    return available


def hardware() -> str:
    """Processor, usable cores and what matters for bfloat16, in a few words."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = set(fields.get("flags", "").split())
    special = [word for flag, word in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX-512 BF16")) if flag in flags]
    return ", ".join([name, f"{cores} cores", *special[:1]])
