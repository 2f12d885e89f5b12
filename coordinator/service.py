"""What one replica offers, whatever the edge: check a request, generate, tell which models are live.

    async with GenerationService(settings) as service:
        spec = await service.prepare(request)
        async for item in service.generate(spec, arrival_s): ...

HTTP and gRPC are two thin translations of these calls. The service owns the replica's connections and tasks.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final, Self

from coordinator.admission import Admission
from coordinator.canary import CanaryDesk
from coordinator.canary_audit import CanaryAuditor
from coordinator.canary_keeper import CanaryKeeper
from coordinator.canary_observation import observed
from coordinator.choices import ChoiceNews, RequestFinished, run_choices
from coordinator.concurrency_limits import ConcurrencyLimits, Held
from coordinator.environment import Environment, Outside
from coordinator.fair_queue import Ticket
from coordinator.generation_request import (
    GenerationInput,
    GenerationSpec,
    Origin,
    check_input,
    check_request_id,
    identified,
)
from coordinator.journal import FLUSH_S, Journal, JournaledStream, JournalEntry
from coordinator.loss_exchange import LossExchange
from coordinator.poison import CONVICTED_S, LOSSES_MAX, PoisonRecord
from coordinator.preparation import RequestPreparation
from coordinator.prior_store import PriorStore
from coordinator.rate_limits import RateLimits
from coordinator.request_record import RequestRecord
from coordinator.reservations import Reservations
from coordinator.resumption import Claim, Resumption
from coordinator.routing import Exclusion, Router
from coordinator.run_identity import RunIdentity, prompt_digest
from coordinator.settings import CoordinatorSettings
from coordinator.text_output import VisibleOutput
from coordinator.worker_threads import WorkerThreads
from outrider.api_keys import ANYBODY, Caller, KeyFile, Scope
from outrider.background import end_tasks, keep_going
from outrider.canary.store import CanaryStore
from outrider.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    Poisonous,
    RegistryUnavailable,
    Unavailable,
)
from outrider.loop_lag import keep_ticking
from outrider.registry import START_TIMEOUT_S, Registry, RegistryCalls
from outrider.sampling_params import DecodingMode
from outrider.worker_directory import WorkerDirectory
from outrider.worker_record import Snapshot, WorkerRecord

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 0.1
_WRITE_S: Final = 0.1  # for what the journal writes to arrive
_HOUSEKEEPING_S: Final = 5.0
KNOWN_LOSSES_S: Final = 0.1
"""How old may be what is known of other replicas' losses when a request begins."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One served model as of now."""

    model: str
    max_model_len: int  # of the roomiest target, tokens
    num_target_workers: int
    num_draft_workers: int


@dataclass(frozen=True, slots=True)
class Recollection:
    """What the journal knows of a stream."""

    entry: JournalEntry | None
    is_away: bool = False  # it cannot be asked

    def has_begun(self, claim: Claim | None) -> bool:
        """Whether the run that a client claims to have tokens of has some, by the journal's own word."""
        return claim is not None and self._is_of(claim) and any(self._entry_tokens())

    def _is_of(self, claim: Claim) -> bool:
        entry = self.entry
        return entry is not None and (entry.request_digest, entry.weights_digest) == (
            claim.request_digest,
            claim.weights_digest,
        )

    def tokens_of(self, claim: Claim) -> tuple[Sequence[int], ...]:
        """Of each sequence; nothing where the journal has another run."""
        return self._entry_tokens() if self._is_of(claim) else ()

    def num_losses(self, request_digest: str) -> int:
        """Workers that this request has cost already. It is known by them whatever weights computed it; another one is
        not."""
        entry = self.entry
        return 0 if entry is None or entry.request_digest != request_digest else entry.num_losses

    def _entry_tokens(self) -> tuple[Sequence[int], ...]:
        return () if self.entry is None else self.entry.token_ids


class GenerationService:
    """One per replica; open it on the event loop that serves requests."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        snapshot: Callable[[], Snapshot] | None = None,
        outside: Outside | None = None,
    ) -> None:
        """`snapshot` replaces what the registry says of workers: tests inject those that there are."""
        outside = outside or Outside.real(settings)
        tokenizer = outside.tokenizer
        if not tokenizer.has_chat_template:
            _log.warning("%s has no chat template; messages are joined by newlines", settings.tokenizer_dir)
        self._injected_snapshot = snapshot
        self._registry = outside.registry
        # On the way of requests: one that is slow is as good as none.
        self._quick_registry: Registry | None = None
        if outside.registry is None and snapshot is None:
            self._quick_registry = Registry(settings.redis_url, REQUEST_TIMEOUT_S)
        self._directory: WorkerDirectory | None = None
        self._prior_store: PriorStore | None = None
        self._journal: Journal | None = None
        self._stack = AsyncExitStack()
        self._num_active = 0  # sequences, those that wait included
        self._keys = None if settings.api_keys_file is None else KeyFile(Path(settings.api_keys_file))
        self.canary = CanaryDesk(uuid.uuid4().hex)
        self._canary_keeper: CanaryKeeper | None = None
        threads = WorkerThreads()
        self.preparation = RequestPreparation(tokenizer, settings, outside.chance, threads)
        self._identities = outside.identities.watch(self.snapshot)
        router = Router(
            tokenizer.fingerprint,
            settings.served_model_names,
            outside.chance,
            settings.quarantine_s,
            self._identities.reason_against,
        )
        reservations = Reservations(
            outside.registry or self._quick_registry if snapshot is None else None, outside.now_s
        )
        poison = PoisonRecord()
        self.environment = Environment(
            poison=poison,
            losses=LossExchange(outside.registry or self._quick_registry, poison, outside.now_s),
            settings=settings,
            tokenizer=tokenizer,
            router=router,
            channels=outside.channels,
            metrics=outside.metrics,
            snapshot=self.snapshot,
            reservations=reservations,
            admission=Admission(
                router,
                reservations,
                outside.now_s,
                wait_max_s=settings.queue_wait_max_s,
                weights=dict(settings.tenant_weights),
            ),
            now_s=outside.now_s,
            new_id=outside.new_id,
            policy=outside.policy,
            tracing=outside.tracing,
            limits=RateLimits(self._quick_registry, outside.now_s),
            threads=threads,
            concurrency=ConcurrencyLimits(self._quick_registry, outside.now_s),
        )
        self._canary_auditor = CanaryAuditor(self.environment, self.canary, self._hurry_canary)

    async def __aenter__(self) -> Self:
        settings, registry = self.environment.settings, self._registry
        self._stack.callback(self.environment.threads.close)
        if registry is None and self._injected_snapshot is None:
            await self.environment.threads.run(self.preparation.load_grammars)
            registry = redis = Registry(settings.redis_url)
            self._stack.push_async_callback(redis.close)
            if settings.uses_priors:
                store = PriorStore(redis, self.environment.priors, self.environment.now_s)
                self._prior_store = await self._stack.enter_async_context(store)
            environment = self.environment
            keeper = CanaryKeeper(
                *(CanaryStore(redis), self.canary, environment.metrics, environment.now_s, self._has_draft)
            )
            self._canary_keeper = await self._stack.enter_async_context(keeper)
        if registry is not None:
            await self._stack.enter_async_context(self.environment.losses)
            self._journal = await self._stack.enter_async_context(
                Journal(registry, now_s=self.environment.now_s, new_id=self.environment.new_id)
            )
            if self._injected_snapshot is None:
                self._directory = await self._open_directory(registry)
                if self._quick_registry is not None:
                    self._stack.push_async_callback(self._quick_registry.close)
                await self._stack.enter_async_context(self.environment.reservations)
                await self._stack.enter_async_context(self.environment.limits)
                await self._stack.enter_async_context(self.environment.concurrency)
        self._stack.push_async_callback(self.environment.tracing.close)
        self._stack.push_async_callback(self.environment.channels.close)
        await self._stack.enter_async_context(self._identities)
        await self._stack.enter_async_context(self._canary_auditor)
        self._stack.push_async_callback(self.environment.admission.close)
        housekeeping = asyncio.create_task(
            keep_going(self._keep_house, "housekeeping"), name="coordinator housekeeping"
        )
        ticks = partial(keep_ticking, self.environment.lag, self.environment.metrics.observe_loop_lag)
        ticking = asyncio.create_task(keep_going(ticks, "the loop's ticking"), name="loop lag")
        self._stack.push_async_callback(end_tasks, housekeeping, ticking)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open_directory(self, registry: RegistryCalls) -> WorkerDirectory:
        if self._registry is not None:
            return await self._stack.enter_async_context(WorkerDirectory(registry))
        patient = Registry(self.environment.settings.redis_url, START_TIMEOUT_S)
        try:
            directory = WorkerDirectory(registry, first_registry=patient)
            return await self._stack.enter_async_context(directory)
        finally:
            await patient.close()

    def snapshot(self) -> Snapshot:
        """The workers as of the last look at the registry."""
        if self._injected_snapshot is not None:
            return self._injected_snapshot()
        return self._directory.snapshot if self._directory is not None else Snapshot(degraded=True)

    @property
    def has_keys(self) -> bool:
        """Whether callers need one."""
        return self._keys is not None

    def authenticate(self, authorization: str | None, scope: Scope) -> Caller:
        """Who asks, by the `Authorization` of the call. Raises Unauthenticated, Forbidden or, where the keys cannot be
        read, Unavailable."""
        if self._keys is None:
            return ANYBODY
        caller = self._keys.authenticate(authorization)
        caller.check(scope)
        return caller

    def models(self) -> list[ModelStatus]:
        """Models with at least one usable target, in order of their names."""
        snapshot, now_s = self.snapshot(), self.environment.now_s()
        drafts, _ = self.environment.router.usable(snapshot.drafts, now_s)
        return [
            ModelStatus(model, max(target.max_model_len for target in targets), len(targets), len(drafts))
            for model, targets in self.environment.router.models(snapshot, now_s).items()
        ]

    def exclusions(self) -> list[Exclusion]:
        """Registered workers that are not used, and why."""
        snapshot, now_s = self.snapshot(), self.environment.now_s()
        _, excluded = self.environment.router.usable((*snapshot.targets, *snapshot.drafts), now_s)
        return excluded

    async def prepare(self, request: GenerationInput, *, has_begun: bool = False) -> GenerationSpec:
        """Checks and tokenizes. Raises InvalidRequest, NotFound for the model, Unavailable without a target, Forbidden
        for another tenant's name or priority, Overloaded where its tenant has used up what it may and, unless it is
        known to have begun, where it would have to wait for too long."""
        environment, caller = self.environment, request.origin.caller
        request = _on_behalf_of_its_key(request)
        check_input(request)
        model, targets = self.find_model(request.model)
        if not has_begun:
            environment.limits.check(caller)
            retry_after_s = environment.admission.retry_after_s(model)
            num, parameter = (request.best_of, "best_of") if request.best_of else (request.n, "n")
            environment.concurrency.check(caller, num, retry_after_s, parameter)
            time_left_s = request.deadline_s or environment.settings.deadline_default_s
            ticket = Ticket(request.priority, request.tenant)
            environment.admission.check_room(model, ticket, time_left_s)
        spec = await self.preparation.prepare(request, model, targets)
        # Once for each sequence, though they share its computation: as many contexts take up room.
        num_prompt_tokens = len(spec.prompt_token_ids) * spec.num_candidates
        await environment.limits.admit(caller, num_prompt_tokens, has_begun=has_begun)
        return self.canary.place(spec, environment.now_s())

    async def admit(self, caller: Caller) -> None:
        """A request that generates nothing. Raises Overloaded where its tenant has used up what it may."""
        self.environment.limits.check(caller)
        await self.environment.limits.admit(caller, 0)

    async def generate(
        self,
        spec: GenerationSpec,
        arrival_s: float,
        entry: JournalEntry | None = None,
        resumption: Resumption | None = None,
    ) -> AsyncGenerator[ChoiceNews | RequestFinished]:
        """Runs one request; close the generator to cancel it. Raises what RequestSession.run raises.

        With an `entry` its stream can be resumed elsewhere; with a `resumption` it is one that was.
        """
        environment = self.environment
        await _check_harmless(environment, spec)
        has_finished = False
        held = await self._enter(spec, has_begun=resumption is not None and any(resumption.token_ids))
        stream = None
        if entry is not None and self._journal is not None:
            stream = _journalled(self._journal, spec, entry, is_resumed=resumption is not None)
        if stream is not None:  # at once: a run may lose its workers before it has shown anything
            spec.run.on_loss = partial(_write_losses, stream, spec.run)
        try:
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
                            _acquit(environment, spec)
                        yield item
        finally:
            if not has_finished:
                _suspect(environment, spec)
            if stream is not None:
                stream.end()
            self._num_active -= spec.num_candidates
            environment.concurrency.release(held)

    async def _enter(self, spec: GenerationSpec, *, has_begun: bool) -> Held | None:
        """Counts the request's sequences among this replica's and its tenant's. Raises Overloaded where they are too
        many of either."""
        environment, num = self.environment, spec.num_candidates
        # One that has more sequences than there may be is served alone.
        excess = self._num_active + num - environment.settings.requests_max if self._num_active else 0
        if excess > 0:
            newcomer = Ticket(spec.request.priority, spec.request.tenant)
            if not environment.admission.shed_for(spec.model, newcomer, min(excess, num)):
                raise Overloaded(
                    f"this replica serves its most of {environment.settings.requests_max} sequences: there are "
                    f"{self._num_active}, and this request would be {num} more",
                    environment.admission.retry_after_s(spec.model),
                )
        self._num_active += num
        try:
            return await environment.concurrency.hold(
                spec.request.origin.caller,
                num,
                lambda: environment.admission.retry_after_s(spec.model),
                has_begun=has_begun,
            )
        except BaseException:
            self._num_active -= num
            raise

    def _observed(
        self, spec: GenerationSpec, items: AsyncGenerator[ChoiceNews | RequestFinished], *, is_resumed: bool
    ) -> AsyncGenerator[ChoiceNews | RequestFinished]:
        """The same items, watched where the request got an arm of a canary. One that is resumed began elsewhere: its
        times say nothing, and it has been counted there."""
        if spec.assignment is None or is_resumed:
            return items
        return observed(
            items, spec, spec.assignment, self.canary, self._canary_auditor, self.environment.metrics
        )

    async def recall(self, request_id: str, caller: Caller) -> Recollection:
        """Of a stream that another replica has begun, perhaps; another tenant's is none. Raises InvalidRequest."""
        check_request_id(request_id)
        if self._journal is None:
            return Recollection(None)
        try:
            entry = await self._journal.load(
                _journal_id(GenerationInput(request_id=request_id, origin=Origin(caller)))
            )
        except RegistryUnavailable as error:
            _log.warning("request %s cannot be looked up: %s", request_id, error.message)
            return Recollection(None, is_away=True)
        return Recollection(entry)

    async def look_up(self, request_id: str, caller: Caller) -> Recollection:
        """With its entry. Raises InvalidRequest, NotFound where there is none, Unavailable where nobody can say, and
        Overloaded where there is none yet and the tenant has used up what it may."""
        recollection = await self.recall(request_id, caller)
        if recollection.entry is None and self._journal is not None and not recollection.is_away:
            await self.admit(caller)  # what has begun has been charged, and this may not have
            await asyncio.sleep(FLUSH_S + _WRITE_S)  # one that has just begun is on its way there
            recollection = await self.recall(request_id, caller)
        if recollection.entry is None:
            if recollection.is_away:
                raise Unavailable(
                    f"the registry does not answer, which would know of the stream {request_id}; come back, or send "
                    "the request again with the id of the last event that came",
                    2.0,
                )
            raise NotFound(
                f"there is no stream {request_id} to go on with: it ended a while ago, was too long to be kept, or "
                "never began; send the request again with the id of the last event that came, or without to begin anew",
                "request_id",
            )
        return recollection

    def resume(
        self, spec: GenerationSpec, claim: Claim | None, recollection: Recollection
    ) -> tuple[GenerationSpec, Resumption]:
        """The request as its run was begun, and what is known of its output. `claim` is None for a client that has seen
        nothing. Raises InvalidRequest when tokens that have been shown cannot be made again, Conflict when they are of
        another run, and Unavailable where the journal would know, which cannot be asked."""
        entry = recollection.entry
        restored = spec if entry is None else _restored(spec, entry)
        if claim is None:  # it begins anew, with the seed that it had
            is_same = entry is not None and restored.run.request_digest == entry.request_digest
            spec = restored if is_same else spec
            spec.run.resume_with(recollection.num_losses(spec.run.request_digest))
            return spec, Resumption.of_nothing(spec.num_candidates)
        if spec.num_candidates > spec.num_choices:
            raise InvalidRequest("best_of", "with best_of above n a stream cannot be resumed")
        if spec.sampling.decoding_mode is DecodingMode.REJECTION:
            raise InvalidRequest(
                "seed",
                "a sampled text can be resumed only where the request has a seed; send it again to begin anew",
            )
        found = [each for each in (restored, spec) if each.run.request_digest == claim.request_digest]
        if not found:
            if recollection.is_away and (spec.has_drawn_seed or spec.request.max_tokens is None):
                raise Unavailable(
                    f"the registry does not answer, which would know how the stream {spec.request.request_id} began; "
                    "come back",
                    2.0,
                )
            raise _other_run(spec, recollection)
        spec = identified(found[0], claim.weights_digest)
        spec.run.resume_with(recollection.num_losses(claim.request_digest))
        known = recollection.tokens_of(claim)[: spec.num_choices]
        return spec, Resumption(claim.points, known + ((),) * (spec.num_choices - len(known)))

    def find_model(self, name: str) -> tuple[str, list[WorkerRecord]]:
        """The model's name and its usable targets. Raises NotFound naming those served, or Unavailable."""
        models = self.environment.router.models(self.snapshot(), self.environment.now_s())
        served = sorted(models.keys() | set(self.environment.settings.served_model_names))
        if name and served and name not in served:
            raise NotFound(f"model {name!r} is not served; there is {', '.join(served)}", "model")
        if not name:
            if len(served) > 1:
                raise InvalidRequest(
                    "model", f"model is required, for there are several: {', '.join(served)}"
                )
            name = served[0] if served else ""
        if name not in models:
            raise Unavailable(self._why_no_target(), 2.0)
        return name, models[name]

    def _has_draft(self, model_name: str) -> bool:
        usable, _ = self.environment.router.usable(self.snapshot().drafts, self.environment.now_s())
        return any(worker.model_name == model_name for worker in usable)

    def _hurry_canary(self) -> None:
        if self._canary_keeper is not None:
            self._canary_keeper.hurry()

    def _why_no_target(self) -> str:
        reasons = [f"{each.worker_id}: {each.reason}" for each in self.exclusions() if each.pool == "target"]
        if not reasons and self._directory is not None:
            reasons += filter(None, [self._directory.last_departure("target")])
        if self.snapshot().degraded:
            reasons.append("the registry does not answer")
        return "no target worker is live" + (f" ({'; '.join(reasons)})" if reasons else "")

    async def _keep_house(self) -> None:
        reported: set[Exclusion] = set()
        while True:
            snapshot, metrics = self.snapshot(), self.environment.metrics
            await self.environment.channels.forget_all_but(
                {worker.address for worker in (*snapshot.targets, *snapshot.drafts)},
                self.environment.now_s(),
                after_s=self.environment.settings.deadline_max_s,  # longer than any call may take
            )
            excluded = set(self.exclusions())
            for exclusion in excluded - reported:
                _log.warning(
                    "%s worker %s is not used: %s", exclusion.pool, exclusion.worker_id, exclusion.reason
                )
            reported = excluded
            for pool, workers in (("target", snapshot.targets), ("draft", snapshot.drafts)):
                usable, _ = self.environment.router.usable(workers, self.environment.now_s())
                metrics.live_workers.labels(pool).set(len(usable))
            for model in self.models():
                metrics.know(model.model)
            self.environment.watch.keep(snapshot.drafts)
            metrics.show_draft_alarms(self.environment.watch.alarms)
            self.environment.poison.look(snapshot.targets, self.environment.now_s())
            self.environment.losses.tell_soon()
            metrics.show_poison(self.environment.poison.convicted(self.environment.now_s()))
            metrics.registry_degraded.set(snapshot.degraded)
            metrics.api_keys_degraded.set(self._keys is not None and self._keys.is_degraded)
            priors = self.environment.priors
            metrics.show_priors(priors.summary(self.environment.now_s()), priors.num_keys)
            metrics.canary_degraded.set(self._canary_keeper is not None and self._canary_keeper.is_degraded)
            metrics.journal_degraded.set(self._journal is not None and self._journal.is_degraded)
            metrics.priors_degraded.set(self._prior_store is not None and self._prior_store.is_degraded)
            await asyncio.sleep(_HOUSEKEEPING_S)

    def count_failure(self, error: Exception) -> None:
        """Counts a request that ended in an error, by its gRPC code: INTERNAL for what is a defect of ours."""
        kind = error if isinstance(error, OutriderError) else OutriderError
        self.environment.metrics.request_failure.labels(kind.grpc_code).inc()


def _on_behalf_of_its_key(request: GenerationInput) -> GenerationInput:
    """Raises Forbidden for a tenant that is another's, and for a turn before all others that it may not have."""
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
        raise Forbidden(f"this API key is tenant {tenant}'s, and the request names another")
    return replace(request, tenant=tenant)


def _restored(spec: GenerationSpec, entry: JournalEntry) -> GenerationSpec:
    """The request with what was drawn or chosen for it when its run began, where it does not say so itself."""
    sampling, max_tokens = spec.sampling, spec.max_tokens
    if spec.request.sampling.seed is None:
        sampling = replace(sampling, seed=entry.seed)
    if spec.request.max_tokens is None and entry.max_tokens is not None:
        max_tokens = entry.max_tokens
        sampling = replace(sampling, max_tokens=max(max_tokens, 1))
    return identified(replace(spec, sampling=sampling, max_tokens=max_tokens))


def _journalled(
    journal: Journal, spec: GenerationSpec, entry: JournalEntry, *, is_resumed: bool
) -> JournaledStream | None:
    """The run's entry in the journal, from here on. None for one that is not kept; where it begins, nor is then that of
    an earlier run under its id."""
    journal_id, stream = _journal_id(spec.request), None
    if spec.num_candidates == spec.num_choices:
        entry = replace(
            entry,
            request_digest=spec.run.request_digest,
            seed=spec.sampling.seed,
            max_tokens=spec.max_tokens,
            num_losses=spec.run.num_losses,
        )
        stream = journal.begin(journal_id, entry, spec.deadline_s, spec.request.origin.caller.tenant)
    if stream is None and not is_resumed:
        journal.forget(journal_id, spec.deadline_s)
    return stream


def _other_run(spec: GenerationSpec, recollection: Recollection) -> Conflict:
    """Why a stream does not go on with this request."""
    name = spec.request.request_id
    if recollection.entry is not None:
        why = "what was begun under this id is another request, or another run of it"
    elif spec.has_drawn_seed:
        why = "its seed was drawn by the server, and the journal that knew it is gone"
    else:
        why = "the request is not the one that the stream began with"
    return Conflict(
        f"the stream {name} cannot be resumed: {why}; send the request without the id of an event to begin anew",
        "request_id",
    )


async def _check_harmless(environment: Environment, spec: GenerationSpec) -> None:
    """Raises Poisonous for what has just cost more workers than one request may. A run whose prompt has cost some
    begins with their number."""
    if spec.run.num_losses >= LOSSES_MAX:
        raise Poisonous(
            f"{spec.run.num_losses} target workers were lost while they had this request", CONVICTED_S
        )
    if environment.poison:
        await environment.losses.refresh(KNOWN_LOSSES_S)
        digest, now_s = _prompt_digest(spec), environment.now_s()
        left_s = environment.poison.time_left_s(digest, now_s)
        if left_s > 0:
            raise Poisonous(
                f"target workers were lost one after the other to a request with this prompt ({digest}); it is refused "
                f"for another {left_s:.0f} s",
                left_s,
            )
        spec.run.resume_with(environment.poison.num_killed(digest, now_s))


def _acquit(environment: Environment, spec: GenerationSpec) -> None:
    if environment.poison and environment.poison.acquit(_prompt_digest(spec), environment.now_s()):
        environment.losses.tell_soon()
        environment.metrics.show_poison(environment.poison.convicted(environment.now_s()))


def _suspect(environment: Environment, spec: GenerationSpec) -> None:
    """A run has ended before its output did, in whatever way."""
    if spec.run.num_losses:
        environment.poison.suspect(_prompt_digest(spec), spec.run.killed, environment.now_s())
        environment.losses.tell_soon()


def _prompt_digest(spec: GenerationSpec) -> str:
    return prompt_digest(spec.prompt_token_ids, spec.sampling.grammar)


def _write_down(stream: JournaledStream, item: ChoiceNews | RequestFinished, run: RunIdentity) -> None:
    """Has the journal know what a stream shows."""
    if isinstance(item, ChoiceNews) and isinstance(item.news, VisibleOutput):
        stream.add(item.index, item.news.token_ids, run.weights_digest)


def _write_losses(stream: JournaledStream, run: RunIdentity) -> None:
    stream.count_losses(LOSSES_MAX if run.is_blamed else run.num_losses)


def _journal_id(request: GenerationInput) -> str:
    """What the journal calls a stream: request ids are the clients' to choose, and tenants do not see each other's."""
    tenant = request.origin.caller.tenant
    if tenant is None:
        return request.request_id
    return f"{sha256(tenant.encode()).hexdigest()[:16]}:{request.request_id}"
