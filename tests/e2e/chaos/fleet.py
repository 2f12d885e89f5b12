"""The system under test: Redis, workers and a coordinator as processes, every connection between them over a link.

    coordinator ──┬── link ──► target-0, target-1, ...      (each worker announces its link, so that draft workers
                  ├── link ──► draft-0, draft-1, ...         dial targets through it as well)
    all of these ─┴── link ──► Redis

A worker that ends is started again under the same id and address, at once; who did not expect its end finds it among
`surprises`. Faults borrow what they break, so that there is always a target that nobody has touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
import redis.asyncio

from outrider.child import Child
from outrider.child_log import ChildLog
from outrider.child_spec import ChildEvent, ChildSpec, Phase, RestartPolicy
from outrider.cli.deployment import (
    DEMO_DRAFT,
    DEMO_TARGET,
    ROOT,
    flatten,
    launcher,
    module,
    rank_environment,
)
from outrider.free_ports import free_ports
from outrider.redis_server import EmbeddedRedis
from tests.e2e.chaos import poison
from tests.e2e.chaos.cases import MAX_MODEL_LEN
from tests.e2e.chaos.client import Client
from tests.e2e.chaos.clocks import Clock, find_library
from tests.e2e.chaos.links import Callers, Link

RESTART = RestartPolicy(first_delay_s=0.05, delay_s_max=0.05)
READY_TIMEOUT_S = 120.0
NICENESS = 7
SETTLED_S = 1.0  # from a worker's ready line to its place in every replica's snapshot


@dataclass(frozen=True)
class FleetOptions:
    num_targets: int = 3
    num_drafts: int = 2
    num_replicas: int = 2
    num_clients: int = 12  # one target alone must have room for all of them
    target_silence_max_s: float = 4.0
    client_stall_max_s: float = 8.0
    drain_grace_s: float = 3.0
    dtype: str = "bfloat16"
    num_ranks: int = 1  # processes of each target worker


@dataclass
class Worker:
    """One worker process over all its lives."""

    name: str
    role: str
    link: Link
    child: Child
    log_path: Path  # of its standard error
    is_ready: bool = False
    ready_at_s: float = 0.0
    num_lives: int = 0

    @property
    def pid(self) -> int:
        return int(self.child.ready_line["pid"])

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.child.ready_line['metrics_port']}/metrics"


class Fleet:
    """Everything, from `async with` on."""

    def __init__(self, options: FleetOptions, log_dir: Path, say: Callable[[str], None]) -> None:
        """Output of all processes goes to files of `log_dir`; `say` hears of every start and end."""
        self.options = options
        self.log_dir = log_dir
        self.workers: dict[str, Worker] = {}
        self.surprises: list[str] = []
        self.redis_link = Link("redis")
        self._say = say
        self._stack = AsyncExitStack()
        self._worker_keys: set[str] = set()
        self._borrowed: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._expected_ends: set[str] = set()
        self._is_stopping = False
        # Sockets of Ray lie below it, and their names are bounded.
        self._scratch = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.redis_clock = Clock(self._scratch / "clock", find_library())
        self._redis = EmbeddedRedis(self._scratch, self.redis_clock.environment)
        self.coordinator: Child | None = None
        self.client: Client

    async def __aenter__(self) -> Fleet:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_stopping = True
        await self._stack.aclose()
        for worker in self.workers.values():
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(worker.pid, signal.SIGCONT)
        if self.coordinator is not None:
            await self.coordinator.stop()
        await asyncio.gather(*(worker.child.stop() for worker in self.workers.values()))
        for link in self.links():
            await link.stop()
        if self._redis.pid is not None:
            os.kill(self._redis.pid, signal.SIGCONT)
        self._redis.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def links(self) -> list[Link]:
        return [self.redis_link, *(worker.link for worker in self.workers.values())]

    async def _start(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        await self.redis_link.start()
        self.start_redis()
        ports = free_ports(self.options.num_targets + self.options.num_drafts)
        for role, count in (("target", self.options.num_targets), ("draft", self.options.num_drafts)):
            for index in range(count):
                await self._add_worker(role, f"{role}-{index}", ports.pop())
        http_port, grpc_port = free_ports(2)
        self.coordinator = Child(
            self._coordinator_spec(http_port, grpc_port),
            ChildLog("coordinator", self.log_dir),
            RESTART,
            self._hear,
        )
        await self.coordinator.start()  # before the others: Ray gives up where it takes half a minute
        starts = [asyncio.create_task(worker.child.start()) for worker in self.workers.values()]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        ready = self.coordinator.ready_line
        self.client = await self._stack.enter_async_context(Client(str(ready["http"]), str(ready["grpc"])))
        await self.until_whole(60.0)
        # What workers say of themselves, whatever else is stored for a while.
        self._worker_keys = {key for key in await self.redis_keys() if key.rpartition(":")[2] in self.workers}
        assert len(self._worker_keys) == len(self.workers), self._worker_keys

    async def _add_worker(self, role: str, name: str, port: int) -> None:
        link = Link(name, ("127.0.0.1", port))
        await link.start()
        log_path = self.log_dir / f"{name}.stderr.log"
        options = self.options
        num_ranks = options.num_ranks if role == "target" else 1
        flags = {
            "--model": DEMO_TARGET if role == "target" else DEMO_DRAFT,
            "--port": port,
            "--announce": link.address,
            "--worker-id": name,
            "--dtype": options.dtype,
            "--max-num-seqs": options.num_clients + 8,
            "--max-model-len": MAX_MODEL_LEN,
            "--kv-cache-gib": 0.25,
            "--num-threads": 1,
            "--drain-grace-s": options.drain_grace_s,
        }
        # Standard error goes to a file of its own, as it does where a service manager keeps it, and not through a pipe.
        words = (
            "/bin/sh",
            "-c",
            'exec "$@" 2>>"$CHAOS_LOG"',
            "sh",
            *launcher(f"{role}_worker", num_ranks),
            *flatten(flags),
        )
        environment = self._environment() | {"CHAOS_LOG": str(log_path), "OMP_NUM_THREADS": "1"}
        environment |= rank_environment(num_ranks) | (poison.environment() if role == "target" else {})
        spec = ChildSpec(name, role, words, environment, READY_TIMEOUT_S, stop_grace_s=5.0)
        child = Child(spec, ChildLog(name, self.log_dir), RESTART, self._hear)
        self.workers[name] = Worker(name, role, link, child, log_path)

    def _coordinator_spec(self, http_port: int, grpc_port: int) -> ChildSpec:
        flags = {
            "--tokenizer": DEMO_TARGET,
            "--port": http_port,
            "--grpc-port": grpc_port,
            "--num-replicas": self.options.num_replicas,
            "--target-silence-max": self.options.target_silence_max_s,
            "--client-stall-max": self.options.client_stall_max_s,
            "--ray-temp-dir": self._scratch / "r",
        }
        words = (*module("coordinator"), *flatten(flags))
        return ChildSpec("coordinator", "coordinator", words, self._environment(), READY_TIMEOUT_S, 15.0)

    def _environment(self) -> dict[str, str]:
        password = self._redis.url.removeprefix("redis://").partition("@")[0]
        return {
            "OUTRIDER_REDIS_URL": f"redis://{password}@{self.redis_link.address}/0",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def _hear(self, event: ChildEvent) -> None:
        worker = self.workers.get(event.name)
        if event.phase is Phase.READY and worker is not None:
            worker.is_ready, worker.ready_at_s = True, time.monotonic()
            worker.num_lives += 1
            step_aside(worker.pid)
        elif event.phase is Phase.DIED:
            has_missed_redis = (
                worker is not None and not worker.is_ready and _has_missed_redis(worker.log_path)
            )
            if worker is not None:
                worker.is_ready = False
            if event.name in self._expected_ends:
                self._expected_ends.discard(event.name)
            elif has_missed_redis:
                self._say(f"   {event.name} cannot start while Redis is away, and tries again")
            elif not self._is_stopping:
                self.surprises.append(f"{event.name} {event.detail}")
                self._say(f"!! {event.name} {event.detail}")

    # What faults do.

    @asynccontextmanager
    async def borrowed(self, role: str, rng: random.Random) -> AsyncIterator[Worker]:
        """A ready worker of the role that nobody else has, for as long as the context is open. The last untouched
        target is not given away."""
        spare = 1 if role == "target" else 0
        while True:
            free = [
                worker
                for worker in self.workers.values()
                if worker.role == role and worker.is_ready and worker.name not in self._borrowed
            ]
            if len(free) > spare:
                break
            await asyncio.sleep(0.05)
        worker = rng.choice(free)
        self._borrowed.add(worker.name)
        try:
            yield worker
        finally:
            self._borrowed.discard(worker.name)

    @asynccontextmanager
    async def only_one(self, part: str) -> AsyncIterator[None]:
        """Holds something that there is only one of, for as long as the context is open."""
        async with self._locks.setdefault(part, asyncio.Lock()):
            yield

    def send(self, worker: Worker, number: signal.Signals) -> None:
        """Sends it to the worker itself. What ends it is expected to."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._expected_ends.add(worker.name)
            worker.is_ready = False
        with contextlib.suppress(ProcessLookupError):  # it has just died by itself, which is told elsewhere
            os.kill(worker.pid, number)

    def send_to_another_rank(self, worker: Worker, number: signal.Signals, rng: random.Random) -> None:
        """To one of the processes of the worker that do what the first one says. All end with one that does."""
        if number is signal.SIGKILL:
            self._expected_ends.add(worker.name)
            worker.is_ready = False
        with contextlib.suppress(psutil.Error):
            ranks = psutil.Process(psutil.Process(worker.pid).ppid()).children()
            rng.choice([rank for rank in ranks if rank.pid != worker.pid]).send_signal(number)

    def replicas(self) -> list[psutil.Process]:
        """The coordinator's, that live."""
        assert self.coordinator is not None
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(int(self.coordinator.ready_line["pid"])).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if any("ServeReplica" in word for word in process.cmdline()):
                        found.append(process)
        return found

    def kill_replica(self, rng: random.Random) -> None:
        """One of them; Serve starts another. Clients may come back to any, from now on for as long as it takes."""
        self.client.replica_lost_s = time.monotonic()
        rng.choice(self.replicas()).kill()

    def callers_from(self, workers: Iterable[Worker], link: Link) -> Callers:
        """The connections that these workers have made to the link."""
        pids = [worker.pid for worker in workers if worker.is_ready]

        def is_meant(port: int) -> bool:
            for pid in pids:
                with contextlib.suppress(psutil.Error):
                    for each in psutil.Process(pid).net_connections("tcp"):
                        if each.laddr.port == port and each.raddr and each.raddr.port == link.port:
                            return True
            return False

        return is_meant

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role == role]

    def start_redis(self) -> None:
        """An empty one, behind the same link."""
        url = self._redis.start()
        self.redis_link.server_address = ("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))

    @property
    def redis_url(self) -> str:
        """Past the link, as administrator."""
        return self._redis.url

    def send_redis(self, number: signal.Signals) -> None:
        assert self._redis.pid is not None
        os.kill(self._redis.pid, number)

    def bury_redis(self) -> None:
        """After it was killed."""
        self._redis.stop()

    async def redis_keys(self) -> set[str]:
        """What is stored, past the link. A run's incarnation is left out of it. Nothing when Redis does not answer."""
        client = redis.asyncio.Redis.from_url(
            self._redis.url, decode_responses=True, socket_timeout=1.0, socket_connect_timeout=1.0
        )
        with contextlib.suppress(redis.RedisError, OSError):  # one that is stopped fails the closing, too
            async with client:
                # A stream's journal goes by itself some time after its end.
                keys = [
                    key
                    for key in map(str, await client.keys("*"))
                    if not (key.startswith("or:journal:") and await client.pttl(key) > 0)
                ]
                return {re.sub(r"[0-9a-f]{32}", "*", key) for key in keys}
        return set()

    # What it looks like from outside.

    async def health(self) -> dict[str, Any]:
        """The coordinator's own view; empty when it does not answer."""
        try:
            found: dict[str, Any] = (await self.client.get("/health")).json()
        except (httpx.HTTPError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return found

    async def until_whole(self, timeout_s: float, own: str | None = None) -> str | None:
        """Waits until everything serves again, but for what others than `own`'s borrower have borrowed. Returns None,
        or what was still missing at the end."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            missing = await self._missing(self._borrowed - {own})
            if missing is None or time.monotonic() > deadline_s:
                return missing
            await asyncio.sleep(0.1)

    async def _missing(self, aside: set[str]) -> str | None:
        now_s = time.monotonic()
        for worker in self.workers.values():
            if worker.name not in aside and not (worker.is_ready and now_s - worker.ready_at_s >= SETTLED_S):
                return f"{worker.name} is not ready"
        unannounced = {key.rpartition(":")[2] for key in self._worker_keys - await self.redis_keys()} - aside
        if unannounced:
            return f"Redis knows nothing of {', '.join(sorted(unannounced))}"
        if len(self.replicas()) < self.options.num_replicas:
            return "a replica of the coordinator is missing"
        health = await self.health()
        wanted = {
            role: sum(worker.name not in aside for worker in self.of_role(role))
            for role in ("target", "draft")
        }
        is_whole = (
            health.get("registry") == "ok"
            and health["num_target_workers"] >= wanted["target"]
            and health["num_draft_workers"] >= wanted["draft"]
            and not {each["worker_id"] for each in health["excluded_workers"]} - aside
        )
        return None if is_whole else f"/health says {health}"


def _has_missed_redis(log_path: Path) -> bool:
    """Whether the last that a worker said is that it cannot announce itself: it refuses to start then, by design."""
    lines = log_path.read_text(errors="replace").splitlines()
    return bool(lines) and lines[-1].startswith("error: Redis at ")


def step_aside(pid: int) -> None:
    """Gives way to what is starting: beside busy workers on two cores, a start would take half a minute."""
    with contextlib.suppress(OSError):
        # Where the kernel groups processes by session, the group's niceness counts; elsewhere each thread's own.
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)
