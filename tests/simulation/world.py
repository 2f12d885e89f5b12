"""Runs a scenario, checks the invariants all along, and at the end that everything ended and was freed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

from outrider.concurrency.loop_share import LoopShare
from outrider.hint_service import connections
from tests.simulation.actors import Draft, Target, Worker
from tests.simulation.checks import WorkerChecks
from tests.simulation.client import Client
from tests.simulation.clock import NothingLeftToDoError, SimulatedLoop, TimeStandsStillError
from tests.simulation.coordinators import Coordinator
from tests.simulation.features import Feature
from tests.simulation.judge import Judge, callers_of, settings_of
from tests.simulation.network import Network, Process, make_task
from tests.simulation.process import Host
from tests.simulation.redis_process import REDIS, Redis
from tests.simulation.scenario import Fault, FaultKind, Request, Scenario

_LIVENESS_S: Final = 150.0
"""Time within which every request has ended once the last fault is over, beside what the steps take: silence and
keepalives several times over."""
_REPETITIONS_MAX: Final = 2
"""How often a sequence may be computed from its beginning, on average."""
_QUIET_S: Final = 30.0
"""Time within which everything is freed once all has ended: leases and reservations of dead processes included."""
_STALL_EXIT_S: Final = 2.5


@dataclass
class Outcome:
    """The result of a run: problems, trace and counts."""

    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    num_answered: int = 0
    num_tokens: int = 0
    num_refusals: int = 0
    num_reconnects: int = 0
    num_preemptions: int = 0
    num_anew: int = 0  # requests begun anew because they could not be gone on with
    num_given_up: int = 0
    num_messages: int = 0
    virtual_s: float = 0.0


def run(scenario: Scenario) -> Outcome:
    """Never raises for what goes wrong in the system; that is among the problems."""
    loop = SimulatedLoop()
    loop.set_task_factory(make_task)
    random.seed(scenario.seed)  # of backoffs
    world = World(loop, scenario)
    loop.set_exception_handler(world.on_loop_error)
    try:
        # They measure the real processor's time.
        with patch.object(LoopShare, "wait_s", _no_time), patch.object(connections, "SLICE_S", math.inf):
            loop.run_until_complete(world.run())
    except NothingLeftToDoError:
        world.wrong("everybody waits for something that will never come")
    except TimeStandsStillError:
        world.wrong("somebody is busy without end")
    finally:
        world.end()
        loop.close()
    return world.outcome


def _no_time(self: LoopShare, now: float) -> float:
    return 0.0


class World:
    def __init__(self, loop: SimulatedLoop, scenario: Scenario) -> None:
        self.loop, self.scenario = loop, scenario
        self.outcome = Outcome()
        self.network = Network(
            loop,
            random.Random(f"{scenario.seed}/network"),
            self._on_bug,
            slow_share=scenario.slow_share,
            window=scenario.window,
        )
        self._lives: dict[str, int] = {}
        self._hung: dict[str, Worker] = {}
        self.judge = Judge(self)
        self.checks = WorkerChecks(loop, self.judge, self.wrong)
        self.network.on_blocked = self.judge.on_blocked
        loop.on_held_up = self.judge.on_held_up
        self._changed: dict[int, int] = {}  # weights of targets, by their numbers
        self._num_changes_of_weights = scenario.change_of_weights
        self._everybody: list[Process] = []

    # What is noticed.

    def wrong(self, problem: str) -> None:
        self.tell(f"WRONG: {problem}")
        if len(self.outcome.problems) < 20:
            self.outcome.problems.append(problem)

    def tell(self, what: str) -> None:
        self.outcome.trace.append(f"{self.loop.time():9.4f} {what}")

    def _on_bug(self, what: str, error: BaseException) -> None:
        self.wrong(what)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, NothingLeftToDoError):
            self.wrong(f"a task failed: {context['message']}: {error!r}")

    # What happens.

    async def run(self) -> None:
        self.start(REDIS)
        scenario = self.scenario
        for letter, count in (
            ("t", scenario.num_targets), ("d", scenario.num_drafts), ("c", scenario.num_coordinators),
        ):  # fmt: skip
            for index in range(count):
                self.start(f"{letter}{index}")
        for fault in scenario.faults:
            self.loop.call_at(fault.at_s, self._inject, fault)
        clients = [asyncio.create_task(self._serve_client(request)) for request in scenario.requests]
        end_s = max([fault.at_s + fault.duration_s for fault in scenario.faults], default=0.0)
        end_s = max([end_s, *(request.at_s for request in scenario.requests)]) + _LIVENESS_S
        end_s += _REPETITIONS_MAX * scenario.work_s(scenario.requests)
        _, unfinished = await asyncio.wait(clients, timeout=end_s)
        for task in unfinished:
            self.wrong("a request has not ended")
            task.cancel()
        await self._become_quiet()
        self.outcome.num_preemptions = sum(
            process.scheduler.num_preemptions for process in self._everybody if isinstance(process, Target)
        )
        self.outcome.virtual_s, self.outcome.num_messages = self.loop.time(), self.network.num_messages

    async def _serve_client(self, request: Request) -> None:
        await asyncio.sleep(request.at_s)
        name = f"client {request.number}"
        process = Process(name, self.loop)
        self._everybody.append(process)
        client = Client(request, self.judge, process, random.Random(f"{self.scenario.seed}/{name}"))
        self.judge.clients[request.number] = client
        self.tell(f"{name} asks for {request.max_tokens} tokens after {request.prompt}")
        await process.start(client.run())
        self.tell(f"{name} {client.outcome}")
        self.outcome.num_answered += client.outcome == "answered"
        self.outcome.num_tokens += client.num_tokens
        self.outcome.num_anew += client.num_anew
        self.outcome.num_given_up += client.outcome == "given up"
        self.outcome.num_refusals += client.num_refusals
        self.outcome.num_reconnects += client.num_reconnects

    def find_coordinator(self) -> str | None:
        """The address of a coordinator that a load balancer would pick; None if there is none."""
        there = [process.address for process in self.network.processes.values() if isinstance(process, Coordinator)]
        return self.network.chance.choice(there) if there else None

    def start(self, name: str) -> None:
        if name in self.network.processes:  # it is about to end, and takes its time
            self.loop.call_later(1.0, self.start, name)
            return
        life = self._lives[name[:2]] = self._lives.get(name[:2], 0) + 1
        shape = self.scenario.shape
        host = self._host(name)
        process: Process
        match name[0]:
            case "t":
                weights = self._weights_of(name, life)
                process = Target(name, self.network, host, life, shape, self.checks.check_target, weights)
            case "d":
                process = Draft(
                    name, self.network, host, life, shape, self.checks.check_draft, self.checks.remember_hints
                )
            case "c":
                process = Coordinator(
                    *(name, self.network, host, life, settings_of(self.scenario), self.scenario.seed),
                    *(self.judge, callers_of(self.scenario), self.scenario.journal_bytes_max),
                    {each.name for each in self.scenario.requests if each.is_background},
                )
            case _:
                process = Redis(self.network, host, self.wrong, self.judge.on_journal)
        self._everybody.append(process)
        self.network.start(process)
        if isinstance(process, Worker | Coordinator):
            process.start(process.live())
        self.tell(f"{name} starts its life {life}")

    def _host(self, name: str) -> Host:
        chance = random.Random(f"{self.scenario.seed}/host {name}")
        monotonic_s, skew_s = chance.uniform(0.0, 1e6), chance.choice((-60.0, -1.0, 0.5, 20.0, 3600.0))
        return Host(monotonic_s, skew_s if Feature.SKEWED_CLOCKS in self.scenario.features else 0.0)

    def _weights_of(self, name: str, life: int) -> int:
        """A target that is started again may have been given others."""
        if not self.scenario.weights:
            return 0
        index = int(name[1])
        if life > 1 and self._num_changes_of_weights and len(name) == 2:
            self._num_changes_of_weights -= 1
            self._changed[index] = 1 - self._changed.get(index, self.scenario.weights[index])
        return self._changed.get(index, self.scenario.weights[index])

    def _inject(self, fault: Fault) -> None:
        process = self.network.processes.get(fault.process)
        if process is None:
            return
        self.tell(f"{fault.kind} {fault.process} {fault.other} for {fault.duration_s:g} s")
        self.judge.note(fault)
        match fault.kind:
            case FaultKind.KILL | FaultKind.LOSE_MACHINE:
                self.network.end(process, is_machine_lost=fault.kind is FaultKind.LOSE_MACHINE)
                self.loop.call_later(fault.duration_s, self.start, fault.process)
            case FaultKind.DRAIN:
                assert isinstance(process, Worker)
                process.receive(process.stop)
                self.loop.call_later(fault.duration_s + process.shape.drain_grace_s + 1, self.start, fault.process)
            case FaultKind.FREEZE:
                self.network.freeze(process)
                self.loop.call_later(fault.duration_s, process.thaw)
            case FaultKind.HANG:
                assert isinstance(process, Worker)
                process.thread.hang()
                if fault.duration_s > _STALL_EXIT_S:  # it ends itself, and is restarted
                    self.loop.call_later(_STALL_EXIT_S, self.network.end, process)
                    self.loop.call_later(fault.duration_s, self.start, fault.process)
                else:
                    self.loop.call_later(fault.duration_s, process.thread.resume)
            case FaultKind.REPLACE:
                assert isinstance(process, Worker)
                self.network.freeze(process)
                if f"{fault.process}'" not in self.network.processes:
                    self.start(f"{fault.process}'")
                self.loop.call_later(fault.duration_s, process.thaw)
            case FaultKind.CUT:
                self.network.cut(fault.process, fault.other)
                self.loop.call_later(fault.duration_s, self.network.join, fault.process, fault.other)
            case FaultKind.CUT_ONE_WAY:
                self.network.cut(fault.process, fault.other, is_one_way=True)
                self.loop.call_later(fault.duration_s, self.network.join, fault.process, fault.other)
            case FaultKind.EMPTY:
                assert isinstance(process, Redis)
                process.receive(process.empty)
            case FaultKind.RESET:
                self.network.reset(fault.process, fault.other)

    async def _become_quiet(self) -> None:
        deadline_s = self.loop.time() + _QUIET_S
        while left := self._what_is_left():
            if self.loop.time() > deadline_s:
                for each in left:
                    self.wrong(f"I8: {each}")
                return
            await asyncio.sleep(0.25)
        self._check_idle_workers()

    def _check_idle_workers(self) -> None:
        for process in self.network.processes.values():
            if isinstance(process, Target | Draft):
                self.checks.check_blocks(process, [])

    def _what_is_left(self) -> list[str]:
        left = []
        for process in self.network.processes.values():
            for what, count in _holdings(process):
                if count:
                    left.append(f"{process.name} still holds {count} {what}")
        return left

    def end(self) -> None:
        """Ends every process, so that none of its tasks is left to the garbage collector."""
        for process in self._everybody:
            process.end()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.forgive()
        for _ in range(50):  # what ends its own tasks waits for them, and some of it in turn for others
            self.loop.run_until_complete(asyncio.sleep(0))
            if not asyncio.all_tasks(self.loop):
                break
        for process in self._everybody:  # cycles without end, which take the garbage collector long
            vars(process).clear()


def _holdings(process: Process) -> Sequence[tuple[str, int]]:
    """Resources that a process must have freed once there are no requests any more, by name."""
    match process:
        case Target():
            scheduler, allocator = process.scheduler, process.allocator
            return (
                ("sessions", len(scheduler._sessions)),
                ("blocks", allocator.num_blocks - 1 - allocator.num_free),
                ("callers", len(process.servicer._callers)),
            )
        case Draft():
            allocator = process.allocator
            return (
                ("sessions", process.scheduler.num_sessions),
                ("blocks", allocator.num_blocks - 1 - allocator.num_free),
                ("callers", len(process.servicer._callers)),
            )
        case Coordinator():
            service = process.service
            return (
                ("requests", service.num_active),
                ("sessions", sum(service.environment.placement.router._num_open.values())),
                ("reservations", service.environment.placement.reservations.num_held),
                ("waiting texts", service.environment.placement.admission.num_waiting),
                ("places", service.environment.placement.admission.num_held),
            )
        case Redis():
            now_s = process.now_s()
            return [
                (f"reservations of {incarnation}", pool.num_reserved(incarnation, now_s))
                for pool in process.pools.values()
                for incarnation in pool.reservations
            ]
        case _:
            return ()
