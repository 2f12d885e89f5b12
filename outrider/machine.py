"""What the machine has: memory left, cores, and its name for a report. Reads /proc and /sys where there are any."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Words for a processor's flags; the first that it has says the most about its products of bfloat16."""


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


def usable_cores() -> list[int]:
    """Cores that this process may run on, those of one NUMA node side by side.

    Whoever gets neighbours of this list reads the weights from memory that is near to them: a process that is pinned
    before it loads finds them there, where Linux puts what a core is the first to touch.
    """
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    nodes = _node_of_each_core()
    return sorted(os.sched_getaffinity(0), key=lambda core: (nodes.get(core, 0), core))


def _node_of_each_core() -> dict[int, int]:
    found: dict[int, int] = {}
    for path in _NODES.glob("node[0-9]*/cpulist"):
        with suppress(OSError, ValueError):
            for part in filter(None, path.read_text().strip().split(",")):  # such as 0-3,8-11
                first, _, last = part.partition("-")
                node = int(path.parent.name.removeprefix("node"))
                found |= dict.fromkeys(range(int(first), int(last or first) + 1), node)
    return found


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
    special = [word for flag, word in _INSTRUCTIONS.items() if flag in flags]
    return ", ".join([name, f"{cores} cores", *special[:1]])
