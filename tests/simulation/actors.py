"""The processes of a simulated system: the real code of each, on simulated surroundings.

A model is a function of the text that remembers what its KV cache holds, so that KV gone wrong says wrong tokens.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, cast

from draft_worker.limits import DraftLimits
from draft_worker.messages import Action as DraftAction
from draft_worker.messages import Event as DraftEvent
from draft_worker.messages import SendHints
from draft_worker.scheduler import DraftScheduler
from draft_worker.server import DraftServicer
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.observability.telemetry import DraftMetrics, TargetMetrics
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import Pool, WorkerLoad
from outrider.worker.worker_facts import record_from_info
from protos.outrider.v1 import common_pb2, draft_pb2, hints_pb2, target_pb2
from target_worker.limits import SchedulerLimits
from target_worker.messages import Action as TargetAction
from target_worker.messages import Event as TargetEvent
from target_worker.messages import WaitForHints
from target_worker.scheduling.scheduler import Scheduler
from target_worker.serving.server import TargetServicer
from tests.draft_worker.fakes import FakeDraftModel
from tests.simulation.clock import Timer
from tests.simulation.models import GrammarCompiler, TargetModel
from tests.simulation.network import Method, Network, Process
from tests.simulation.process import Host
from tests.simulation.redis_process import RegistryClient
from tests.target_worker.fakes import VOCAB_SIZE

FINGERPRINT: Final = "5" * 16
MODEL: Final = "sim"


Turn = tuple[float, Callable[[float], list[Any]]]
"""A step: how long it takes, and what is to be done when it has been run (told the time), which gives actions."""


class SimulatedThread:
    """Stands in for `ModelThread`: events are handled between steps, a step takes its time."""

    def __init__(
        self,
        network: Network,
        process: Process,
        handle: Callable[[Any, float], list[Any]],
        begin: Callable[[float], Turn | float | None],
        dispatch: Callable[[list[Any]], None],
    ) -> None:
        """`begin` gives a step, or the moment to look again, or None."""
        self._loop, self._process = network.loop, process
        self._now_s = process.now_s
        self._handle, self._begin, self._dispatch = handle, begin, dispatch
        self._inbox: list[Any] = []
        self._is_running = False
        self._is_hung = False
        self._timer: Timer | None = None

    def submit(self, event: Any, *, is_release: bool = False, peer: str | None = None) -> bool:
        self._inbox.append(event)
        self._wake()
        return True

    def has_room(self, peer: str) -> bool:
        return True

    def has_events(self) -> bool:
        return bool(self._inbox)

    def stalled_s(self) -> float:
        return math.inf if self._is_hung else 0.0

    def hang(self) -> None:
        """The next step never ends, until `resume`."""
        self._is_hung = True

    def resume(self) -> None:
        self._is_hung = False
        self._wake()

    def _wake(self) -> None:
        if not self._is_running and not self._is_hung:
            self._is_running = True
            self._loop.call_soon(self._turn, context=self._process.context)

    def _turn(self) -> None:
        if not self._process.is_alive:
            return
        context = self._process.context
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_hung:
            self._is_running = False
            return
        events, self._inbox = self._inbox, []
        with self._loop.on_thread():
            actions = [action for event in events for action in self._handle(event, self._now_s())]
            plan = self._begin(self._now_s())
        self._deliver(actions)
        if isinstance(plan, tuple):
            duration_s, finish = plan
            self._loop.call_later(duration_s, self._end_step, finish, context=context)
            return
        self._is_running = False
        if self._inbox:
            self._wake()
        elif plan is not None:
            self._timer = self._loop.call_later(max(plan - self._now_s(), 1e-6), self._wake, context=context)

    def _end_step(self, finish: Callable[[float], list[Any]]) -> None:
        if not self._process.is_alive:
            return
        if self._is_hung:
            self._loop.call_later(0.5, self._end_step, finish, context=self._process.context)
            return
        with self._loop.on_thread():
            actions = finish(self._now_s())
        self._deliver(actions)
        self._turn()

    def _deliver(self, actions: list[Any]) -> None:
        if actions:
            self._loop.call_soon(self._dispatch_if_alive, actions, context=self._process.context)

    def _dispatch_if_alive(self, actions: list[Any]) -> None:
        if self._process.is_alive:
            self._dispatch(actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """Parameters of workers that differ between runs."""

    limits: SchedulerLimits
    num_blocks: int
    step_s: float  # a step without hints
    draft_limits: DraftLimits
    draft_step_s: float
    alignment: int  # of 256 primary children, those that are right
    drain_grace_s: float


@cache
def _target_metrics() -> TargetMetrics:
    return TargetMetrics(MODEL, "sim")


@cache
def _draft_metrics() -> DraftMetrics:
    return DraftMetrics(MODEL, "sim")


class Worker(Process, ABC):
    """Base of target and draft workers: a model thread, a lease, and an end after draining."""

    pool: Pool
    thread: SimulatedThread

    def __init__(self, name: str, network: Network, host: Host, life: int, shape: WorkerShape, limit: int) -> None:
        super().__init__(name, network.loop, host)
        self.network, self.shape = network, shape
        worker_id = name[:2]  # wherever it runs
        self.incarnation = f"{worker_id}/{life}"
        self.started_at_s = network.loop.time() + host.skew_s
        self._stopping = asyncio.Event()
        self.info = common_pb2.WorkerInfo(
            worker_id=worker_id,
            model_name=MODEL,
            tokenizer_fingerprint=FINGERPRINT,
            vocab_size=VOCAB_SIZE,
            max_model_len=shape.limits.max_model_len,
            max_num_seqs=limit,
            max_num_waiting=shape.limits.max_num_waiting if self.pool == "target" else 0,
            dtype="float32",
            incarnation=self.incarnation,
            num_model_parameters=1,
        )
        self.lease: WorkerLease | None = None

    @abstractmethod
    def load(self) -> WorkerLoad:
        """The load that is reported to the registry."""

    @abstractmethod
    def start_draining(self) -> None:
        """Refuses new sessions from now on."""

    @property
    def is_draining(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """SIGTERM."""
        self._stopping.set()

    async def live(self) -> None:
        """Runs until SIGTERM and then drains, as `WorkerProcess.run` does."""
        record = record_from_info(self.pool, self.info, self.address, self.started_at_s)
        registry = RegistryClient(self.network, self)
        async with WorkerLease(registry, record, self.load) as lease:
            self.lease = lease
            await self._stopping.wait()
            self.start_draining()
            lease.set_state("draining")
            deadline_s = self.network.loop.time() + self.shape.drain_grace_s
            while self.load().num_sessions and self.network.loop.time() < deadline_s:  # noqa: ASYNC110 - as there
                await asyncio.sleep(0.05)
        self.network.end(self)


class Target(Worker):
    pool = "target"

    def __init__(
        self,
        name: str,
        network: Network,
        host: Host,
        life: int,
        shape: WorkerShape,
        on_step: Callable[[Target], None],
        weights: int = 0,
    ) -> None:
        super().__init__(name, network, host, life, shape, shape.limits.max_num_seqs)
        self.weights = weights
        self.is_doomed = False
        self.info.weights_fingerprint = self.fingerprint_of(weights)
        self.info.numerics = "letters"
        self.allocator = BlockAllocator(shape.num_blocks, 4)
        self.scheduler = Scheduler(shape.limits, self.allocator, VOCAB_SIZE)
        self._model = TargetModel(shape.num_blocks * 4, weights)
        self._on_step = on_step
        self.servicer = TargetServicer(self.info, _target_metrics(), cast(Any, GrammarCompiler()), now=self.now_s)
        self.thread = SimulatedThread(network, self, self._handle, self._begin, self.servicer.dispatch)
        self.servicer.bind(cast(Any, self.thread))
        self.methods = {
            "Target/Generate": Method(self.servicer.Generate, target_pb2.GenerateRequest, target_pb2.GenerateEvent),
            "Target/GetInfo": Method(
                self.servicer.GetInfo, common_pb2.GetInfoRequest, common_pb2.WorkerInfo, is_unary=True
            ),
            "Target/SetSpeculation": Method(
                self.servicer.SetSpeculation,
                target_pb2.SetSpeculationRequest,
                target_pb2.SetSpeculationResponse,
                is_unary=True,
            ),
            "Hints/Exchange": Method(
                self.servicer.hints.Exchange, hints_pb2.HintFrame, hints_pb2.CommitFrame, takes_stream=True
            ),
        }

    @staticmethod
    def fingerprint_of(weights: int) -> str:
        """As the worker announces it."""
        return f"weights {weights}"

    def load(self) -> WorkerLoad:
        scheduler = self.scheduler
        return WorkerLoad(
            scheduler.num_running, scheduler.num_waiting, scheduler.wait_ms, num_background=scheduler.num_background
        )

    def start_draining(self) -> None:
        self.servicer.start_draining()

    def _handle(self, event: TargetEvent, now: float) -> list[TargetAction]:
        return self.scheduler.handle(event, now)

    def _begin(self, now: float) -> Turn | float | None:
        decision = self.scheduler.next_step(now)
        if decision is None:
            return None
        if isinstance(decision, WaitForHints):
            return decision.until
        duration_s = self.shape.step_s * (1 + 0.05 * decision.num_tokens)

        def finish(end_s: float) -> list[TargetAction]:
            actions = self.scheduler.finish_step(decision, self._model.run(decision, duration_s * 1e3), end_s)
            self._on_step(self)
            return actions

        return duration_s, finish


class Draft(Worker):
    pool = "draft"

    def __init__(
        self,
        name: str,
        network: Network,
        host: Host,
        life: int,
        shape: WorkerShape,
        on_step: Callable[[Draft], None],
        on_hints: Callable[[Draft, SendHints], None],
    ) -> None:
        super().__init__(name, network, host, life, shape, shape.draft_limits.max_num_seqs)
        self._on_step, self._on_hints = on_step, on_hints
        self.allocator = BlockAllocator(400, 4)
        self.scheduler = DraftScheduler(shape.draft_limits, self.allocator, VOCAB_SIZE)
        self._model = FakeDraftModel(1600, shape.alignment)
        compiler = cast(Any, GrammarCompiler(is_coordinator=True))
        dial = partial(network.dial, self, method="Hints/Exchange", response_type=hints_pb2.CommitFrame)
        self.servicer = DraftServicer(self.info, self.scheduler, _draft_metrics(), compiler, dial)
        self.thread = SimulatedThread(network, self, self._handle, self._begin, self._dispatch)
        self.servicer.bind(cast(Any, self.thread))
        self.methods = {"Draft/Attach": Method(self.servicer.Attach, draft_pb2.AttachRequest, draft_pb2.AttachStatus)}

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            self.scheduler.num_sessions,
            round_trips=self.servicer.round_trips,
            num_background=self.scheduler.num_background,
        )

    def start_draining(self) -> None:
        self.servicer.start_draining()

    def _dispatch(self, actions: list[DraftAction]) -> None:
        for action in actions:
            if isinstance(action, SendHints):
                self._on_hints(self, action)
        self.servicer.dispatch(actions)

    def _handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        return self.scheduler.handle(event, now)

    def _begin(self, now: float) -> Turn | float | None:
        step = self.scheduler.next_step()
        if step is None:
            return None
        expansions = self._model.run(step)
        duration_s = self.shape.draft_step_s * max(sum(map(len, expansions)), 1)

        def finish(end_s: float) -> list[DraftAction]:
            actions = self.scheduler.finish_step(step, expansions, duration_s * 1e3)
            self._on_step(self)
            return actions

        return duration_s, finish
