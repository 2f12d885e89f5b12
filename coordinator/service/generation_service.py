"""The service of one replica, behind every API: checks a request and generates.

    async with GenerationService(settings) as service:
        await service.admit(caller)
        spec = await service.prepare(request)
        async for item in service.generate(spec, arrival_s): ...

HTTP and gRPC are thin translations of these calls. The service owns the replica's connections and tasks.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Final, Self

from coordinator.access.api_keys import Caller, Scope
from coordinator.access.authentication import Authentication
from coordinator.access.concurrency_limits import Held
from coordinator.canary.assignment import CanaryDesk
from coordinator.canary.audit import CanaryAuditor
from coordinator.canary.keeper import CanaryKeeper
from coordinator.canary.observation import observed
from coordinator.intake.generation_request import (
    GenerationInput,
    GenerationSpec,
    check_input,
)
from coordinator.intake.preparation import RequestPreparation
from coordinator.intake.run_identity import RunIdentity
from coordinator.intake.worker_threads import WorkerThreads
from coordinator.output.text_output import VisibleOutput
from coordinator.placement.fair_queue import Ticket
from coordinator.recovery.journal import Journal
from coordinator.recovery.journal_entry import JournaledStream, JournalEntry
from coordinator.recovery.resumption import Resumption
from coordinator.request.choices import ChoiceOutput, RequestFinished, run_choices
from coordinator.request.environment import Environment, Outside
from coordinator.request.request_record import RequestRecord
from coordinator.service.active_sequences import ActiveSequences
from coordinator.service.housekeeping import Housekeeping
from coordinator.service.model_catalog import ModelCatalog
from coordinator.service.poison_guard import PoisonGuard
from coordinator.service.stored_responses import StoredResponses
from coordinator.service.streams import ResumableStreams
from coordinator.settings import CoordinatorSettings
from coordinator.speculation.prior_store import PriorStore
from coordinator.workers.worker_directory import WorkerDirectory
from outrider.canary.store import CanaryStore
from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import Forbidden, OutriderError, Overloaded, Unavailable
from outrider.observability.loop_lag import keep_ticking
from outrider.registry.registry import START_TIMEOUT_S, Registry, RegistryCalls
from outrider.registry.worker_record import Snapshot

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 0.1
"""Longest wait of a request for Redis, after which it goes on without an answer."""


class GenerationService:
    """Generates for one replica; open it on the event loop that serves requests."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        snapshot: Callable[[], Snapshot] | None = None,
        outside: Outside | None = None,
    ) -> None:
        """`snapshot` replaces the registry's snapshot of workers in tests."""
        outside = outside or Outside.real(settings)
        self._injected_snapshot, self._registry = snapshot, outside.registry
        self._quick_registry: Registry | None = None
        if outside.registry is None and snapshot is None:
            self._quick_registry = Registry(settings.redis_url, REQUEST_TIMEOUT_S)
        self._directory: WorkerDirectory | None = None
        self._prior_store: PriorStore | None = None
        self._canary_keeper: CanaryKeeper | None = None
        self._stack = AsyncExitStack()
        self._active = ActiveSequences(settings.requests_max)
        self.background_max = max(settings.requests_max // 2, 1)
        self._background = ActiveSequences(self.background_max)  # of lines of batches, which take nobody's room
        refusals = outside.metrics.token_refusals
        self._callers = Authentication.of(settings, lambda reason: refusals.labels(reason).inc())
        self._identities = outside.identities.watch(self.snapshot)
        registry = outside.registry or self._quick_registry
        self.environment = environment = Environment(
            settings,
            outside,
            self.snapshot,
            self._identities.reason_against,
            slots_in=registry if snapshot is None else None,
            losses_in=registry,
            limits_in=self._quick_registry,
        )
        self.threads = WorkerThreads()  # for what would block the event loop
        self.preparation = RequestPreparation(settings, outside.chance, self.threads)
        self.streams = ResumableStreams(self.check_new)
        self.responses = StoredResponses(self._quick_registry, outside.now_s, settings.response_life_s)
        self.canary = CanaryDesk(uuid.uuid4().hex)
        self.catalog = ModelCatalog(
            outside.models,
            environment.placement.router,
            self.snapshot,
            outside.now_s,
            lambda pool, model: self._directory.last_departure(pool, model or None) if self._directory else None,
        )
        self._poison_guard = PoisonGuard(environment.losses, outside.metrics, outside.now_s)
        self._canary_auditor = CanaryAuditor(environment, self.canary, self._hurry_canary)

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _open(self) -> None:
        environment, registry, enter = self.environment, self._registry, self._stack.enter_async_context
        self._stack.callback(self.threads.close)
        self._stack.push_async_callback(environment.tracing.close)
        self._stack.push_async_callback(environment.channels.close)
        if self._quick_registry is not None:
            self._stack.push_async_callback(self._quick_registry.close)
        if registry is None and self._injected_snapshot is None:
            for model in environment.models.current().models:
                await self.threads.of(None).run(model.grammars.load)
            registry = redis = Registry(environment.settings.redis_url)
            self._stack.push_async_callback(redis.close)
            if environment.settings.uses_priors:
                store = PriorStore(redis, environment.speculation.priors, environment.now_s)
                self._prior_store = await enter(store)
            keeper = CanaryKeeper(
                CanaryStore(redis),
                self.canary,
                environment.metrics,
                environment.now_s,
                self.catalog.has_draft,
            )
            self._canary_keeper = await enter(keeper)
        if registry is not None:
            await enter(environment.losses.exchange)
            journal = Journal(registry, now_s=environment.now_s, new_id=environment.new_id)
            self.streams.journal = await enter(journal)
            if self._injected_snapshot is None:
                self._directory = await self._open_directory(registry)
                await enter(environment.placement.reservations)
                await enter(environment.limits.rates)
                await enter(environment.limits.concurrency)
        await enter(self._callers)
        await enter(self._identities)
        await enter(self._canary_auditor)
        self._stack.push_async_callback(environment.placement.admission.close)
        housekeeping = asyncio.create_task(
            keep_going(self._housekeeping().keep, "housekeeping"), name="coordinator housekeeping"
        )
        ticks = partial(keep_ticking, environment.loop.lag, environment.metrics.observe_loop_lag)
        ticking = asyncio.create_task(keep_going(ticks, "the loop's ticking"), name="loop lag")
        self._stack.push_async_callback(end_tasks, housekeeping, ticking)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _housekeeping(self) -> Housekeeping:
        metrics, keys, tokens = self.environment.metrics, self._callers.keys, self._callers.tokens
        keeper, store = self._canary_keeper, self._prior_store
        degraded = {
            metrics.api_keys_degraded: lambda: keys is not None and keys.is_degraded,
            metrics.identity_provider_degraded: lambda: tokens is not None and tokens.provider.is_degraded,
            metrics.canary_degraded: lambda: keeper is not None and keeper.is_degraded,
            metrics.models_file_degraded: lambda: self.environment.models.refusal() is not None,
            metrics.journal_degraded: lambda: self.streams.is_degraded,
            metrics.priors_degraded: lambda: store is not None and store.is_degraded,
        }
        return Housekeeping(self.environment, self.catalog, degraded)

    async def _open_directory(self, registry: RegistryCalls) -> WorkerDirectory:
        if self._registry is not None:
            return await self._stack.enter_async_context(WorkerDirectory(registry))
        first_registry = Registry(self.environment.settings.redis_url, START_TIMEOUT_S)
        try:
            directory = WorkerDirectory(registry, first_registry=first_registry)
            return await self._stack.enter_async_context(directory)
        finally:
            await first_registry.close()

    def snapshot(self) -> Snapshot:
        """The workers at the last read of the registry."""
        if self._injected_snapshot is not None:
            return self._injected_snapshot()
        return self._directory.snapshot if self._directory is not None else Snapshot(degraded=True)

    @property
    def num_active(self) -> int:
        """The number of sequences that this replica serves, those that wait for a slot included."""
        return self._active.num + self._background.num

    @property
    def knows_callers(self) -> bool:
        """Whether callers need an API key or a token."""
        return self._callers.is_required

    async def authenticate(self, authorization: str | None, scope: Scope) -> Caller:
        """Authenticates a caller by its `Authorization`. Raises Unauthenticated, Forbidden, or Unavailable if the keys
        cannot be read."""
        caller = await self._callers.caller_of(authorization)
        caller.check(scope)
        return caller

    async def prepare(self, request: GenerationInput, *, has_begun: bool = False) -> GenerationSpec:
        """Checks and tokenizes a request after `admit`. Raises InvalidRequest, NotFound for the model, Unavailable
        without a target, Forbidden for another tenant's name or priority, Overloaded if its tenant has used up its
        limits, or if it would wait too long and has not begun."""
        environment, caller = self.environment, request.origin.caller
        request = _on_behalf_of_its_caller(request)
        check_input(request)
        served, model, targets = self.catalog.find(request.model, caller)
        if not has_begun:
            retry_after_s = environment.placement.admission.retry_after_s(model)
            num, parameter = (request.best_of, "best_of") if request.best_of else (request.n, "n")
            environment.limits.concurrency.check(caller, num, retry_after_s, parameter)
            time_left_s = self.preparation.deadline_s(request, served)
            ticket = Ticket(request.priority, request.tenant)
            environment.placement.admission.check_room(model, ticket, time_left_s)
        charge = partial(environment.limits.rates.charge_prompt, caller, has_begun=has_begun)
        spec = await self.preparation.prepare(request, served, model, targets, charge)
        return self.canary.assign(spec, environment.now_s())

    async def admit(self, caller: Caller, *, may_have_begun: bool = False) -> None:
        """Admits a request of any kind on its arrival, and counts it, whatever becomes of it. Raises Overloaded if its
        tenant has used up its limits.

        One that claims to resume a stream `may_have_begun`, and may be owed for; `check_new` follows if it has not."""
        rates = self.environment.limits.rates
        if not may_have_begun:
            rates.check(caller)
        await rates.admit(caller, has_begun=may_have_begun)

    async def check_new(self, caller: Caller) -> None:
        """Checks an admitted request that might have begun, and has not. Raises Overloaded if it would not have been
        admitted as a new one."""
        await self.environment.limits.rates.charge_prompt(caller, 0)

    async def generate(
        self,
        spec: GenerationSpec,
        arrival_s: float,
        entry: JournalEntry | None = None,
        resumption: Resumption | None = None,
    ) -> AsyncGenerator[ChoiceOutput | RequestFinished]:
        """Runs one request; close the generator to cancel it. Raises as SequenceRunner.run.

        With an `entry` its stream can be resumed elsewhere; with a `resumption` it is a resumed one.
        """
        environment = self.environment
        await self._poison_guard.check(spec)
        has_finished = False
        held = await self._enter(spec, has_begun=resumption is not None and any(resumption.token_ids))
        stream = None
        try:
            stream = self.streams.begin(spec, entry, is_resumed=resumption is not None)
            with RequestRecord(environment, spec) as record:
                spec = replace(spec, span=record.span)
                items = run_choices(environment, spec, arrival_s, resumption)
                async with aclosing(self._observed(spec, items, is_resumed=resumption is not None)) as items:
                    async for item in items:
                        record.take(item)
                        if stream is not None:
                            _write_down(stream, item, spec.run)
                        if isinstance(item, RequestFinished):
                            has_finished = True
                            self._poison_guard.acquit(spec)
                        yield item
        finally:
            if not has_finished:
                self._poison_guard.suspect(spec)
            if stream is not None:
                stream.end()
            self._leave(spec)
            environment.limits.concurrency.release(held)

    async def _enter(self, spec: GenerationSpec, *, has_begun: bool) -> Held | None:
        """Counts the request's sequences for this replica and its tenant. Raises Overloaded if either has too many.

        Those in the background have a limit of their own: no other request is refused for them."""
        environment, num = self.environment, spec.num_candidates
        active = self._sequences_beside(spec)
        # Lines of batches have shared their room by model already (`coordinator.batches.line_room`).
        sharing = (lambda: (spec.model,)) if spec.is_background else self.catalog.names
        excess = active.excess(spec.model, num, sharing)
        if excess > 0:
            newcomer = Ticket(spec.request.priority, spec.request.tenant)
            admission = environment.placement.admission
            if spec.is_background or not admission.shed_for(spec.model, newcomer, min(excess, num)):
                raise Overloaded(
                    f"this replica serves its most of {active.num_max} sequences: there are "
                    f"{active.num}, and this request would be {num} more",
                    environment.placement.admission.retry_after_s(spec.model),
                )
        active.add(spec.model, num)
        try:
            return await environment.limits.concurrency.hold(
                spec.request.origin.caller,
                num,
                lambda: environment.placement.admission.retry_after_s(spec.model),
                has_begun=has_begun,
            )
        except BaseException:
            self._leave(spec)
            raise

    def _leave(self, spec: GenerationSpec) -> None:
        self._sequences_beside(spec).remove(spec.model, spec.num_candidates)

    def _sequences_beside(self, spec: GenerationSpec) -> ActiveSequences:
        """The sequences that share a limit with those of a request."""
        return self._background if spec.is_background else self._active

    def _observed(
        self, spec: GenerationSpec, items: AsyncGenerator[ChoiceOutput | RequestFinished], *, is_resumed: bool
    ) -> AsyncGenerator[ChoiceOutput | RequestFinished]:
        """Passes items through, observed if the request got an arm of a canary. A resumed one was counted where it
        began, and its times mean nothing."""
        if spec.assignment is None or is_resumed:
            return items
        return observed(items, spec, spec.assignment, self.canary, self._canary_auditor, self.environment.metrics)

    def _hurry_canary(self) -> None:
        if self._canary_keeper is not None:
            self._canary_keeper.hurry()

    def count_failure(self, error: Exception) -> None:
        """Counts a failed request by its gRPC code; a defect of ours counts as INTERNAL."""
        kind = error if isinstance(error, OutriderError) else OutriderError
        self.environment.metrics.request_failure.labels(kind.grpc_code).inc()
        if isinstance(error, Unavailable) and error.told != error.message:
            _log.warning("a request failed, and its caller was told no more than its kind: %s", error.message)


def _on_behalf_of_its_caller(request: GenerationInput) -> GenerationInput:
    """Sets the tenant of the caller. Raises Forbidden for another tenant's name and for a priority that is too
    high."""
    tenant, priority_min = request.origin.caller.tenant, request.origin.caller.limits.priority_min
    if tenant is None:
        return request
    if request.priority < priority_min:
        raise Forbidden(
            f"tenant {tenant} may ask for priority {priority_min} and above, where lower goes first; the request's is "
            f"{request.priority}"
        )
    if request.tenant == tenant:
        return request
    if request.tenant:
        raise Forbidden(f"this caller is tenant {tenant}, but the request names another")
    return replace(request, tenant=tenant)


def _write_down(stream: JournaledStream, item: ChoiceOutput | RequestFinished, run: RunIdentity) -> None:
    """Adds shown tokens to the stream's journal entry."""
    if isinstance(item, ChoiceOutput) and isinstance(item.item, VisibleOutput):
        stream.add(item.index, item.item.token_ids, run.weights_digest)
