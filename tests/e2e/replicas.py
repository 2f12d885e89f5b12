"""Several coordinators over one Redis, one target and one draft, each a process of its own, as on several machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from coordinator.recovery.journal_entry import unpack
from coordinator.settings import Hosting
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis
from tests.e2e.system import START_TIMEOUT_S, Command, eventually

NUM_PLACES = 32


def ready_line(command: Command) -> dict[str, Any] | None:
    """The line that a process printed when it became ready; None before."""
    lines = command.stdout.splitlines()
    return next((json.loads(line) for line in lines if line.startswith('{"event": "ready"')), None)


def get(url: str) -> httpx.Response:
    """Gets a page from a plain port: no TLS is prepared, which takes longer than all the rest."""
    return httpx.get(url, trust_env=False, verify=False)


def metric(url: str, *names: str) -> float:
    """The sum of the metrics of these names, over all their labels; 0 if they have not been counted yet."""
    families = text_string_to_metric_families(get(url).text)
    return sum(sample.value for family in families for sample in family.samples if sample.name in names)


@dataclass
class Coordinator:
    """One coordinator over all of its lives."""

    name: str
    folder: Path
    redis_url: str
    http_port: int
    grpc_port: int
    ray_folder: Path
    hosting: Hosting = Hosting.RAY_SERVE
    command: Command | None = None
    num_lives: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def trusted(self) -> ssl.SSLContext:
        """Nothing is needed: its ports are plain."""
        return ssl.create_default_context()

    def start(self) -> None:
        self.num_lives += 1
        is_plain = self.hosting is Hosting.PLAIN
        own = () if is_plain else ("--ray-temp-dir", self.ray_folder / f"{self.name}{self.num_lives}")
        self.command = Command.start(
            self.folder / f"{self.name}-{self.num_lives}",
            *("coordinator", "--tokenizer", DEMO_TARGET, "--redis-url", self.redis_url),
            *("--port", self.http_port, "--grpc-port", self.grpc_port, "--hosting", self.hosting, *own),
        )

    def wait_until_ready(self) -> None:
        assert self.command is not None
        wait_until_ready(self.command)

    def num_workers(self) -> tuple[int, int]:
        """The numbers of targets and drafts that the coordinator knows."""
        seen = get(f"{self.url}/health").json()
        return seen["num_target_workers"], seen["num_draft_workers"]

    def num_requests(self) -> int:
        """The number of requests that the coordinator has accepted and not answered."""
        names = (f"outrider_num_requests_{state}" for state in ("running", "waiting"))
        return int(metric(f"{self.url}/metrics", *names))

    def kill(self) -> None:
        """Kills all of its processes, Ray's and HAProxy among them, as when its machine loses power."""
        assert self.command is not None
        while running := self.command.processes():
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.command.process.wait()


@dataclass
class Replicas:
    """A running system: workers, coordinators and Redis."""

    target: Command
    draft: Command
    coordinators: list[Coordinator]
    redis: redis.Redis

    def num_journaled(self, request_id: str) -> int:
        """The number of tokens of a stream of one sequence that its coordinator has shown, as far as the journal has
        them."""
        fields: Any = self.redis.hgetall(f"or:journal:{request_id}")
        num_tokens = 0
        for name, text in fields.items():
            index, is_tokens, chunk = name.decode().partition(":")
            if is_tokens:
                num_tokens += len(unpack(int(index), int(chunk), text.decode()))
        return num_tokens

    def num_requests(self) -> list[int]:
        """The number of open requests at each coordinator."""
        return [each.num_requests() for each in self.coordinators]

    def sessions(self) -> dict[str, float]:
        """The number of sessions that the workers have now."""
        return {
            "target running": self._metric(self.target, "outrider_num_requests_running"),
            "target waiting": self._metric(self.target, "outrider_num_requests_waiting"),
            "draft": self._metric(self.draft, "outrider_draft_sessions"),
        }

    def num_generated(self) -> float:
        """The number of tokens that the target has committed since it started."""
        return self._metric(self.target, "outrider_generation_tokens_total")

    def expect_idle(self) -> None:
        """Returns once neither worker holds a session."""
        eventually(self.sessions, lambda seen: not any(seen.values()), "no session on either worker")

    @contextmanager
    def frozen_target(self) -> Iterator[None]:
        """Nothing is generated meanwhile, so nothing ends. For less than the seconds after which it counts as lost."""
        self._signal_target(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal_target(signal.SIGCONT)

    @contextmanager
    def thawed_target(self) -> Iterator[None]:
        """For a moment, within `frozen_target`."""
        self._signal_target(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal_target(signal.SIGSTOP)

    def _signal_target(self, number: signal.Signals) -> None:
        line = ready_line(self.target)
        assert line is not None
        os.kill(line["pid"], number)

    def _metric(self, worker: Command, name: str) -> float:
        line = ready_line(worker)
        assert line is not None
        return metric(f"http://127.0.0.1:{line['metrics_port']}/metrics", name)


@contextmanager
def running_replicas(folder: Path, num_coordinators: int, hosting: Hosting = Hosting.RAY_SERVE) -> Iterator[Replicas]:
    """Stopped on the way out, whatever happened to them."""
    server = EmbeddedRedis(folder)
    # Sockets of Ray lie below it, and their names are bounded.
    ray_folder = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))
    commands: list[Command] = []
    coordinators: list[Coordinator] = []
    try:
        url = server.start()
        ports = free_ports(2 * num_coordinators)
        for index in range(num_coordinators):
            name = f"c{index}"
            coordinators.append(Coordinator(name, folder, url, ports.pop(), ports.pop(), ray_folder, hosting))
            # One after the other and before the workers: Ray gives up where it takes half a minute to start.
            coordinators[-1].start()
            coordinators[-1].wait_until_ready()
        for role, model in (("target", DEMO_TARGET), ("draft", DEMO_DRAFT)):
            words = (f"{role}-worker", "--model", model, "--redis-url", url, "--max-num-seqs", NUM_PLACES)
            commands.append(Command.start(folder / role, *words))
        for command in commands:
            wait_until_ready(command)
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            replicas = Replicas(commands[0], commands[1], coordinators, client)
            for each in coordinators:
                eventually(each.num_workers, lambda seen: seen == (1, 1), f"{each.name} knows a target and a draft")
            yield replicas
    finally:
        running = commands + [each.command for each in coordinators if each.command is not None]
        for command in running:
            if command.process.poll() is None:
                command.process.terminate()
        for command in running:
            command.stop()
            for pid in command.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        server.stop()
        shutil.rmtree(ray_folder, ignore_errors=True)


def wait_until_ready(command: Command) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while ready_line(command) is None:
        assert command.process.poll() is None, f"{command.arguments} ended:\n{command.stderr}"
        assert time.monotonic() < deadline, f"{command.arguments} not ready in {START_TIMEOUT_S:g} s:\n{command.stderr}"
        time.sleep(0.05)
