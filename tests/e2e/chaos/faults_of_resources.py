"""Resources that run out: memory while a prompt is prefilled, processor time, descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar, Final

import psutil

from tests.e2e.chaos import cgroups
from tests.e2e.chaos.cases import MAX_MODEL_LEN, Case
from tests.e2e.chaos.cgroups import Controller, Group, group
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.descriptors import exhausted
from tests.e2e.chaos.fault import Fault, WorkerFault
from tests.e2e.chaos.fleet import READY_TIMEOUT_S, Worker
from tests.e2e.chaos.pauses import run_part_time

MEMORY_LEFT_BYTES: Final = 1 << 20
KILLED_S_MAX: Final = 5.0
"""For prefilling to need more memory than there is."""
LOOK_EVERY_S: Final = 0.01
ASK_EVERY_S: Final = 0.2
GENERATED: Final = "outrider_generation_tokens_total"
CORE_SHARE: Final = 0.1
NUM_PROMPTS: Final = 6
"""As many long prompts are asked for at once that every target gets some."""


class _InPrefill(WorkerFault):
    """While long prompts are prefilled that nobody has asked for before."""

    needs_own_engine = True
    part = "target"

    @asynccontextmanager
    async def prefilling(self) -> AsyncIterator[None]:
        """Long prompts are on their way to the targets for as long as the context is open; nobody reads the answers."""
        leave = asyncio.Event()
        async with asyncio.TaskGroup() as asking:
            for _ in range(NUM_PROMPTS):
                asking.create_task(self._keep_asking(self.rng.getrandbits(32), leave))
            try:
                yield
            finally:
                leave.set()

    async def _keep_asking(self, seed: int, leave: asyncio.Event) -> None:
        rng = random.Random(seed)
        while not leave.is_set():
            words = " ".join(str(rng.randrange(10_000)) for _ in range(MAX_MODEL_LEN // 6))
            await self.fleet.client.ask(Case("long prompt", words, max_tokens=4), leave=leave)

    async def until_back(self, worker: Worker, num_lives: int) -> None:
        """Until it has lived once more than so many times; for as long as a start takes at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_TIMEOUT_S):
                while worker.num_lives <= num_lives:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(LOOK_EVERY_S)


class TargetOutOfMemory(_InPrefill):
    """A target's control group has no memory left while it prefills: the kernel kills it, and it is started again."""

    name = "target OOM-killed in prefill"

    @classmethod
    def why_not(cls) -> str | None:
        return cgroups.why_not(Controller.MEMORY)

    async def hit(self, worker: Worker) -> None:
        num_lives = worker.num_lives
        with self.fleet.expecting_ends([worker.name]):
            with group(Controller.MEMORY) as made:
                made.take(worker.pid)
                async with self.prefilling():
                    await asyncio.sleep(self.rng.uniform(0.0, 0.5))
                    was_killed = await self._take_memory(worker, made)
            if was_killed:
                await self.until_back(worker, num_lives)
            else:
                self.fleet.surprises.append(f"{worker.name} lives on without any memory left")

    async def _take_memory(self, worker: Worker, made: Group) -> bool:
        """Whether that was the end of it."""
        deadline_s = asyncio.get_running_loop().time() + KILLED_S_MAX
        while True:
            try:
                made.limit_memory(made.memory_bytes() + MEMORY_LEFT_BYTES)
                break
            except OSError:  # it has taken more than that meanwhile
                if asyncio.get_running_loop().time() > deadline_s:
                    raise
        self.describe(f"{worker.name} by itself")
        if await self._is_killed(made):
            return True
        self.describe(f"{worker.name} for its neighbour")  # all that it needed it had before
        with made.crowded(2 * MEMORY_LEFT_BYTES):
            return await self._is_killed(made)

    async def _is_killed(self, made: Group) -> bool:
        """Whether the kernel kills it in time."""
        deadline_s = asyncio.get_running_loop().time() + KILLED_S_MAX
        while not made.num_killed():
            if asyncio.get_running_loop().time() > deadline_s:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        return True


class TargetAllocationsFail(_InPrefill):
    """The system gives a target no more memory while it prefills, and does not kill it: allocations fail. It ends by
    itself and comes back, or goes on as if nothing had been."""

    name = "target allocations fail in prefill"
    seconds: ClassVar[tuple[float, float]] = (0.5, 5.0)

    async def hit(self, worker: Worker) -> None:
        seconds = self.rng.uniform(*self.seconds)
        num_lives, process = worker.num_lives, psutil.Process(worker.pid)
        with self.fleet.expecting_ends([worker.name]):
            async with self.prefilling():
                self.describe(worker.name, seconds)
                with contextlib.suppress(psutil.NoSuchProcess):
                    before = process.rlimit(psutil.RLIMIT_AS)
                    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, before[1]))
                    await asyncio.sleep(seconds)
                    process.rlimit(psutil.RLIMIT_AS, before)
            if not await self._goes_on(worker, process):
                self.describe(f"{worker.name}, which ended", seconds)
                await self.until_back(worker, num_lives)

    async def _goes_on(self, worker: Worker, process: psutil.Process) -> bool:
        """Whether it generates, now that there is memory again. False when it has ended instead."""
        before: float | None = None
        deadline_s = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        while process.is_running():
            now = await self.num_generated(worker)
            if before is not None and now is not None and now > before:
                return True
            if asyncio.get_running_loop().time() > deadline_s:
                self.fleet.surprises.append(f"{worker.name} neither generates nor ends")
                return True
            before = now if before is None else before
            await asyncio.sleep(ASK_EVERY_S)
        return False

    async def num_generated(self, worker: Worker) -> float | None:
        """The tokens that the worker has generated since it started; None while its metrics cannot be read."""
        page = await self.fleet.page_of(worker)
        found = [line.split()[-1] for line in page.splitlines() if line.startswith(GENERATED)]
        return float(found[0]) if found else None

    @classmethod
    def why_not(cls) -> str | None:
        return None if hasattr(resource, "RLIMIT_AS") else "this system bounds no address space"


class _Throttled(WorkerFault):
    """10 % of a core, for longer than the silence that the coordinator tolerates."""

    seconds: ClassVar[tuple[float, float]] = (5.0, 20.0)

    async def hit(self, worker: Worker) -> None:
        seconds = self.rng.uniform(*self.seconds)
        self.describe(f"{worker.name} has {CORE_SHARE:g} of a core", seconds)
        if cgroups.why_not(Controller.CPU) is not None:
            await run_part_time(psutil.Process(worker.pid), CORE_SHARE, seconds)
            return
        with group(Controller.CPU) as made:
            made.take(worker.pid)
            made.limit_cpu(CORE_SHARE)
            await asyncio.sleep(seconds)


class TargetThrottled(_Throttled):
    """A target gets 10 % of a core: its sequences are slow, or continue at another. No output is lost to it."""

    name, part = "target CPU throttled", "target"


class DraftThrottled(_Throttled):
    """A draft worker gets 10 % of a core: its hints come too late, and cost speed alone."""

    name, part = "draft CPU throttled", "draft"


class _WorkerDescriptors(WorkerFault):
    """It can open nothing more, so that nobody new reaches it, and reaches nobody new."""

    seconds: ClassVar[tuple[float, float]] = (2.0, 10.0)

    async def hit(self, worker: Worker) -> None:
        seconds = self.rng.uniform(*self.seconds)
        with exhausted(worker.pid) as num_held:
            self.describe(f"{worker.name} at {num_held}", seconds)
            await asyncio.sleep(seconds)


class TargetDescriptors(_WorkerDescriptors):
    """A target can open nothing more: who is connected goes on."""

    name, part = "target descriptors exhausted", "target"


class DraftDescriptors(_WorkerDescriptors):
    """A draft worker can open nothing more: a target that it does not know yet gets no hints of it."""

    name, part = "draft descriptors exhausted", "draft"


class ReplicaDescriptors(Fault):
    """A coordinator replica can open nothing more: it serves whom it has, and others wait or go to another."""

    name, part, costs = "coordinator descriptors exhausted", "coordinator", Costs.CONNECTIONS
    seconds: ClassVar[tuple[float, float]] = (2.0, 10.0)

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.uniform(*self.seconds)
        with exhausted(self.rng.choice(self.fleet.replicas()).pid) as num_held:
            self.describe(f"a replica at {num_held}", seconds)
            await asyncio.sleep(seconds)


FAULTS_OF_RESOURCES: Final[tuple[type[Fault], ...]] = (
    TargetOutOfMemory, TargetAllocationsFail, TargetThrottled, DraftThrottled,
    TargetDescriptors, DraftDescriptors, ReplicaDescriptors,
)  # fmt: skip
