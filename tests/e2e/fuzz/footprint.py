"""Resources that the processes of an idle system hold, and bounds on their growth."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from outrider.registry.redis_connection import MAX_CONNECTIONS
from tests.e2e.chaos.footprint import IDLE_METRICS
from tests.e2e.secured import SecuredSystem

DESCRIPTORS_MORE = 16 + MAX_CONNECTIONS  # others come and go; those to Redis stay once a burst has needed them
MEMORY_MORE_SHARE = 0.2
MEMORY_MORE_BYTES = 96 << 20  # arenas of the allocator, and KV blocks touched for the first time
KEPT = ("or:files:", "or:batches:of:")  # lists of files and batches that a client has made and not deleted
IN_A_ROW = 3  # looks that have to agree


@dataclass
class Footprint:
    """Resources of every process of a system, by name."""

    num_descriptors: dict[str, int] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)  # resident
    kinds: dict[str, Counter[str]] = field(default_factory=dict)  # of descriptors, connections by state and peer
    redis_keys: set[str] = field(default_factory=set)  # that do not go by themselves


async def until_idle(system: SecuredSystem, timeout_s: float = 60.0) -> list[str]:
    """Waits until no process knows of a session and nothing is reserved for one. Returns what still is at the end."""
    deadline_s, num_idle = time.monotonic() + timeout_s, 0
    while True:
        busy = await _busy(system)
        num_idle = 0 if busy else num_idle + 1
        if num_idle == IN_A_ROW or time.monotonic() > deadline_s:
            return busy
        await asyncio.sleep(0.2)


async def _busy(system: SecuredSystem) -> list[str]:
    busy = []
    for name, child in system.children.items():
        for family in text_string_to_metric_families(await system.metrics(name)):
            for sample in family.samples:
                names = (*IDLE_METRICS[child.spec.role], "outrider_num_requests_queued")
                if sample.name in names and sample.value:
                    busy.append(f"{name}: {sample.name} is {sample.value:g}")
    async with system.redis_client() as client:
        busy += [f"Redis has {key}" for key in sorted(map(str, await client.keys("*"))) if ":r:" in key]
    return busy


async def measure(system: SecuredSystem) -> Footprint:
    """Measures the resources that the system holds now."""
    found = Footprint()
    for name, pid in system.pids().items():
        process = psutil.Process(pid)
        of_ray = {}
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(child.cmdline())
                what = "replica" if "ServeReplica" in line else "HAProxy" if "haproxy" in line else None
                if what is not None:
                    of_ray[f"{name} {what} {child.pid}"] = child
        for each, one in {name: process, **of_ray}.items():
            with suppress(psutil.Error):
                found.kinds[each] = _kinds(one)
                found.num_descriptors[each] = one.num_fds()
                found.memory_bytes[each] = one.memory_info().rss
    async with system.redis_client() as client:
        for key in map(str, await client.keys("*")):
            if await client.pttl(key) < 0:
                found.redis_keys.add(key)
    return found


def _kinds(process: psutil.Process) -> Counter[str]:
    """Counts a process' descriptors by kind, as far as they can be read."""
    found = Counter(
        f"{each.status.lower()} connections {f'to {each.raddr.port}' if each.raddr else ''}".strip()
        for each in process.net_connections("tcp")
    )
    for path in Path(f"/proc/{process.pid}/fd").glob("*"):
        with suppress(OSError):
            target = os.readlink(path)
            if not target.startswith("socket:"):
                found[target if target.startswith("/") else target.partition(":")[0]] += 1
    return found


def growth(before: Footprint, after: Footprint) -> list[str]:
    """Descriptions of resources that have grown beyond the bounds above."""
    found = []
    for name in sorted(before.num_descriptors.keys() & after.num_descriptors.keys()):
        then, now = before.num_descriptors[name], after.num_descriptors[name]
        if now > then + DESCRIPTORS_MORE:
            more = after.kinds.get(name, Counter()) - before.kinds.get(name, Counter())
            which = ", ".join(f"{count} more {kind}" for kind, count in more.most_common(8))
            found.append(f"{name} holds {now} file descriptors, {then} before" + (f" ({which})" if which else ""))
        bytes_then, bytes_now = before.memory_bytes[name], after.memory_bytes[name]
        if bytes_now > bytes_then * (1 + MEMORY_MORE_SHARE) + MEMORY_MORE_BYTES:
            found.append(f"{name} holds {bytes_now >> 20} MiB of memory, {bytes_then >> 20} before")
    if new := {key for key in after.redis_keys - before.redis_keys if not key.startswith(KEPT)}:
        found.append(f"Redis has {', '.join(sorted(new))} and did not before")
    return found


def table(before: Footprint, after: Footprint) -> list[str]:
    """A line for every process that is in both."""
    return [
        f"{name}: {before.num_descriptors[name]} → {after.num_descriptors[name]} descriptors, "
        f"{before.memory_bytes[name] >> 20} → {after.memory_bytes[name] >> 20} MiB"
        for name in sorted(before.memory_bytes.keys() & after.memory_bytes.keys())
    ]
