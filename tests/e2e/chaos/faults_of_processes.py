"""Coordinators, the balancer and all targets at once: processes that stand still, die, or go by another clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import psutil

from outrider.local.child import Child
from tests.e2e.chaos.clocks import Clock, find_library
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fault import Fault, WorkerFault
from tests.e2e.chaos.fleet import Worker
from tests.e2e.chaos.links import Link
from tests.e2e.chaos.pauses import stopped
from tests.e2e.chaos.specs import delayed, with_environment

BACK_S_MAX: Final = 120.0
"""Longest time from a process' end to its next ready line, apart from the time that it was kept away."""
RAY_ENDS_S_MAX: Final = 90.0
"""Longest time for a coordinator to notice that Ray is lost, and to end."""
BLAMED_S: Final = 5.0
"""Time for which a coordinator is asked which workers it excludes after its pause: longer than it excludes any."""
LOOK_EVERY_S: Final = 0.1
SKEWS: Final = ((3600, 1.0), (-3600, 1.0), (0, 1.01))
"""Pairs of the seconds that a clock is ahead and the rate at which it runs."""


class _CoordinatorFault(Fault):
    """A fault of one of the coordinators, drawn at random. Its clients come back at the other one."""

    part, costs = "coordinator", Costs.CONNECTIONS

    async def run(self, worker: Worker | None) -> None:
        await self.hit(self.rng.randrange(len(self.fleet.coordinators)))

    @abstractmethod
    async def hit(self, index: int) -> None: ...

    def process(self, index: int) -> psutil.Process:
        return psutil.Process(int(self.fleet.coordinators[index].ready_line["pid"]))


class _Paused(_CoordinatorFault):
    """SIGSTOP, and SIGCONT some time later. Nobody may be blamed for what was the coordinator's own absence.

    Its sequences keep their slots meanwhile.
    """

    costs = Costs.CAPACITY
    seconds: ClassVar[tuple[float, float]] = (5.0, 60.0)

    @abstractmethod
    def family(self, index: int) -> Callable[[], list[psutil.Process]]:
        """Returns a function that finds the processes to stop; they are drawn once and looked up anew at each call."""

    async def hit(self, index: int) -> None:
        seconds, began_s = self.rng.uniform(*self.seconds), time.monotonic()
        targets = {worker.name: worker.num_lives for worker in self.fleet.of_role("target")}
        with stopped(self.family(index)) as num_processes:
            self.describe(f"{num_processes} processes of coordinator-{index}", seconds)
            await asyncio.sleep(seconds)
        blamed = await self._blamed(index, targets, began_s)
        if blamed and not self.fleet.is_touched("certificates", began_s):  # without its own it reaches nobody
            self.fleet.surprises.append(
                f"coordinator-{index} stood still for {seconds:.1f} s and blamed {', '.join(sorted(blamed))} for it"
            )

    async def _blamed(self, index: int, targets: dict[str, int], began_s: float) -> set[str]:
        """Targets that have lived through all of it, that nobody has touched since `began_s`, and that it passes over
        all the same."""
        blamed: set[str] = set()
        end_s = time.monotonic() + BLAMED_S
        while time.monotonic() < end_s:
            health = await self.fleet.health(index)
            passed_over = {
                each["worker_id"]
                for each in health.get("excluded_workers", ())
                if each["reason"] == "did not answer a moment ago"
            }
            for worker in self.fleet.of_role("target"):
                is_well = worker.is_ready and targets.get(worker.name) == worker.num_lives
                if worker.name in passed_over and is_well and not self.fleet.is_touched(worker.name, began_s):
                    blamed.add(worker.name)
            await asyncio.sleep(LOOK_EVERY_S)
        return blamed


class ReplicaStopped(_Paused):
    """A coordinator replica hangs for 5 to 60 s and goes on: its clients wait, new ones find the others."""

    name = "coordinator replica SIGSTOP"

    def family(self, index: int) -> Callable[[], list[psutil.Process]]:
        replica = self.rng.choice(self.fleet.replicas(index))
        return lambda: _with_children(replica)


class CoordinatorStopped(_Paused):
    """A whole coordinator with its Ray hangs for 5 to 60 s and goes on, as when its machine is moved."""

    name = "coordinator machine SIGSTOP"

    def family(self, index: int) -> Callable[[], list[psutil.Process]]:
        process = self.process(index)
        return lambda: _with_children(process)


class RayHeadKilled(_CoordinatorFault):
    """A process that Ray cannot do without dies: its coordinator ends, and is started again."""

    name = "Ray head SIGKILL"

    async def hit(self, index: int) -> None:
        which = self.rng.choice(("gcs_server", "raylet"))
        self.describe(f"{which} of coordinator-{index}")
        with self.fleet.expecting_ends([f"coordinator-{index}"]):
            await self._kill(index, which)

    async def _kill(self, index: int, which: str) -> None:
        child, before = self.fleet.coordinators[index], self.process(index)
        for process in self.fleet.ray_processes(index):
            with contextlib.suppress(psutil.Error):
                if process.name() == which:
                    process.kill()
        began_s = time.monotonic()
        if not await _eventually(lambda: not before.is_running(), RAY_ENDS_S_MAX):
            self.fleet.surprises.append(f"coordinator-{index} lives {RAY_ENDS_S_MAX:g} s after its {which} was killed")
            before.kill()
        self.describe(f"{which} of coordinator-{index}, which ended", time.monotonic() - began_s)
        await _until_next_life(child, before.pid)


class _ClockSkewed(Fault):
    """A process is started with a clock that is wrong for a while, and then with the right one again."""

    seconds: ClassVar[tuple[float, float]] = (5.0, 15.0)

    async def skew(self, name: str, child: Child, again: Callable[[], Awaitable[None]]) -> None:
        """`again` ends the process as a rollout does; it comes back with the specification that it has then."""
        usual = child.spec
        seconds = self.rng.uniform(*self.seconds)
        with tempfile.TemporaryDirectory(prefix="chaos-clock-") as folder:
            clock, what = _skewed(self.rng.choice(SKEWS), Path(folder))
            self.describe(f"{name} {what}", seconds)
            child.spec = with_environment(usual, clock.environment)
            try:
                await again()
                await asyncio.sleep(seconds)
            finally:
                child.spec = usual
                await again()

    @classmethod
    def why_not(cls) -> str | None:
        return None if find_library() is not None else "libfaketime is not installed"


class CoordinatorClockSkewed(_ClockSkewed, _CoordinatorFault):
    """A coordinator is started with a clock that is wrong for a while, and then with the right one again."""

    name = "coordinator clock skewed"

    async def hit(self, index: int) -> None:
        child, name = self.fleet.coordinators[index], f"coordinator-{index}"

        async def again() -> None:
            # One that has ended by itself is coming back with the specification of before, perhaps.
            await _eventually(lambda: psutil.pid_exists(int(child.ready_line["pid"])), BACK_S_MAX)
            pid = int(child.ready_line["pid"])
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).terminate()
            await _until_next_life(child, pid)

        # Ray may fail to start on a busy machine, and is tried again.
        with self.fleet.expecting_ends([name]):
            await self.skew(name, child, again)


class BalancerKilled(Fault):
    """SIGKILL for HAProxy, and another one at once or two seconds later: every connection of every client is lost."""

    name, part, costs = "HAProxy SIGKILL", "balancer", Costs.CONNECTIONS

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.choice((0.0, 2.0))
        self.describe("", seconds)
        balancer = self.fleet.balancer
        async with self.fleet.balancer_lock:
            assert balancer.process is not None
            os.killpg(balancer.process.pid, signal.SIGKILL)  # the master and its worker at once
            await asyncio.to_thread(balancer.process.wait)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(balancer.start)


class AllTargetsLost(Fault):
    """No target is left, and all are back inside the minute for which a text waits: those that have begun go on."""

    needs_own_engine = True
    name, part, costs = "all targets lost", "targets", Costs.CAPACITY
    seconds: ClassVar[tuple[float, float]] = (2.0, 20.0)

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.uniform(*self.seconds)
        ways: dict[str, Callable[[list[Worker], float], Awaitable[None]]] = {
            "SIGKILL": self._kill,
            "SIGSTOP": self._stop,
            "connections cut": partial(self._break_links, Link.refuse),
            "connections blackholed": partial(self._break_links, Link.stall),
        }
        how = self.rng.choice(list(ways))
        self.describe(how, seconds)
        await ways[how](self.fleet.of_role("target"), seconds)

    async def _kill(self, targets: list[Worker], seconds: float) -> None:
        """Kills the targets and starts them again after `seconds`, which takes some seconds more."""
        usual = [worker.child.spec for worker in targets]
        lives = [worker.num_lives for worker in targets]
        try:
            for worker in targets:
                worker.child.spec = delayed(worker.child.spec, seconds)
                if worker.is_ready:
                    self.fleet.send(worker, signal.SIGKILL)
            for worker, num_lives in zip(targets, lives, strict=True):
                await _eventually(lambda: worker.num_lives > num_lives, seconds + BACK_S_MAX)  # noqa: B023
        finally:
            for worker, spec in zip(targets, usual, strict=True):
                worker.child.spec = spec

    async def _stop(self, targets: list[Worker], seconds: float) -> None:
        with stopped(lambda: [psutil.Process(worker.pid) for worker in targets if worker.is_ready]):
            await asyncio.sleep(seconds)

    async def _break_links(self, how: Callable[[Link], int], targets: list[Worker], seconds: float) -> None:
        for worker in targets:
            how(worker.link)
        try:
            await asyncio.sleep(seconds)
        finally:
            for worker in targets:
                worker.link.open()


class AllTargetsLostForLong(AllTargetsLost):
    """No target for longer than a sequence waits: each ends with an error that says so, keeps its tokens, and can be
    resumed afterwards."""

    name, seconds, is_rare = "all targets lost for 70 s", (70.0, 70.0), True


class _WorkerClockSkewed(_ClockSkewed, WorkerFault):
    """A fault of one worker's clock."""

    async def hit(self, worker: Worker) -> None:
        async def again() -> None:
            num_lives = worker.num_lives
            self.fleet.send(worker, signal.SIGTERM)
            await _eventually(lambda: worker.num_lives > num_lives, BACK_S_MAX)

        await self.skew(worker.name, worker.child, again)


class TargetClockSkewed(_WorkerClockSkewed):
    """A target whose clock is an hour ahead, an hour behind, or fast by 1 %, from its start on."""

    name, part, needs_own_engine = "target clock skewed", "target", True


class DraftClockSkewed(_WorkerClockSkewed):
    """A draft worker whose clock is an hour ahead, an hour behind, or fast by 1 %, from its start on."""

    name, part = "draft clock skewed", "draft"


FAULTS_OF_PROCESSES: Final[tuple[type[Fault], ...]] = (
    ReplicaStopped, CoordinatorStopped, RayHeadKilled, CoordinatorClockSkewed, BalancerKilled,
    AllTargetsLost, AllTargetsLostForLong, TargetClockSkewed, DraftClockSkewed,
)  # fmt: skip


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _skewed(skew: tuple[int, float], folder: Path) -> tuple[Clock, str]:
    """Returns a clock for processes that start later, and a description of its error."""
    seconds, rate = skew
    clock = Clock(folder / "clock", find_library())
    clock.set(seconds, rate)
    return clock, f"{seconds:+d} s" if rate == 1.0 else f"at {rate:g} of its rate"


async def _until_next_life(child: Child, pid: int) -> None:
    await _eventually(lambda: child.ready_line.get("pid") != pid, BACK_S_MAX)


async def _eventually(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until the condition holds; returns whether it did in time."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(LOOK_EVERY_S)
    return True
