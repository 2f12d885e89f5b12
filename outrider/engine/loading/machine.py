"""The machine's resources: available memory, cores, and a description for reports. Reads /proc and /sys if present."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from outrider.engine.kv.kv_plan import GIB as GIB
from outrider.engine.kv.kv_plan import DeviceMemory

_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Names for processor flags; the first match says most about the speed of bfloat16 products."""


def available_memory() -> int:
    """Bytes that a new process could use without swapping, within the container's limit where there is one."""
    return machine_memory().free


def machine_memory() -> DeviceMemory:
    """The container's memory where it has a limit, and less left than the machine; else what is free of the machine."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
    with suppress(OSError, ValueError):  # no limit ("max"), or no such file
        limit = int((_CGROUP / "memory.max").read_text())
        left = limit - _used_by_container()
        if left < available:
            return DeviceMemory(limit, max(left, 0), is_own=True)
    return DeviceMemory(available, available, is_own=False)


def _used_by_container() -> int:
    """Without files that were read, such as weights: the kernel drops these first."""
    used = int((_CGROUP / "memory.current").read_text())
    with suppress(OSError):
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
    return used


def usable_cores() -> list[int]:
    """Cores that this process may run on, those of one NUMA node side by side.

    Processes that take neighbours from this list read weights from near memory: one that is pinned before it loads
    finds them there, because Linux places a page near the core that first touches it.
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
    """One line with the processor, usable cores and its instructions for bfloat16."""
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
