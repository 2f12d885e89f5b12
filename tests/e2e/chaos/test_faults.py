"""Tests of the effects of faults on small processes in place of workers and coordinators: they are hit, held, and
restored."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import pytest_asyncio

from outrider.local.child import Child
from outrider.local.child_log import ChildLog
from outrider.local.child_spec import ChildSpec
from tests.e2e.chaos import cgroups, faults_of_processes, faults_of_resources
from tests.e2e.chaos.cgroups import Controller
from tests.e2e.chaos.client import Client
from tests.e2e.chaos.clocks import find_library
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.fleet import RESTART, Fleet, FleetOptions, Worker
from tests.e2e.chaos.ledger import Injection
from tests.e2e.chaos.links import Link
from tests.e2e.chaos.load import Load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="faults are Linux's")

READY = """
import json, os, sys, time
def ready():
    shown = {"event": "ready", "pid": os.getpid(), "skewed": "FAKETIME_TIMESTAMP_FILE" in os.environ}
    print(json.dumps(shown), flush=True)
"""
WORKER = READY + "ready(); time.sleep(300)"
COORDINATOR = (
    READY + "import subprocess; ray = subprocess.Popen([sys.argv[1], '300']); ready(); ray.wait(); sys.exit(1)"
)
STUBBORN = READY + "import subprocess; ray = subprocess.Popen([sys.argv[1], '300']); ready(); time.sleep(300)"
NOBODY_BLAMED: dict[str, Any] = {"excluded_workers": []}


class NoClient:
    """A client whose requests get no answer and end when it is asked to leave."""

    async def ask(self, case: object, leave: asyncio.Event) -> None:
        await leave.wait()


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Three targets and a draft worker that do nothing, and no coordinator yet."""
    fleet = Fleet(FleetOptions(), tmp_path / "logs", lambda line: None)
    (tmp_path / "logs").mkdir()
    fleet.client = cast(Client, NoClient())
    for name in ("target-0", "target-1", "target-2", "draft-0"):
        child = await start(fleet, name, WORKER)
        link = Link(name)
        await link.start()
        log_path = tmp_path / f"{name}.stderr.log"
        log_path.touch()
        fleet.workers[name] = Worker(name, name.partition("-")[0], link, child, log_path)
        fleet.workers[name].is_ready = True
    try:
        yield fleet
    finally:
        fleet._is_stopping = True
        for worker in fleet.workers.values():
            await worker.link.stop()
        children = [worker.child for worker in fleet.workers.values()] + fleet.coordinators
        await asyncio.gather(*(child.stop() for child in children))
        shutil.rmtree(fleet.scratch, ignore_errors=True)


async def start(fleet: Fleet, name: str, code: str, *arguments: str) -> Child:
    words = (sys.executable, "-c", code, *arguments)
    spec = ChildSpec(name, name.partition("-")[0], words, {}, 30.0, stop_grace_s=2.0)
    child = Child(spec, ChildLog(name, fleet.log_dir), RESTART, fleet._hear)
    await child.start()
    return child


async def with_coordinator(fleet: Fleet, tmp_path: Path, code: str = COORDINATOR) -> Child:
    """One whose only child is called as Ray's are."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    for name in ("raylet", "gcs_server"):
        with contextlib.suppress(FileExistsError):
            (tmp_path / name).symlink_to(sleep)
    child = await start(fleet, "coordinator-0", code, str(tmp_path / "raylet"))
    fleet.coordinators.append(child)
    return child


async def inject(
    kind: type[Fault], fleet: Fleet, meanwhile: Callable[[], Awaitable[None]] | None = None, seed: int = 0
) -> Injection:
    """Runs one, and what looks at it meanwhile."""
    injection = Injection(1, kind.name, 0.0, kind.costs)
    fault = kind(fleet, cast(Load, None), random.Random(seed), injection)
    async with asyncio.timeout(60), fault.victim() as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(fault.run(worker))
        if meanwhile is not None:
            await meanwhile()
    return injection


async def eventually(holds: Callable[[], object], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - processes have no events
            await asyncio.sleep(0.01)


def briefly(monkeypatch: pytest.MonkeyPatch, kind: type[Fault], seconds: float = 0.5) -> None:
    monkeypatch.setattr(kind, "seconds", (seconds, seconds))


needs_faketime = pytest.mark.skipif(find_library() is None, reason="libfaketime is not installed")


@needs_faketime
@pytest.mark.parametrize("kind", [faults_of_processes.TargetClockSkewed, faults_of_processes.DraftClockSkewed])
async def test_a_worker_gets_a_wrong_clock_and_the_right_one_again(
    kind: type[Fault], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    briefly(monkeypatch, kind)
    seen: list[bool] = []

    async def look() -> None:
        of_role = fleet.of_role(kind.part)
        await eventually(lambda: any(worker.child.ready_line["skewed"] for worker in of_role))
        seen.append(True)

    await inject(kind, fleet, look)
    assert seen
    assert not any(worker.child.ready_line["skewed"] for worker in fleet.workers.values())
    assert sorted(worker.num_lives for worker in fleet.of_role(kind.part))[-1] == 2
    assert fleet.surprises == []


@needs_faketime
async def test_a_coordinator_gets_a_wrong_clock_and_the_right_one_again(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    briefly(monkeypatch, faults_of_processes.CoordinatorClockSkewed)
    child = await with_coordinator(fleet, tmp_path)

    async def look() -> None:
        await eventually(lambda: child.ready_line["skewed"])

    await inject(faults_of_processes.CoordinatorClockSkewed, fleet, look)
    assert not child.ready_line["skewed"]
    assert fleet.surprises == []


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "connections cut", "connections blackholed"])
async def test_all_targets_are_lost_and_come_back(how: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = faults_of_processes.AllTargetsLost
    briefly(monkeypatch, kind)
    monkeypatch.setattr(random.Random, "choice", lambda rng, found: how if how in found else found[0])
    before = {worker.name: worker.child.spec for worker in fleet.of_role("target")}
    pids = {worker.name: worker.pid for worker in fleet.of_role("target")}
    injection = await inject(kind, fleet)
    assert how in injection.detail
    for worker in fleet.of_role("target"):
        assert worker.is_ready
        assert worker.child.spec == before[worker.name]
        assert (worker.pid != pids[worker.name]) == (how == "SIGKILL")
        assert psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED
    assert fleet.surprises == []


async def test_a_coordinator_that_stood_still_may_blame_nobody(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = faults_of_processes.CoordinatorStopped
    briefly(monkeypatch, kind)
    monkeypatch.setattr(faults_of_processes, "BLAMED_S", 0.3)
    child = await with_coordinator(fleet, tmp_path)
    process = psutil.Process(int(child.ready_line["pid"]))
    blamed = {"excluded_workers": [{"worker_id": "target-1", "reason": "did not answer a moment ago"}]}
    health = dict(NOBODY_BLAMED)

    async def look() -> None:
        await eventually(lambda: process.status() == psutil.STATUS_STOPPED)

    async def health_of(index: int) -> dict[str, Any]:
        return health

    monkeypatch.setattr(fleet, "health", health_of)
    await inject(kind, fleet, look)
    assert process.status() != psutil.STATUS_STOPPED
    assert fleet.surprises == []
    health |= blamed
    await inject(kind, fleet, look)
    assert len(fleet.surprises) == 1
    assert "blamed target-1" in fleet.surprises[0]


async def test_a_target_that_another_fault_has_may_be_blamed(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = faults_of_processes.CoordinatorStopped
    briefly(monkeypatch, kind)
    monkeypatch.setattr(faults_of_processes, "BLAMED_S", 0.3)
    await with_coordinator(fleet, tmp_path)

    async def health_of(index: int) -> dict[str, Any]:
        return {"excluded_workers": [{"worker_id": taken.name, "reason": "did not answer a moment ago"}]}

    monkeypatch.setattr(fleet, "health", health_of)
    async with fleet.borrowed("target", random.Random(1)) as taken:
        await inject(kind, fleet)
    assert fleet.surprises == []


@pytest.mark.parametrize("code", [COORDINATOR, STUBBORN], ids=["ends", "lives on"])
async def test_a_coordinator_has_to_end_with_its_ray(
    code: str, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await with_coordinator(fleet, tmp_path, code)
    pid = child.ready_line["pid"]
    monkeypatch.setattr(faults_of_processes, "RAY_ENDS_S_MAX", 1.0)
    monkeypatch.setattr(random.Random, "choice", lambda rng, found: found[-1])
    await inject(faults_of_processes.RayHeadKilled, fleet)
    assert child.ready_line["pid"] != pid
    assert bool(fleet.surprises) is (code == STUBBORN)


@pytest.mark.skipif(cgroups.why_not(Controller.MEMORY) is not None, reason="no memory groups here")
async def test_a_target_without_memory_is_killed_and_comes_back(fleet: Fleet) -> None:
    pids = {worker.name: worker.pid for worker in fleet.of_role("target")}
    await inject(faults_of_resources.TargetOutOfMemory, fleet)
    assert all(worker.is_ready for worker in fleet.of_role("target"))
    assert sum(worker.pid != pids[worker.name] for worker in fleet.of_role("target")) == 1
    assert fleet.surprises == []


def generating(monkeypatch: pytest.MonkeyPatch, numbers: Iterator[float | None]) -> None:
    """Has a target's metrics report these numbers of generated tokens, one at each look."""

    async def num_generated(self: object, worker: Worker) -> float | None:
        return next(numbers)

    monkeypatch.setattr(faults_of_resources.TargetAllocationsFail, "num_generated", num_generated)
    monkeypatch.setattr(faults_of_resources, "ASK_EVERY_S", 0.01)


async def test_a_target_that_got_no_memory_may_end_when_it_has_some_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: one took longer to end than was waited for, and its end was a surprise."""
    kind = faults_of_resources.TargetAllocationsFail
    briefly(monkeypatch, kind, 0.01)
    lives = {worker.name: worker.num_lives for worker in fleet.of_role("target")}

    def numbers() -> Iterator[float]:
        for _ in range(20):
            yield 7.0
        for name in fleet._borrowed:
            os.kill(fleet.workers[name].pid, signal.SIGKILL)
        yield from itertools.repeat(7.0)

    generating(monkeypatch, numbers())
    injection = await inject(kind, fleet)
    assert "which ended" in injection.detail
    assert sum(worker.num_lives - lives[worker.name] for worker in fleet.of_role("target")) == 1
    assert fleet.surprises == []


async def test_a_target_that_neither_ends_nor_generates_is_told(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = faults_of_resources.TargetAllocationsFail
    briefly(monkeypatch, kind, 0.01)
    monkeypatch.setattr(faults_of_resources, "READY_TIMEOUT_S", 0.1)
    generating(monkeypatch, itertools.chain([None, 7.0], itertools.repeat(7.0)))
    await inject(kind, fleet)
    assert len(fleet.surprises) == 1
    assert "neither generates nor ends" in fleet.surprises[0]


@pytest.mark.parametrize(
    "kind",
    [
        faults_of_resources.TargetAllocationsFail,
        faults_of_resources.TargetThrottled,
        faults_of_resources.TargetDescriptors,
        faults_of_resources.DraftDescriptors,
    ],
)
async def test_a_worker_that_bears_it_is_as_before(
    kind: type[Fault], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    briefly(monkeypatch, kind)
    generating(monkeypatch, itertools.count())
    before = {worker.name: limits_of(worker.pid) for worker in fleet.workers.values()}
    injection = await inject(kind, fleet)
    assert injection.detail
    assert {worker.name: limits_of(worker.pid) for worker in fleet.workers.values()} == before
    assert fleet.surprises == []


def limits_of(pid: int) -> tuple[object, ...]:
    process = psutil.Process(pid)
    groups = Path(f"/proc/{pid}/cgroup").read_text()
    return pid, process.rlimit(psutil.RLIMIT_AS), process.rlimit(psutil.RLIMIT_NOFILE), groups, os.getpid()


def test_who_breaks_connections_says_so() -> None:
    kinds = faults_of_processes.FAULTS_OF_PROCESSES
    costs = {kind.costs for kind in kinds if kind.part in ("coordinator", "balancer")}
    assert costs == {Costs.CONNECTIONS, Costs.CAPACITY}, "those that stand still keep their slots"
    assert {kind.costs for kind in kinds if kind.part == "targets"} == {Costs.CAPACITY}
