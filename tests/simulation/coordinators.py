"""Coordinators: the real service and gRPC edge of a replica, on simulated surroundings."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, cast

import grpc

from coordinator.access.api_keys import Caller
from coordinator.api.grpc import grpc_api
from coordinator.api.http.line_calls import in_background
from coordinator.formats.output_format import choose_format
from coordinator.intake.generation_request import NOWHERE, GenerationInput, GenerationSpec, Origin
from coordinator.models.model_table import ModelTable
from coordinator.models.models_file import FixedModels
from coordinator.models.served_model import ServedModel
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.placement.fair_queue import Ticket
from coordinator.placement.routing import WorkerKey, key_of
from coordinator.placement.slot_queue import Offer, Slot
from coordinator.recovery.poison import ON_TRIAL
from coordinator.request.environment import Outside
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from coordinator.speculation.fallback import FallbackPolicy
from coordinator.workers.channels import WorkerChannels, serves
from outrider.errors import OutriderError
from outrider.registry.worker_record import WorkerRecord
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2
from tests.simulation.actors import FINGERPRINT
from tests.simulation.models import GrammarCompiler
from tests.simulation.network import Call, Method, Network, Process
from tests.simulation.process import Host
from tests.simulation.redis_process import RegistryClient
from tests.target_worker.fakes import VOCAB_SIZE

_HASTY: Final = FallbackPolicy(
    judge_after_spec_steps=3,
    probe_spec_steps=3,
    starved_after_steps=8,
    pause_min_tokens=2,
    pause_max_tokens=8,
)
"""Texts here are short; this way some of them come to be paused and probed, and followed by several draft workers."""


_NO_ROOM: Final = "serves its most"


@cache
def _coordinator_metrics() -> CoordinatorMetrics:
    return CoordinatorMetrics()


class Letters:
    """A tokenizer: one letter for each token."""

    fingerprint = FINGERPRINT
    has_chat_template = True
    chat_template = ""
    vocab_size = VOCAB_SIZE
    model_dir = Path("letters")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("abcde"[token_id] for token_id in token_ids)


class _Channels:
    """`WorkerChannels` over the simulated network."""

    def __init__(self, network: Network, process: Coordinator) -> None:
        self._network, self._process = network, process

    def generate(
        self, address: str, request: target_pb2.GenerateRequest, timeout_s: float, traceparent: str = ""
    ) -> Call:
        call = self._network.stream(
            self._process, address, "Target/Generate", request, target_pb2.GenerateEvent, timeout_s
        )
        self._process.observer.on_generate(self._process, request, call)
        return call

    def attach(self, address: str, request: draft_pb2.AttachRequest, timeout_s: float, traceparent: str = "") -> Call:
        return self._network.stream(self._process, address, "Draft/Attach", request, draft_pb2.AttachStatus, timeout_s)

    async def set_speculation(self, address: str, request: target_pb2.SetSpeculationRequest, timeout_s: float) -> None:
        await self._network.unary(
            *(self._process, address, "Target/SetSpeculation", request),
            *(target_pb2.SetSpeculationResponse, timeout_s),
        )

    async def has_incarnation(self, address: str, incarnation: str, timeout_s: float) -> bool | None:
        try:
            info = await self._info(address, timeout_s)
        except grpc.aio.AioRpcError as error:
            return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else False
        return bool(info.incarnation == incarnation)

    async def is_serving(self, address: str, incarnation: str, timeout_s: float) -> bool:
        try:
            return serves(await self._info(address, timeout_s), incarnation)
        except grpc.aio.AioRpcError:
            return False

    async def _info(self, address: str, timeout_s: float) -> common_pb2.WorkerInfo:
        call = (self._process, address, "Target/GetInfo", common_pb2.GetInfoRequest(), common_pb2.WorkerInfo)
        return cast(common_pb2.WorkerInfo, await self._network.unary(*call, timeout_s))

    async def forget_all_but(self, addresses: object, now_s: float, after_s: float) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of slots and queue when a coordinator begins to look whose turn it is."""

    num_held: Counter[str]  # slots, by tenant
    waiting: set[Ticket]  # but for those that wait for a target without another suspect
    targets: set[WorkerKey]  # that may be asked


class Observer(Protocol):
    """An observer that is notified of what coordinators do."""

    def on_generate(self, coordinator: Coordinator, request: target_pb2.GenerateRequest, call: Call) -> None:
        """A target is asked for a sequence."""

    def on_blame(self, coordinator: Coordinator, worker: WorkerRecord) -> None:
        """A worker is passed over for a while."""

    def on_session(self, session_id: str, tenant: str) -> None:
        """A sequence is about to become a session of this id, on a tenant's behalf."""

    def on_slot(self, coordinator: Coordinator, ticket: Ticket, look: Look) -> None:
        """A sequence that waits is given a slot."""

    def on_no_room(self, coordinator: Coordinator, num_asked: int, num_max: int) -> None:
        """A request is refused because a replica serves its most of `num_max` sequences, while `num_asked`, its own
        included, have been asked of it, those of batches left out."""

    def on_admitted(self, coordinator: Coordinator, request: generation_pb2.GenerationRequest) -> None:
        """A request got its first chunk."""


class Coordinator(Process):
    """One replica, with its gRPC edge."""

    def __init__(
        self,
        name: str,
        network: Network,
        host: Host,
        life: int,
        settings: CoordinatorSettings,
        seed: int,
        observer: Observer,
        callers: Mapping[str, Caller],
        journal_bytes_max: int | None,
        background: Set[str],
    ) -> None:
        """`callers`: of each tenant, by its key; without any nobody needs one. `background`: ids of requests that run
        as lines of batches do."""
        super().__init__(name, network.loop, host)
        self.observer, self._callers = observer, callers
        self.started_s = network.loop.time()
        self._journal_bytes_max = journal_bytes_max
        self._background, self._num_asked = background, 0
        self._num_ids = 0
        self._name = f"{name}/{life}"
        model = ServedModel(cast(Tokenizer, Letters()), choose_format(""))
        model.grammars.compilers[VOCAB_SIZE] = cast(Any, GrammarCompiler(is_coordinator=True))
        self._outside = Outside(
            models=FixedModels(ModelTable(others=model)),
            channels=cast(WorkerChannels, _Channels(network, self)),
            metrics=_coordinator_metrics(),
            registry=RegistryClient(network, self),
            now_s=self.now_s,
            chance=random.Random(f"{seed}/{name}/{life}"),
            new_id=self._new_id,
            policy=_HASTY,
        )
        self.service = GenerationService(settings, outside=self._outside)
        self._put_in_background(background)
        router = self.service.environment.placement.router
        pass_over = router.pass_over

        def watched(worker: WorkerRecord, now_s: float) -> None:
            observer.on_blame(self, worker)
            pass_over(worker, now_s)

        router.pass_over = watched  # type: ignore[method-assign]
        self._watch_queue()
        self.methods = {
            "Generation/Generate": Method(
                self._generate, generation_pb2.GenerationRequest, generation_pb2.GenerationChunk
            )
        }

    def _put_in_background(self, request_ids: Set[str]) -> None:
        prepare = self.service.prepare

        async def prepared(request: GenerationInput, *, has_begun: bool = False) -> GenerationSpec:
            spec = await prepare(request, has_begun=has_begun)
            return in_background(spec) if request.request_id in request_ids else spec

        self.service.prepare = prepared  # type: ignore[method-assign]

    def _watch_queue(self) -> None:
        """Tells of each slot that is given to a sequence of those that wait, and how things stood when the look through
        the queue began that found it: that look may take long, and meanwhile others come, or come back."""
        admission, looks = self.service.environment.placement.admission, dict[int, Look]()
        give_one, take = admission._give_one, admission._take

        async def watched_look(model_queue: Any) -> bool:
            requests = {
                ticket: request
                for ticket, request in model_queue.slots.waiting.items()
                if not model_queue.answers[ticket].done() and ON_TRIAL not in request.restrictions()
            }
            now_s = self.now_s()
            askable = {
                key_of(worker)
                for request in requests.values()
                for worker in request.rank()
                if admission._router.may_ask(worker, now_s, is_urgent=False)
            }
            looks[id(model_queue)] = Look(Counter(model_queue.slots.queue._num_held_of), set(requests), askable)
            return await give_one(model_queue)

        async def watched_take(model_queue: Any, offer: Offer) -> Slot | None:
            slot, request = await take(model_queue, offer), offer.request
            self.observer.on_session(request.token, request.ticket.tenant)
            look = looks.get(id(model_queue))
            if slot is None or look is None or key_of(slot.target) not in look.targets:
                return slot  # or one that was not to be had when the look began
            if request.ticket in look.waiting:
                self.observer.on_slot(self, request.ticket, look)
            return slot

        admission._give_one = watched_look  # type: ignore[method-assign]
        admission._take = watched_take  # type: ignore[method-assign]

    async def live(self) -> None:
        async with self.service:
            if self._journal_bytes_max is not None and self.service.streams.journal is not None:
                self.service.streams.journal._bytes_max = self._journal_bytes_max
            await asyncio.get_running_loop().create_future()

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"{self._name}/{self._num_ids}"

    async def _generate(
        self, request: generation_pb2.GenerationRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerationChunk]:
        caller = self._callers.get(request.tenant)
        is_first = True
        num = 0 if request.request_id in self._background else request.n or 1
        self._num_asked += num
        try:
            origin = NOWHERE if caller is None else Origin(caller)
            async with aclosing(grpc_api.generate(self.service, request, origin)) as chunks:
                async for chunk in chunks:
                    if is_first:
                        self.observer.on_admitted(self, request)
                        is_first = False
                    yield chunk
        except OutriderError as error:
            if num and _NO_ROOM in error.message:
                self.observer.on_no_room(self, self._num_asked, self.service.environment.settings.requests_max)
            await context.abort(grpc.StatusCode[error.grpc_code], error.message)
        finally:
            self._num_asked -= num
