"""The system under test, every part of it a process, every connection between them over a link, all with certificates:

    clients ── TLS, keys ──► HAProxy ──► coordinator-0, -1 ──┬── link ──► target-0, -1, -2
                                                             ├── link ──► draft-0, -1
                                      all of these, over TLS ┴── link ──► Redis

Each worker announces its link, so that draft workers dial targets through it as well. Whoever ends is started again
under the same id and address, at once; who did not expect that end finds it among `surprises`. Faults borrow what they
break, so that there is always a target that nobody has touched.
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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET, ROOT, launcher, module, rank_environment
from command_line.start.deployment import WORKER_GRACE_S, flatten
from coordinator.settings import METRICS_PORTS
from outrider.local.child import Child, StartError
from outrider.local.child_log import ChildLog
from outrider.local.child_spec import ChildEvent, ChildSpec, Phase, RestartPolicy
from outrider.local.free_ports import free_ports
from tests.e2e.chaos import poison
from tests.e2e.chaos.cases import MAX_MODEL_LEN
from tests.e2e.chaos.certificates import OPERATOR, Certificates, make_keys
from tests.e2e.chaos.client import Client
from tests.e2e.chaos.links import Callers, Link
from tests.e2e.chaos.redis_front import RedisBehindTls
from tests.e2e.load_balancers import Backend
from tests.e2e.rollout.balancer import SecuredHAProxy

RESTART = RestartPolicy(first_delay_s=0.05, delay_s_max=0.05)
READY_TIMEOUT_S = 120.0
VLLM_READY_TIMEOUT_S = 600.0
VLLM_KV_BYTES = 1 << 26
JOIN_S_MAX = 90.0  # longer than any fault takes away what a worker needs to start
RAY_STARTS_MAX = 3  # half a minute is not much for it on a busy machine
VLLM_FLAGS = ("--dtype", "--max-num-seqs", "--max-model-len")
NOT_FOR_VLLM = ("--kv-cache-gib", "--num-threads")
NICENESS = 7
SETTLED_S = 1.0  # from a worker's ready line to its place in every replica's snapshot


@dataclass(frozen=True)
class FleetOptions:
    num_targets: int = 3
    num_drafts: int = 2
    num_coordinators: int = 2
    num_replicas: int = 2  # of each coordinator
    num_clients: int = 26
    num_slots: int = 6  # of each target: together fewer than clients, and more than its KV cache holds
    kv_cache_gib: float = 0.005  # of each target: 1,310 tokens in bfloat16, of which one text may need 1,024
    target_silence_max_s: float = 8.0
    client_stall_max_s: float = 5.0
    queue_wait_max_s: float = 160.0  # on a slow machine a slot may take two minutes while faults add requests
    drain_grace_s: float = 3.0
    dtype: str = "bfloat16"
    num_ranks: int = 1  # processes of each target worker
    vllm_python: str = ""  # of the targets, whose model vLLM runs; empty: our own engine

    @property
    def requests_max(self) -> int:
        """Sequences of a replica, more than all clients and faults ask for together, and fewer than a batch has."""
        return 4 * self.num_clients + 40

    @property
    def ready_timeout_s(self) -> float:
        """vLLM takes a minute to start, and several where two start at once on a busy machine."""
        return VLLM_READY_TIMEOUT_S if self.vllm_python else READY_TIMEOUT_S


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
        return f"https://127.0.0.1:{self.child.ready_line['metrics_port']}/metrics"


class Fleet:
    """Everything, from `async with` on."""

    def __init__(self, options: FleetOptions, log_dir: Path, say: Callable[[str], None]) -> None:
        """Output of all processes goes to files of `log_dir`; `say` hears of every start and end."""
        self.options = options
        self.log_dir = log_dir
        self.workers: dict[str, Worker] = {}
        self.coordinators: list[Child] = []
        self.surprises: list[str] = []
        self._say = say
        self._stack = AsyncExitStack()
        self._borrowed: set[str] = set()
        self._returned_s: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._expected_ends: set[str] = set()
        self._mortal: list[tuple[frozenset[str], list[str]]] = []  # who may end at any time, and who has
        self._is_stopping = False
        # Sockets of Ray lie below it, and their names are bounded.
        self.scratch = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.certificates = Certificates(self.scratch / "certificates")
        self.public_authority = self.certificates.authority  # of what clients believe, whatever becomes of the other
        self._keys_file = self.scratch / "keys.toml"
        self.keys = make_keys(self._keys_file)
        self.redis = RedisBehindTls(self.scratch, self.certificates)
        self.balancer: SecuredHAProxy
        self.balancer_lock = asyncio.Lock()  # of whoever starts it again, or has it read new files
        self.client: Client
        self.backends: list[Backend] = []
        self._operator: httpx.AsyncClient  # with a key, for public ports
        self._watcher: httpx.AsyncClient  # with a certificate, for the ports of metrics

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
        await asyncio.gather(*(child.stop() for child in self.coordinators))
        await asyncio.gather(*(worker.child.stop() for worker in self.workers.values()))
        for worker in self.workers.values():
            await worker.link.stop()
        await self.redis.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)

    async def _start(self) -> None:
        options = self.options
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for name in ("coordinator", OPERATOR):
            self.certificates.issue(name)
        await self.redis.start()
        num_workers = options.num_targets + options.num_drafts
        # All at once: what nobody listens at yet could be chosen again.
        balancer_port, *ports = free_ports(1 + num_workers + 3 * options.num_coordinators)
        for role, count in (("target", options.num_targets), ("draft", options.num_drafts)):
            for index in range(count):
                await self._add_worker(role, f"{role}-{index}", ports.pop(), {})
        # Before the others and one by one: Ray gives up where it takes half a minute.
        for index in range(options.num_coordinators):
            await self._start_coordinator(index, ports.pop(), ports.pop(), ports.pop())
        starts = [asyncio.create_task(worker.child.start()) for worker in self.workers.values()]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        context = self.certificates.context()
        context.check_hostname = False  # a worker's certificate names the part, not the machine
        self._watcher = await self._stack.enter_async_context(httpx.AsyncClient(verify=context, trust_env=False))
        self._operator = await self._stack.enter_async_context(
            httpx.AsyncClient(
                verify=self.certificates.context(),
                headers={"Authorization": f"Bearer {self.keys[OPERATOR]}"},
                trust_env=False,
            )
        )
        await self._start_balancer(balancer_port)
        balancer, trust = self.balancer, self.certificates
        self.client = await self._stack.enter_async_context(
            Client(balancer.url, balancer.address, trust.context(None), trust.credentials(), self.keys)
        )
        problem = await self.until_whole(60.0)
        if problem is not None:
            raise StartError(problem)

    async def _start_balancer(self, port: int) -> None:
        folder = self.scratch / "balancer"
        folder.mkdir()
        authority = self.certificates.authority
        self.balancer = SecuredHAProxy(folder, port, self.backends, authority, self.certificates.authority_path)
        self._stack.push_async_callback(asyncio.to_thread, self.balancer.stop)
        await asyncio.to_thread(self.balancer.start)

    async def _add_worker(
        self, role: str, name: str, port: int, other: dict[str, object], model: Path | None = None
    ) -> Worker:
        link = Link(name, ("127.0.0.1", port))
        await link.start()
        log_path = self.log_dir / f"{name}.stderr.log"
        options = self.options
        num_ranks = options.num_ranks if role == "target" else 1
        self.certificates.issue(name)
        flags = {
            "--model": model or (DEMO_TARGET if role == "target" else DEMO_DRAFT),
            "--port": port,
            "--announce": link.address,
            "--worker-id": name,
            "--tls-dir": self.certificates.folder(name),
            "--dtype": options.dtype,
            "--max-num-seqs": options.num_slots if role == "target" else options.num_clients + 8,
            "--max-model-len": MAX_MODEL_LEN,
            "--kv-cache-gib": (
                options.kv_cache_gib * (1 if options.dtype == "bfloat16" else 2) if role == "target" else 0.25
            ),
            "--num-threads": 1,
            "--drain-grace-s": options.drain_grace_s,
        }
        command = [*launcher(f"{role}_worker", num_ranks, WORKER_GRACE_S), *flatten(flags | other)]
        if role == "target" and options.vllm_python:
            command = self._vllm_command(flags)
        # Standard error goes to a file of its own, as it does where a service manager keeps it, and not through a pipe.
        words = (
            "/bin/sh",
            "-c",
            'exec "$@" 2>>"$CHAOS_LOG"',
            "sh",
            *command,
        )
        environment = self._environment(name) | {"CHAOS_LOG": str(log_path), "OMP_NUM_THREADS": "1"}
        is_poisonable = role == "target" and not options.vllm_python
        environment |= rank_environment(num_ranks) | (poison.environment() if is_poisonable else {})
        spec = ChildSpec(name, role, words, environment, options.ready_timeout_s, stop_grace_s=5.0)
        child = Child(spec, ChildLog(name, self.log_dir), RESTART, self._hear)
        self.workers[name] = Worker(name, role, link, child, log_path)
        return self.workers[name]

    def _vllm_command(self, flags: Mapping[str, object]) -> list[str]:
        """The command of a target whose model vLLM runs, from the flags of ours."""
        own = {name: flags[name] for name in flags if name not in VLLM_FLAGS and name not in NOT_FOR_VLLM}
        theirs = {name: flags[name] for name in VLLM_FLAGS} | {"--kv-cache-memory-bytes": VLLM_KV_BYTES}
        command = [self.options.vllm_python, "-m", "target_worker", *flatten({"--engine": "vllm", **own})]
        return [*command, "--", "--enforce-eager", *flatten(theirs)]

    async def _start_coordinator(self, index: int, http_port: int, grpc_port: int, metrics_port: int) -> None:
        name = f"coordinator-{index}"
        flags = {
            "--tokenizer": DEMO_TARGET,
            "--port": http_port,
            "--grpc-port": grpc_port,
            "--metrics-port": metrics_port,
            "--tls-dir": self.certificates.folder("coordinator"),
            "--api-keys": self._keys_file,
            "--num-replicas": self.options.num_replicas,
            "--target-silence-max": self.options.target_silence_max_s,
            "--client-stall-max": self.options.client_stall_max_s,
            "--max-queue-wait": self.options.queue_wait_max_s,
            "--max-requests": self.options.requests_max,
            "--ray-temp-dir": self.scratch / f"r{index}",
            "--batch-files": self.scratch / "batches",
        }
        words = (*module("coordinator"), *flatten(flags), "--require-worker-ids")
        spec = ChildSpec(name, "coordinator", words, self._environment("coordinator"), READY_TIMEOUT_S, 15.0)
        self.backends.append(Backend(http_port, grpc_port))
        for attempt in range(RAY_STARTS_MAX):
            child = Child(spec, ChildLog(name, self.log_dir), RESTART, self._hear)
            try:
                await child.start()
                break
            except StartError:
                await child.stop()
                if attempt == RAY_STARTS_MAX - 1:
                    raise
        self.coordinators.append(child)

    def _environment(self, name: str) -> dict[str, str]:
        return {
            "OUTRIDER_REDIS_URL": self.redis.url_for(name),
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
            has_missed_redis = worker is not None and not worker.is_ready and _has_missed_redis(worker.log_path)
            if worker is not None:
                worker.is_ready = False
            if event.name in self._expected_ends:
                self._expected_ends.discard(event.name)
            elif deaths := [ends for names, ends in self._mortal if event.name in names]:
                for ends in deaths:
                    ends.append(event.name)
            elif has_missed_redis:
                self._say(f"   {event.name} cannot start while Redis is away, and tries again")
            elif not self._is_stopping:
                self.surprises.append(f"{event.name} {event.detail}")

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
            self._return(worker.name)

    @asynccontextmanager
    async def only_one(self, part: str) -> AsyncIterator[None]:
        """Holds something that there is only one of, for as long as the context is open."""
        async with self._locks.setdefault(part, asyncio.Lock()):
            self._borrowed.add(part)
            try:
                yield
            finally:
                self._return(part)

    def _return(self, name: str) -> None:
        self._borrowed.discard(name)
        self._returned_s[name] = time.monotonic()

    def expect_end(self, name: str) -> None:
        """The next end of this process, a worker or `coordinator-0`, is no surprise; it is started again at once."""
        self._expected_ends.add(name)
        if name in self.workers:
            self.workers[name].is_ready = False

    @contextlib.contextmanager
    def expecting_ends(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Ends of these processes are no surprise for as long as the context is open; they are told as they come."""
        entry = frozenset(names), list[str]()
        self._mortal.append(entry)
        try:
            yield entry[1]
        finally:
            self._mortal.remove(entry)

    def is_touched(self, name: str, since_s: float) -> bool:
        """Whether a fault has had this worker, or part, in its hands since then."""
        return name in self._borrowed or self.was_returned(name, since_s)

    def was_returned(self, name: str, since_s: float) -> bool:
        """Whether a fault that had this worker, or part, has come to its end since then."""
        return self._returned_s.get(name, 0.0) >= since_s

    def may_break_connections(self, since_s: float) -> bool:
        """Whether a fault has had since then what carries everybody's connections."""
        return any(self.is_touched(part, since_s) for part in ("balancer", "certificates", "coordinator"))

    async def add_worker(self, role: str, name: str, model: Path | None = None, **other: object) -> Worker:
        """One more, which is ready. `other`: flags, without their dashes, in place of the usual ones. It is started
        again for a while, as Kubernetes does: what it needs may be away just now. Raises StartError."""
        flags = {f"--{flag.replace('_', '-')}": value for flag, value in other.items()}
        worker = await self._add_worker(role, name, free_ports(1)[0], flags, model)
        until_s = time.monotonic() + JOIN_S_MAX
        while True:
            try:
                await worker.child.start()
            except StartError:
                if time.monotonic() > until_s:
                    await self.retire(name)
                    raise
                await asyncio.sleep(1.0)
            else:
                return worker

    async def retire(self, name: str) -> None:
        """Ends a worker that was added, as Kubernetes does. Nobody starts it again."""
        worker = self.workers.pop(name)
        await worker.child.stop()
        await worker.link.stop()

    def send(self, worker: Worker, number: signal.Signals) -> None:
        """Sends it to the worker itself. What ends it is expected to."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.expect_end(worker.name)
        with contextlib.suppress(ProcessLookupError):  # it has just died by itself, which is told elsewhere
            os.kill(worker.pid, number)

    def send_to_another_rank(self, worker: Worker, number: signal.Signals, rng: random.Random) -> None:
        """To one of the processes of the worker that do what the first one says. All end with one that does."""
        if number is signal.SIGKILL:
            self.expect_end(worker.name)
        with contextlib.suppress(psutil.Error):
            ranks = psutil.Process(psutil.Process(worker.pid).ppid()).children()
            rng.choice([rank for rank in ranks if rank.pid != worker.pid]).send_signal(number)

    def ray_processes(self, index: int) -> list[psutil.Process]:
        """All that a coordinator has started, of Ray and of Serve, that live."""
        with contextlib.suppress(psutil.Error, KeyError):
            pid = int(self.coordinators[index].ready_line["pid"])
            return psutil.Process(pid).children(recursive=True)
        return []

    def replicas(self, index: int | None = None) -> list[psutil.Process]:
        """The living replicas of one coordinator, or of all coordinators."""
        indices = range(len(self.coordinators)) if index is None else (index,)
        found = []
        for process in (each for one in indices for each in self.ray_processes(one)):
            with contextlib.suppress(psutil.Error):
                if any("ServeReplica" in word for word in process.cmdline()):
                    found.append(process)
        return found

    def hint_streams_to(self, target: Worker) -> Callers:
        """The connections that draft workers have made to it."""
        link, pids = target.link, [worker.pid for worker in self.of_role("draft") if worker.is_ready]

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

    async def redis_keys(self) -> set[str]:
        """Names of the keys in Redis, read past the link, with each run's incarnation left out."""
        return {re.sub(r"[0-9a-f]{32}", "*", key) for key in await self.redis.keys()}

    # What it looks like from outside.

    async def health(self, index: int) -> dict[str, Any]:
        """The health that a coordinator reports; an `error` if it does not answer."""
        try:
            url = f"https://127.0.0.1:{self.backends[index].http_port}/health"
            found: dict[str, Any] = (await self._operator.get(url, timeout=2.0)).json()
        except (httpx.HTTPError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return found

    async def metrics_pages(self) -> dict[str, str]:
        """Metrics pages of every worker and of every coordinator replica, by name; empty for one that does not
        answer."""
        urls = {name: worker.metrics_url for name, worker in self.workers.items() if worker.is_ready}
        for index, child in enumerate(self.coordinators):
            first = int(child.ready_line["metrics_port"])
            for process in self.replicas(index):
                with contextlib.suppress(psutil.Error):
                    for each in process.net_connections("tcp"):
                        if each.status == psutil.CONN_LISTEN and each.laddr.port in range(first, first + METRICS_PORTS):
                            url = f"https://127.0.0.1:{each.laddr.port}/metrics"
                            urls[f"coordinator-{index} {process.pid}"] = url
        pages = await asyncio.gather(*(self._page(url) for url in urls.values()))
        return dict(zip(urls, pages, strict=True))

    async def page_of(self, worker: Worker) -> str:
        """The worker's metrics; empty while it does not answer."""
        return await self._page(worker.metrics_url) if worker.is_ready else ""

    async def target_pages(self) -> dict[str, str]:
        """Metrics pages of the targets that are ready, by name; empty for one that does not answer."""
        urls = {each.name: each.metrics_url for each in self.of_role("target") if each.is_ready}
        pages = await asyncio.gather(*(self._page(url) for url in urls.values()))
        return dict(zip(urls, pages, strict=True))

    async def _page(self, url: str) -> str:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._watcher.get(url, timeout=5.0)).text
        return ""

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
        keys = await self.redis_keys()
        for worker in self.workers.values():
            if worker.name not in aside and f"{{or:{worker.role}}}:w:{worker.name}" not in keys:
                return f"Redis knows nothing of {worker.name}"
        for index in range(0 if "coordinator" in aside else len(self.coordinators)):
            if len(self.replicas(index)) < self.options.num_replicas:
                return f"a replica of coordinator-{index} is missing"
            health = await self.health(index)
            wanted = {
                role: sum(worker.name not in aside for worker in self.of_role(role)) for role in ("target", "draft")
            }
            is_whole = (
                health.get("registry") == "ok"
                and health["num_target_workers"] >= wanted["target"]
                and health["num_draft_workers"] >= wanted["draft"]
                and not {each["worker_id"] for each in health["excluded_workers"]} - aside
            )
            if not is_whole:
                return f"/health of coordinator-{index} says {health}"
        return None


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
