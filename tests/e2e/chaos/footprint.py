"""Resources that processes hold (sessions, KV blocks, descriptors, memory, keys in Redis) and those that they did not
release."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families

from outrider.registry.redis_connection import MAX_CONNECTIONS
from tests.e2e.chaos.fleet import Fleet

IDLE_METRICS = {
    "target": (
        "outrider_num_requests_running",
        "outrider_num_requests_waiting",
        "outrider_kv_cache_usage_perc",
    ),
    "draft": ("outrider_draft_sessions",),
    "coordinator": ("outrider_num_requests_running", "outrider_num_requests_waiting"),
}
DESCRIPTORS_MORE = 16  # connections come and go, those to Redis apart
# A pool of connections to Redis grows with the calls that are under way at once, and keeps what a burst has needed. A
# replica has three: of its background tasks, of its requests, and of its batches. Other processes have one.
REDIS_CONNECTIONS_MAX = 3 * MAX_CONNECTIONS
NOT_OURS = ("this one", "log_monitor")  # Ray's keeps the logs of replicas that were killed open, two of each
MEMORY_MORE_SHARE = 0.3
MEMORY_MORE_BYTES = 128 << 20  # pools, and KV blocks touched for the first time

# Facts about lost workers, for an hour, which a fault may damage; batches that are over, and what is known of their
# tenants' files, for 30 days.
KEPT = ("or:losses", "{or:batch:", "or:batches:of:", "or:file:", "or:files:")


@dataclass
class Footprint:
    """Resources that an idle fleet holds."""

    pids: dict[str, int] = field(default_factory=dict)  # by what the process is
    num_descriptors: dict[str, int] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)  # resident
    redis_keys: set[str] = field(default_factory=set)
    connections: dict[str, str] = field(default_factory=dict)  # most frequent ones, in words
    num_to_redis: dict[str, int] = field(default_factory=dict)  # of the descriptors


async def until_idle(fleet: Fleet, timeout_s: float) -> str | None:
    """Waits until no process knows of a session, and no slot is reserved for one. Returns None, or what still is."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        busy = await _busy(fleet)
        if not busy or time.monotonic() > deadline_s:
            return ", ".join(busy) or None
        await asyncio.sleep(0.2)


async def _busy(fleet: Fleet) -> list[str]:
    busy = []
    for name, text in (await fleet.metrics_pages()).items():
        if not text:
            busy.append(f"{name} does not tell its metrics")
            continue
        idle = IDLE_METRICS[name.partition("-")[0]]
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in idle
        }
        busy += [f"{name} {metric} is {value:g}" for metric, value in values.items() if value]
    busy += [f"Redis has {key}" for key in sorted(await fleet.redis_keys()) if ":r:" in key]
    return busy


async def measure(fleet: Fleet) -> Footprint:
    """Measures the resources that the fleet holds now."""
    found = Footprint(redis_keys=await fleet.redis_keys())
    redis_port = int(fleet.redis.link.address.rpartition(":")[2])
    processes = {worker.name: psutil.Process(worker.pid) for worker in fleet.workers.values()}
    processes["this one"] = psutil.Process(os.getpid())
    for index, coordinator in enumerate(fleet.coordinators):
        name = f"coordinator-{index}"
        processes[name] = psutil.Process(int(coordinator.ready_line["pid"]))
        for child in fleet.ray_processes(index):
            with suppress(psutil.Error):
                processes[f"{name} {_short(child.cmdline())} {child.pid}"] = child
    for name, process in processes.items():
        with suppress(psutil.Error):
            found.pids[name] = process.pid
            found.num_descriptors[name] = process.num_fds()
            found.memory_bytes[name] = process.memory_info().rss
            found.connections[name] = _connections(process)
            connections = process.net_connections("tcp")
            found.num_to_redis[name] = sum(bool(each.raddr) and each.raddr.port == redis_port for each in connections)
    return found


def leaks(before: Footprint, after: Footprint) -> list[str]:
    """Descriptions of resources that are held now and were not then, beyond the tolerances for those that come and go.
    A worker that was started anew is compared with its first life."""
    found = []
    for name in before.num_descriptors.keys() & after.num_descriptors.keys():
        redis_then, redis_now = before.num_to_redis.get(name, 0), after.num_to_redis.get(name, 0)
        then, now = before.num_descriptors[name] - redis_then, after.num_descriptors[name] - redis_now
        if now > then + DESCRIPTORS_MORE and not any(each in name for each in NOT_OURS):
            found.append(
                f"{name} holds {now} file descriptors, {then} before; now {after.connections.get(name) or 'unknown'}"
            )
        if redis_now > REDIS_CONNECTIONS_MAX:
            found.append(f"{name} holds {redis_now} connections to Redis, more than its pools may have")
        bytes_then, bytes_now = before.memory_bytes[name], after.memory_bytes[name]
        if bytes_now > bytes_then * (1 + MEMORY_MORE_SHARE) + MEMORY_MORE_BYTES:
            found.append(f"{name} holds {bytes_now >> 20} MiB of memory, {bytes_then >> 20} before")
    old, new = ({key for key in each.redis_keys if not key.startswith(KEPT)} for each in (before, after))
    more, less = new - old, old - new
    if more or less:
        found.append(f"Redis has {sorted(more)} more and {sorted(less)} less")
    return found


def table(before: Footprint, after: Footprint) -> list[str]:
    """A line for every process that is in both."""
    return [
        f"{name}: {before.num_descriptors[name]} → {after.num_descriptors[name]} descriptors, "
        f"{before.memory_bytes[name] >> 20} → {after.memory_bytes[name] >> 20} MiB"
        + ("" if before.pids[name] == after.pids[name] else " (started anew)")
        for name in before.pids
        if name in after.memory_bytes and name in before.memory_bytes
    ]


def _connections(process: psutil.Process) -> str:
    """The most frequent kinds of connections, by state and the port at the other end, or the own one if the other end
    dialled."""
    own = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    counts = Counter(
        f"{each.status} from :{each.laddr.port}" if each.laddr.port in own or not each.raddr
        else f"{each.status} to :{each.raddr.port}"
        for each in process.net_connections("tcp")
    )  # fmt: skip
    return ", ".join(f"{count} {what}" for what, count in counts.most_common(5))


def _short(words: list[str]) -> str:
    """A short name for a process of Ray, from its command line."""
    line = " ".join(words)
    known = re.search(
        r"ray::[\w:]+|raylet|gcs_server|haproxy|dashboard/agent|runtime_env/agent|log_monitor|monitor", line
    )
    return known.group() if known else line[:40]
