"""The faults that can be injected, one class each: how each begins and how it ends.

Each fault runs once: `run` breaks something, holds it for a while and repairs it.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from random import Random
from typing import ClassVar, Final

import psutil

from tests.e2e.chaos.clocks import TAKES_S, find_library
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fault import Fault, NetworkFault, WorkerFault
from tests.e2e.chaos.faults_of_certificates import FAULTS_OF_CERTIFICATES
from tests.e2e.chaos.faults_of_clients import FAULTS_OF_CLIENTS
from tests.e2e.chaos.faults_of_data import FAULTS_OF_DATA
from tests.e2e.chaos.faults_of_hints import FAULTS_OF_HINTS
from tests.e2e.chaos.faults_of_networks import FAULTS_OF_NETWORKS
from tests.e2e.chaos.faults_of_processes import FAULTS_OF_PROCESSES
from tests.e2e.chaos.faults_of_redis import FAULTS_OF_REDIS
from tests.e2e.chaos.faults_of_resources import FAULTS_OF_RESOURCES
from tests.e2e.chaos.fleet import Worker


class _Killed(WorkerFault):
    """SIGKILL; it is started again at once."""

    async def hit(self, worker: Worker) -> None:
        self.describe(worker.name)
        self.fleet.send(worker, signal.SIGKILL)


class _Stopped(WorkerFault):
    """SIGSTOP, and SIGCONT some time later: before anybody could notice, or long after everybody has."""

    seconds: ClassVar[tuple[float, float]]

    async def hit(self, worker: Worker) -> None:
        seconds = self.rng.uniform(*self.seconds)
        self.describe(worker.name, seconds)
        self.fleet.send(worker, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.fleet.send(worker, signal.SIGCONT)


class _Terminated(WorkerFault):
    """SIGTERM: it drains, leaves, and is started again."""

    async def hit(self, worker: Worker) -> None:
        self.describe(worker.name)
        self.fleet.send(worker, signal.SIGTERM)


class TargetKilled(_Killed):
    """As by the kernel when memory runs out."""

    name, part = "target SIGKILL", "target"


class TargetStopped(_Stopped):
    """A target that hangs for less or for more than the silence that the coordinator bears, then goes on."""

    name, part, seconds = "target SIGSTOP", "target", (0.5, 9.0)


class TargetStoppedAndKilled(WorkerFault):
    """A target that hangs and is put down, as a liveness probe would."""

    name, part = "target SIGSTOP, SIGKILL", "target"

    async def hit(self, worker: Worker) -> None:
        seconds = self.rng.uniform(0.5, 6.0)
        self.describe(worker.name, seconds)
        self.fleet.send(worker, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.fleet.send(worker, signal.SIGKILL)


class RankKilled(WorkerFault):
    """A process of a target that is not its first one dies: all of them go, and come back as another incarnation."""

    name, part, needs_ranks = "target rank SIGKILL", "target", True

    async def hit(self, worker: Worker) -> None:
        self.describe(worker.name)
        self.fleet.send_to_another_rank(worker, signal.SIGKILL, self.rng)


class RankStopped(WorkerFault):
    """One hangs, and with it the target, for less or for more than the silence that the coordinator bears."""

    name, part, needs_ranks = "target rank SIGSTOP", "target", True

    async def hit(self, worker: Worker) -> None:
        seconds = self.rng.uniform(0.5, 9.0)
        self.describe(worker.name, seconds)
        same = self.rng.getrandbits(64)  # the one that was stopped is the one to go on
        self.fleet.send_to_another_rank(worker, signal.SIGSTOP, Random(same))
        await asyncio.sleep(seconds)
        self.fleet.send_to_another_rank(worker, signal.SIGCONT, Random(same))


class TargetTerminated(_Terminated):
    """SIGTERM: it drains, leaves, and is started again."""

    name, part = "target SIGTERM", "target"


class TargetCut(NetworkFault, WorkerFault):
    """Every connection to a target is reset, once or for a while."""

    name, part, seconds = "target connections cut", "target", (0.0, 3.0)

    async def hit(self, worker: Worker) -> None:
        if self.rng.random() < 0.5:
            self.describe(f"{worker.name}, {worker.link.cut()} connections once")
        else:
            await self.hold(worker.link, f"{worker.name}, {worker.link.refuse()} connections")


class TargetStalled(NetworkFault, WorkerFault):
    """Nothing passes to or from a target, which runs on."""

    name, part, seconds = "target connections blackholed", "target", (0.5, 9.0)

    async def hit(self, worker: Worker) -> None:
        await self.hold(worker.link, f"{worker.name}, {worker.link.stall()} connections")


class TargetDelayed(NetworkFault, WorkerFault):
    """Everything to and from a target takes longer, each way."""

    name, part, seconds = "target connections delayed", "target", (1.0, 4.0)

    async def hit(self, worker: Worker) -> None:
        worker.link.delay_s = self.rng.choice((0.005, 0.02, 0.1))
        await self.hold(worker.link, f"{worker.name} by {worker.link.delay_s * 1e3:.0f} ms")


class DraftKilled(_Killed):
    """As by the kernel when memory runs out."""

    name, part = "draft SIGKILL", "draft"


class DraftStopped(_Stopped):
    """A draft worker that hangs for less or for more than the silence that the coordinator bears, then goes on."""

    name, part, seconds = "draft SIGSTOP", "draft", (0.5, 9.0)


class DraftTerminated(_Terminated):
    """SIGTERM: it lets go of its sessions, leaves, and is started again."""

    name, part = "draft SIGTERM", "draft"


class DraftCut(NetworkFault, WorkerFault):
    """Every connection of the coordinator to a draft worker is reset, once or for a while."""

    name, part, seconds = "draft connections cut", "draft", (0.0, 3.0)

    async def hit(self, worker: Worker) -> None:
        await self.hold(worker.link, f"{worker.name}, {worker.link.refuse()} connections")


class HintsCut(NetworkFault, WorkerFault):
    """The hint streams of all draft workers to one target are reset; the coordinator's calls to it are not."""

    name, part, seconds = "hint links cut", "target", (0.0, 3.0)

    async def hit(self, worker: Worker) -> None:
        num = worker.link.refuse(self.fleet.hint_streams_to(worker))
        await self.hold(worker.link, f"to {worker.name}, {num} streams")


class HintsStalled(NetworkFault, WorkerFault):
    """Nothing passes on the hint streams of all draft workers to one target."""

    name, part, seconds = "hint links blackholed", "target", (0.5, 6.0)

    async def hit(self, worker: Worker) -> None:
        num = worker.link.stall(self.fleet.hint_streams_to(worker))
        await self.hold(worker.link, f"to {worker.name}, {num} streams")


class ReplicaKilled(Fault):
    """A coordinator replica dies with all its connections; clients come back and go on at another."""

    name, part, costs = "coordinator replica SIGKILL", "coordinator", Costs.CONNECTIONS

    async def run(self, worker: Worker | None) -> None:
        replicas = self.fleet.replicas()
        self.describe(f"one of {len(replicas)}")
        self.rng.choice(replicas).kill()
        await asyncio.sleep(1.0)  # until it is missed


class RedisKilled(Fault):
    """SIGKILL, and an empty one in its place some time later."""

    name, part, empties_redis = "Redis SIGKILL, empty restart", "redis", True

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.choice((0.0, 1.0, 4.0, 9.0))  # less and more than a lease
        self.describe("", seconds)
        self.fleet.redis.send(signal.SIGKILL)
        self.fleet.redis.bury()
        await asyncio.sleep(seconds)
        await self.fleet.redis.begin()


class RedisStopped(Fault):
    """It hangs, then goes on; leases run out meanwhile."""

    name, part = "Redis SIGSTOP", "redis"

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.uniform(0.5, 9.0)
        self.describe("", seconds)
        self.fleet.redis.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.fleet.redis.send(signal.SIGCONT)


class RedisCut(NetworkFault):
    """Every connection to Redis is reset, those that come as well."""

    name, part, seconds = "Redis connections cut", "redis", (0.0, 9.0)

    async def run(self, worker: Worker | None) -> None:
        link = self.fleet.redis.link
        await self.hold(link, f"{link.refuse()} connections")


class RedisCutForAMinute(RedisCut):
    """The same for ten leases, four lives of a reservation and any timeout for it."""

    name, seconds, is_rare = "Redis cut for a minute", (60.0, 60.0), True


class RedisStalled(NetworkFault):
    """Nothing passes to or from Redis."""

    name, part, seconds = "Redis connections blackholed", "redis", (0.5, 9.0)

    async def run(self, worker: Worker | None) -> None:
        link = self.fleet.redis.link
        await self.hold(link, f"{link.stall()} connections")


class LogsFull(Fault):
    """No worker can write another byte to its log, and all of them are given something to say: lost streams."""

    name, part = "log disk full", "logs"

    async def run(self, worker: Worker | None) -> None:
        workers = [each for each in self.fleet.workers.values() if each.is_ready]
        pids = [each.pid for each in workers]
        seconds = self.rng.uniform(0.5, 3.0)
        self.describe(f"{len(pids)} workers", seconds)
        for each in workers:
            _limit_files(each.pid, each.log_path.stat().st_size)
        for target in self.fleet.of_role("target"):
            target.link.cut(self.fleet.hint_streams_to(target))
        await asyncio.sleep(seconds)
        for pid in pids:
            _limit_files(pid, resource.RLIM_INFINITY)


class ClientsLeave(Fault):
    """All clients hang up at once, a few times, each at whatever it was doing."""

    name, part = "clients leave", "clients"

    async def run(self, worker: Worker | None) -> None:
        num_left = 0
        num_times = self.rng.randint(1, 4)
        for _ in range(num_times):
            num_left += self.load.hang_up()
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))
        self.describe(f"{num_left} in {num_times} waves")


class RedisClockStepped(Fault):
    """The time of day jumps for Redis, whose clock leases go by, and back some seconds later."""

    name, part = "Redis clock stepped", "redis"

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.choice((-86_400, -3600, -10, 10, 3600, 86_400))
        self.describe(f"by {seconds:+d} s")
        self.fleet.redis.clock.set(seconds)
        await asyncio.sleep(TAKES_S + self.rng.uniform(0.0, 6.0))
        self.fleet.redis.clock.set(0)
        await asyncio.sleep(TAKES_S)

    @classmethod
    def why_not(cls) -> str | None:
        return None if find_library() is not None else "libfaketime is not installed"


FAULTS: Final[tuple[type[Fault], ...]] = (
    TargetKilled, TargetStopped, TargetStoppedAndKilled, RankKilled, RankStopped, TargetTerminated,
    TargetCut, TargetStalled, TargetDelayed,
    DraftKilled, DraftStopped, DraftTerminated, DraftCut, HintsCut, HintsStalled, ReplicaKilled,
    RedisKilled, RedisStopped, RedisCut, RedisCutForAMinute, RedisStalled, RedisClockStepped, LogsFull, ClientsLeave,
    *FAULTS_OF_NETWORKS, *FAULTS_OF_PROCESSES, *FAULTS_OF_RESOURCES,
    *FAULTS_OF_CERTIFICATES, *FAULTS_OF_CLIENTS, *FAULTS_OF_DATA, *FAULTS_OF_REDIS, *FAULTS_OF_HINTS,
)  # fmt: skip


def _limit_files(pid: int, num_bytes: int) -> None:
    """The longest file that the process may write: beyond it a write fails, as on a full disk (EFBIG for ENOSPC)."""
    try:
        process = psutil.Process(pid)
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (num_bytes, hard))
    except psutil.NoSuchProcess:
        pass  # another fault was faster
