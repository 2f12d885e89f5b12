"""A real coordinator in front of target workers without a model, with its clients, in processes of their own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.shared.json_process import JsonProcess, running
from benchmarks.shared.machine import ROOT
from benchmarks.shared.options import DEMO
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis

WAIT_MAX_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.5


@contextmanager
def registry() -> Iterator[str]:
    """A Redis server of its own; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        redis = EmbeddedRedis(Path(folder))
        try:
            yield redis.start()
        finally:
            redis.stop()


@asynccontextmanager
async def fake_targets(model: str, redis_url: str, **flags: Any) -> AsyncIterator[JsonProcess]:
    """A process of `benchmarks.shared.fake_targets` with these flags, True for one without a value."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    fixed = ("--tokenizer", str(DEMO / "target"), "--model", model)
    environment = {"OUTRIDER_REDIS_URL": redis_url}
    async with running("benchmarks.shared.fake_targets", *fixed, *words, environment=environment) as process:
        yield process


@dataclass(frozen=True, slots=True)
class Front:
    """A coordinator and the process of its clients."""

    coordinator: JsonProcess
    clients: JsonProcess
    serving: tuple[psutil.Process, ...]  # with the replica
    proxies: tuple[psutil.Process, ...]  # in front of it, if Ray Serve hosts it

    def address(self, protocol: str) -> str:
        """Address for clients of http or grpc."""
        facts = self.coordinator.facts
        return str(facts["http"]).removeprefix("http://") if protocol == "http" else str(facts["grpc"])

    def resident_bytes(self) -> int:
        """Resident memory of the replica's process."""
        return sum(process.memory_info().rss for process in self.serving)

    async def gauges(self) -> str:
        """The replica's page of metrics."""
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT_MAX_S) as client:
            page = await client.get(f"http://127.0.0.1:{self.coordinator.facts['metrics_port']}/metrics")
            return page.raise_for_status().text

    async def wait_for(self, name: str, labels: Mapping[str, str], wanted: int) -> None:
        """Waits until a gauge has a value. Raises TimeoutError with the last one and the clients' failures."""
        seen: float | None = None
        try:
            async with asyncio.timeout(WAIT_MAX_S):
                while seen != wanted:
                    seen = value_of(await self.gauges(), name, labels)
                    await asyncio.sleep(0.0 if seen == wanted else _LOOK_EVERY_S)
        except TimeoutError:
            failures = (await self.clients.ask(do="end"))["failures"]
            raise TimeoutError(
                f"{name} {labels} is {seen} instead of {wanted}; clients' failures: {failures}"
            ) from None


@asynccontextmanager
async def front(
    redis_url: str, num_targets: int, *, hosting: str = "plain", checkout: Path = ROOT
) -> AsyncIterator[Front]:
    """Starts a coordinator of a checkout and its clients; returns when it sees all targets."""
    port, grpc_port, metrics_port = free_ports(3)
    flags = {
        "tokenizer": DEMO / "target",
        "hosting": hosting,
        "port": port,
        "grpc-port": grpc_port,
        "metrics-port": metrics_port,
        "max-requests": 8192,
        "max-queue-wait": 600,
        "request-timeout": 3600,
        "target-silence-max": 600,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = {"OUTRIDER_REDIS_URL": redis_url}
    async with (
        running("benchmarks.shared.stream_clients") as clients,
        running("coordinator", *words, environment=environment, checkout=checkout) as coordinator,
    ):
        found = Front(coordinator, clients, *processes_of(coordinator.pid))
        await found.wait_for("outrider_live_workers", {"pool": "target"}, num_targets)
        yield found


def processes_of(pid: int) -> tuple[tuple[psutil.Process, ...], tuple[psutil.Process, ...]]:
    """The process of the replica, and those of the proxy in front of it, if Ray Serve hosts them."""
    process = psutil.Process(pid)
    by_title = [(_title(each), each) for each in process.children(recursive=True)]
    replicas = tuple(each for title, each in by_title if title.startswith("ray::ServeReplica"))
    proxies = tuple(each for title, each in by_title if title.startswith("ray::ProxyActor") or "/haproxy" in title)
    return replicas or (process,), proxies


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def value_of(exposition: str, name: str, labels: Mapping[str, str]) -> float | None:
    """Reads one sample of a metrics page; None if it is not there."""
    for line in exposition.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return None
