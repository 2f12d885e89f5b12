"""Runs a scenario, checks the invariants all along, and at the end that everything ended and was freed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.settings import CoordinatorSettings
from draft_worker.messages import SendHints
from outrider.engine.kv_cache import KVSequence
from outrider.hint_tree import ROOT_ID
from target_worker.server import session_id_of
from target_worker.session import Session
from tests.simulation.actors import Coordinator, Draft, Target, Worker
from tests.simulation.client import Client, texts_of
from tests.simulation.clock import NothingLeftToDoError, SimulatedLoop, TimeStandsStillError
from tests.simulation.network import Network, Process, make_task
from tests.simulation.process import NOBODY, Host
from tests.simulation.redis_process import REDIS, Redis
from tests.simulation.scenario import Fault, FaultKind, Request, Scenario

_LIVENESS_S: Final = 150.0
"""Within which everything has ended, once the last fault is over: silence and keepalives several times over."""
_QUIET_S: Final = 30.0
"""Within which everything is free, once everything has ended: leases and reservations of the dead included."""
_ORPHAN_S: Final = 1.0
"""Within which a worker frees what nobody wants any more, while it is well."""
_STALL_EXIT_S: Final = 2.5
_SETTINGS: Final = CoordinatorSettings(
    tokenizer_dir="letters",
    redis_url="none",
    uses_priors=False,
    target_silence_max_s=5.0,
    draft_silence_max_s=1.5,
    quarantine_s=1.0,
)
_TREE_NODES_MAX: Final = 512


@dataclass
class Outcome:
    """What became of a run."""

    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    num_answered: int = 0
    num_tokens: int = 0
    num_refusals: int = 0
    num_reconnects: int = 0
    num_preemptions: int = 0
    num_messages: int = 0
    virtual_s: float = 0.0


def run(scenario: Scenario) -> Outcome:
    """Never raises for what goes wrong in the system; that is among the problems."""
    loop = SimulatedLoop()
    loop.set_task_factory(make_task)
    random.seed(scenario.seed)  # of backoffs
    world = _World(loop, scenario)
    loop.set_exception_handler(world.on_loop_error)
    try:
        loop.run_until_complete(world.run())
    except NothingLeftToDoError:
        world.wrong("everybody waits for something that will never come")
    except TimeStandsStillError:
        world.wrong("somebody is busy without end")
    finally:
        world.end()
        loop.close()
    return world.outcome


class _World:
    def __init__(self, loop: SimulatedLoop, scenario: Scenario) -> None:
        self.loop, self.scenario = loop, scenario
        self.outcome = Outcome()
        self.network = Network(
            loop, random.Random(f"{scenario.seed}/network"), self._on_bug, slow_share=scenario.slow_share
        )
        self._lives: dict[str, int] = {}
        self._hung: dict[str, Worker] = {}
        self._texts = texts_of(scenario.requests, scenario.shape.limits.max_model_len)
        self._lengths: dict[str, int] = {}  # committed tokens of each session, as last seen
        self._hints: dict[
            tuple[str, int, int], dict[int, tuple[int, ...]]
        ] = {}  # tokens from the root to each node
        self._orphans: dict[object, None] = {}  # sessions that had no caller a moment ago
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
        self._start(REDIS)
        scenario = self.scenario
        for letter, count in (
            ("t", scenario.num_targets), ("d", scenario.num_drafts), ("c", scenario.num_coordinators),
        ):  # fmt: skip
            for index in range(count):
                self._start(f"{letter}{index}")
        for fault in scenario.faults:
            self.loop.call_at(fault.at_s, self._inject, fault)
        clients = [asyncio.create_task(self._serve_client(request)) for request in scenario.requests]
        end_s = max([fault.at_s + fault.duration_s for fault in scenario.faults], default=0.0)
        end_s = max([end_s, *(request.at_s for request in scenario.requests)]) + _LIVENESS_S
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
        client = Client(
            request,
            self.network,
            process,
            random.Random(f"{self.scenario.seed}/{name}"),
            self._find_coordinator,
            self.wrong,
            self._could_be_in_time,
        )
        self.tell(f"{name} asks for {request.max_tokens} tokens after {request.prompt}")
        await process.start(client.run())
        self.tell(f"{name} {client.outcome}")
        self.outcome.num_answered += client.outcome == "answered"
        self.outcome.num_tokens += client.num_tokens
        self.outcome.num_refusals += client.num_refusals
        self.outcome.num_reconnects += client.num_reconnects

    def _could_be_in_time(self, num_tokens: int, left_s: float) -> bool:
        """Whether so many tokens could surely be said within `left_s`, if nobody is in the way."""
        shape = self.scenario.shape
        num_steps = -(-num_tokens // (1 + shape.limits.num_speculative_tokens))
        return len(self.scenario.requests) == 1 and num_steps * shape.step_s / 2 < left_s

    def _find_coordinator(self) -> str | None:
        there = [
            process.address for process in self.network.processes.values() if isinstance(process, Coordinator)
        ]
        return self.network.chance.choice(there) if there else None

    def _start(self, name: str) -> None:
        if name in self.network.processes:  # it is about to end, and takes its time
            self.loop.call_later(1.0, self._start, name)
            return
        life = self._lives[name[:2]] = self._lives.get(name[:2], 0) + 1
        shape = self.scenario.shape
        host = self._host(name)
        process: Process
        match name[0]:
            case "t":
                process = Target(name, self.network, host, life, shape, self._check_target)
            case "d":
                process = Draft(
                    name, self.network, host, life, shape, self._check_draft, self._remember_hints
                )
            case "c":
                process = Coordinator(name, self.network, host, life, _SETTINGS, self.scenario.seed)
            case _:
                process = Redis(self.network, host, self.wrong)
        self._everybody.append(process)
        self.network.start(process)
        if isinstance(process, Worker | Coordinator):
            process.start(process.live())
        self.tell(f"{name} starts its life {life}")

    def _host(self, name: str) -> Host:
        chance = random.Random(f"{self.scenario.seed}/host {name}")
        return Host(chance.uniform(0.0, 1e6))

    def _inject(self, fault: Fault) -> None:
        process = self.network.processes.get(fault.process)
        if process is None:
            return
        self.tell(f"{fault.kind} {fault.process} {fault.other} for {fault.duration_s:g} s")
        match fault.kind:
            case FaultKind.KILL | FaultKind.LOSE_MACHINE:
                self.network.end(process, is_machine_lost=fault.kind is FaultKind.LOSE_MACHINE)
                self.loop.call_later(fault.duration_s, self._start, fault.process)
            case FaultKind.DRAIN:
                assert isinstance(process, Worker)
                process.receive(process.stop)
                self.loop.call_later(
                    fault.duration_s + process.shape.drain_grace_s + 1, self._start, fault.process
                )
            case FaultKind.FREEZE:
                self.network.freeze(process)
                self.loop.call_later(fault.duration_s, process.thaw)
            case FaultKind.HANG:
                assert isinstance(process, Worker)
                process.thread.hang()
                if fault.duration_s > _STALL_EXIT_S:  # it ends itself, and is restarted
                    self.loop.call_later(_STALL_EXIT_S, self.network.end, process)
                    self.loop.call_later(fault.duration_s, self._start, fault.process)
                else:
                    self.loop.call_later(fault.duration_s, process.thread.resume)
            case FaultKind.REPLACE:
                assert isinstance(process, Worker)
                self.network.freeze(process)
                if f"{fault.process}'" not in self.network.processes:
                    self._start(f"{fault.process}'")
                self.loop.call_later(fault.duration_s, process.thaw)
            case FaultKind.CUT:
                self.network.cut(fault.process, fault.other)
                self.loop.call_later(fault.duration_s, self.network.join, fault.process, fault.other)
            case FaultKind.RESET:
                self.network.reset(fault.process, fault.other)

    # What must hold.

    def _remember_hints(self, draft: Draft, sent: SendHints) -> None:
        """Where each hint stands, as its draft worker means it."""
        paths = self._hints.setdefault((sent.session_id, sent.attachment, sent.base_len), {ROOT_ID: ()})
        for hint in sent.hints:
            paths[hint.node_id] = (*paths[hint.parent_id], hint.token_id)

    def _check_target(self, target: Target) -> None:
        """After each step of a target worker."""
        scheduler, limits = target.scheduler, target.shape.limits
        for session in scheduler._sessions.values():
            self._check_session(target, session)
        # Those that were preempted wait beside as many as may wait.
        num_places = limits.max_num_seqs + limits.max_num_waiting
        if scheduler.num_running > limits.max_num_seqs or len(scheduler._sessions) > num_places:
            self.wrong(f"I7: {target.name} holds {scheduler.num_running} + {scheduler.num_waiting} sessions")
        self._check_blocks(target, [session.kv for session in scheduler._places.running.values()])
        if len(scheduler._early) > limits.max_early_sessions:
            self.wrong(f"I7: {target.name} keeps early events of {len(scheduler._early)} sessions")

        self._check_callers(target, scheduler._sessions)

    def _check_draft(self, draft: Draft) -> None:
        """After each step of a draft worker."""
        self._check_blocks(draft, [session.kv for session in draft.scheduler._sessions.values()])
        self._check_callers(draft, draft.scheduler._sessions)

    def _check_blocks(self, worker: Target | Draft, sequences: list[KVSequence]) -> None:
        """Every block has as many owners as there are sequences that hold it, and no block is lost."""
        try:
            worker.allocator.check_integrity(sequences)
        except AssertionError as error:
            self.wrong(f"I8: blocks of {worker.name}: {str(error)[:80]}")

    def _check_callers(self, worker: Target | Draft, sessions: Mapping[str, object]) -> None:
        for session_id, session in sessions.items():
            if session_id not in worker.servicer._callers and session not in self._orphans:
                self._orphans[session] = None
                self.loop.call_later(
                    _ORPHAN_S, self._check_orphan, worker, session_id, session, context=NOBODY
                )

    def _check_orphan(self, worker: Target | Draft, session_id: str, session: object) -> None:
        del self._orphans[session]
        if not worker.is_alive or worker.thread.stalled_s() > 0.0 or worker.is_frozen:
            return  # it frees nothing now, nor has to
        if (
            worker.scheduler._sessions.get(session_id) is session
            and session_id not in worker.servicer._callers
        ):
            self.wrong(f"I8: session {session_id} at {worker.name} belongs to nobody")

    def _check_session(self, target: Target, session: Session) -> None:
        key = (tuple(session.token_ids[: session.num_prompt_tokens]), session.sampling.seed or 0)
        text = self._texts[key][: len(session.token_ids)]
        if session.token_ids != text:
            self.wrong(f"I2: session {session.session_id} says {session.token_ids}, right is {text}")
        before = self._lengths.get(session.session_id, 0)
        if session.committed_len < before:
            self.wrong(
                f"I1: session {session.session_id} went from {before} to {session.committed_len} tokens"
            )
        self._lengths[session.session_id] = session.committed_len
        tree = session.tree
        if len(tree) > _TREE_NODES_MAX:
            self.wrong(f"I7: the tree of {session.session_id} has {len(tree)} nodes")
        named = session_id_of(session.session_id), tree._attachment, tree._base_len
        paths = self._hints.get(named, {})
        committed = tuple(session.token_ids[tree._base_len :])
        for node_id, node in tree._nodes.items():
            path = paths.get(node_id, ())
            is_live = path[: len(committed)] == committed and len(path) > len(committed)
            if not is_live or path[-1] != node.hint.token_id:
                self.wrong(f"I3: {session.session_id} keeps node {node_id} of {path} after {committed}")
                break

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
                self._check_blocks(process, [])

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
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))


def _holdings(process: Process) -> Sequence[tuple[str, int]]:
    """What must be given back when nobody wants anything any more."""
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
                ("requests", service._num_active),
                ("sessions", sum(service.environment.router._num_open.values())),
                ("reservations", service.environment.reservations.num_held),
                ("waiting texts", service.environment.admission.num_waiting),
                ("places", service.environment.admission.num_held),
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
