"""The shell around the state machine of one sequence: it waits for events and performs actions.

The machine's state (`coordinator.request.sequence`) determines what it waits for; the call to a target is open exactly
while the state is RUNNING. Leaving `run`, in any way, cancels the call and the draft worker's attachment and gives the
slot back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from coordinator.intake.generation_request import GenerationSpec
from coordinator.output.sequence_output import OutputItem, SequenceOutput
from coordinator.placement.fair_queue import Siblings, Ticket
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.slot_queue import Slot
from coordinator.recovery.resumption import NOTHING_SEEN, ResumePoint
from coordinator.recovery.retry_policy import RetryPolicy
from coordinator.request import sequence_actions as act
from coordinator.request import sequence_events as seen
from coordinator.request.attempt import Attempt
from coordinator.request.draft_link import LinkedSession
from coordinator.request.environment import Environment
from coordinator.request.sequence import SequenceMachine
from coordinator.request.sequence_events import Event, SequenceState
from coordinator.request.sequence_losses import SequenceLosses
from coordinator.request.target_choice import TargetChoice
from coordinator.speculation.fallback import ALWAYS, FallbackController, FallbackState, Trigger
from coordinator.speculation.priors import StartingMode, key_for
from coordinator.workers.channels import remaining_ms
from outrider.errors import OutriderError
from outrider.registry.worker_record import WorkerRecord
from protos.outrider.v1 import target_pb2

_log = logging.getLogger(__name__)

LONG_PROMPT_TOKENS: Final = 8192
"""Prompts above this length take 1 to 30 ms to encode as a message to a worker."""
KNOWN_LOSSES_S: Final = 0.05
"""Greatest age of other replicas' losses when a loss is counted."""
_WAIT_S: Final = 0.1  # between two searches for a target
_PROBE_S: Final = 0.5  # for a target to answer although its connection broke


class SequenceRunner:
    """Generates one of a request's sequences; `run` is called once."""

    def __init__(
        self,
        environment: Environment,
        spec: GenerationSpec,
        arrival_s: float,
        *,
        index: int = 0,
        preferred: WorkerRecord | None = None,
        point: ResumePoint = NOTHING_SEEN,
        known_token_ids: Sequence[int] = (),
        has_begun: bool = False,
        siblings: Siblings | None = None,
    ) -> None:
        """`arrival_s`: when the request came in, on the environment's clock; `index` numbers the candidates. A
        `preferred` target is tried first while it has room.

        Output that the client already has, up to `point`, is shown as a repeat; its `known_token_ids` need not be
        generated again. A sequence that `has_begun` does not queue as a new one. `siblings`: the request's sequences
        together.
        """
        request, settings = spec.request, environment.settings
        self._environment = environment
        self._spec = spec
        self._prior_key = key_for(spec, request.tenant)
        # A request that always speculates learns nothing from others, and they would learn nothing from it.
        self._uses_priors = settings.uses_priors and not request.speculation.is_always
        self._sampling = spec.sampling_of(index).to_proto()
        self._attempt: Attempt | None = None  # open while the machine is RUNNING
        self._slot: Slot | None = None  # granted, not yet an attempt's
        self._shown_state: str | None = None  # as the metrics count it
        self._put: Callable[[OutputItem], Awaitable[None]]
        losses = SequenceLosses(
            spec,
            index,
            environment.losses.poison,
            environment.losses.trials,
            num_losses_max=settings.target_attempts_max,
            arrival_s=arrival_s,
        )
        # Known tokens have no log probabilities, and a prompt's come only with the tokens.
        has_logprobs = spec.sampling.num_logprobs is not None or spec.sampling.num_prompt_logprobs is not None
        self._machine = SequenceMachine(
            spec,
            index,
            arrival_s=arrival_s,
            output=SequenceOutput(spec, spec.served.tokenizer, point, arrival_s),
            choice=TargetChoice(spec, environment.placement.router, environment.snapshot, losses, preferred),
            losses=losses,
            controller=FallbackController(
                ALWAYS if request.speculation.is_always else environment.speculation.policy,
                is_enabled=request.speculation.enabled and not request.speculation.is_plain,
                starting_mode=self._starting_mode(index),
            ),
            retries=RetryPolicy(settings.target_attempts_max, settings.target_wait_max_s),
            ticket=Ticket(
                request.priority,
                request.tenant,
                len(spec.prompt_token_ids),
                may_be_shed=not has_begun and not spec.is_background,  # which has nobody's room
                siblings=siblings or Siblings(),
                due_s=arrival_s + spec.objective.ttft_ms / 1e3,
                since_s=arrival_s,
            ),
            known_token_ids=() if has_logprobs or spec.prompt_text is not None else known_token_ids,
            has_begun=has_begun,
        )

    async def run(self, put: Callable[[OutputItem], Awaitable[None]]) -> None:
        """Passes on the output of the prompt, if any, of each step, and one SequenceFinished.

        Raises Overloaded or Unavailable before the first token if no target takes the sequence, WorkerLost or
        WorkerFailed if every attempt ended early, Poisonous if it cost too many targets, DeadlineExceeded, and
        InvalidRequest if a target refuses a value or the parameters leave no possible token.
        """
        environment, machine, self._put = self._environment, self._machine, put
        if not self._spec.is_background:
            environment.metrics.count_start(self._spec.model, machine.controller.state.name.lower())
        try:
            self._show_state()
            await self._perform(self._handle(seen.Started()))
            while not machine.is_over:
                await self._perform(self._handle(await self._next()))
        finally:
            if not machine.is_over:
                for action in self._handle(seen.Cancelled()):
                    self._do(action)
            environment.metrics.move_fallback(self._spec.model, self._shown_state, None)
            if self._uses_priors:  # also if it was cancelled
                environment.speculation.priors.record(self._prior_key, machine.controller.evidence, environment.now_s())
            await self._leave_target()
        if machine.error is not None:
            raise machine.error

    def _handle(self, event: Event) -> list[act.Action]:
        return self._machine.handle(event, self._environment.now_s())

    async def _next(self) -> Event:
        """Waits for the event that the machine's state needs."""
        environment, machine = self._environment, self._machine
        if machine.state is SequenceState.RUNNING:
            return await self._read()
        await self._leave_target()
        match machine.state:
            case SequenceState.QUEUED:
                return await self._find_slot()
            case SequenceState.JUDGING:
                assert machine.target is not None
                address, incarnation = machine.target.address, machine.target.incarnation
                return seen.TargetProbed(await environment.channels.has_incarnation(address, incarnation, _PROBE_S))
            case SequenceState.CHECKING:
                return seen.DoubtfulProbed(await self._serving())
            case SequenceState.COUNTING:
                serving = await self._serving()
                await environment.losses.exchange.refresh(KNOWN_LOSSES_S)
                return seen.DoubtfulProbed(serving)
            case SequenceState.REPEATING:
                async with environment.loop.repeats:
                    await asyncio.sleep(0)
                return seen.RepeatDue()
            case SequenceState.WAITING:
                await asyncio.sleep(_WAIT_S)
                return seen.WaitOver()
            case state:
                raise AssertionError(f"a sequence that is {state.name} waits for nothing")

    async def _find_slot(self) -> Event:
        environment, spec, machine = self._environment, self._spec, self._machine
        choice, now_s = machine.choice, environment.now_s
        request = PlacementRequest(
            model=spec.model,
            ticket=machine.ticket,
            rank=lambda: choice.rank(now_s()),
            is_hopeless=choice.is_hopeless,
            token=environment.new_id(),
            since_s=machine.arrival_s,
            deadline_s=machine.deadline_s,
            num_tokens=spec.num_tokens_max,
            restrictions=lambda: choice.restrictions(now_s()),
            is_background=spec.is_background,
        )
        try:
            with environment.metrics.queued(spec.model):
                slot = await environment.placement.admission.reserve(request)
        except OutriderError as error:
            return seen.SlotRefused(error)
        return seen.NoTarget() if slot is None else seen.SlotGranted(slot)

    async def _read(self) -> Event:
        assert self._attempt is not None
        try:
            return _event_of(await self._attempt.read())
        except OutriderError as error:
            self._attempt.leave()
            return seen.TargetLeft(error)

    async def _serving(self) -> list[WorkerRecord]:
        """Targets counted as lost that serve after all: their connections had broken, or they had been paused, perhaps
        many at once."""
        is_serving, targets = self._environment.channels.is_serving, self._spec.run.doubtful
        serve = await asyncio.gather(*(is_serving(target.address, target.incarnation, _PROBE_S) for target in targets))
        return [target for target, is_there in zip(targets, serve, strict=True) if is_there]

    async def _perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Show(item):
                    await self._put(item)
                case act.OpenCall(slot):
                    await self._open(slot)
                case act.Reject(error):
                    assert self._attempt is not None
                    self._attempt.leave()
                    await self._perform(self._handle(seen.TargetLeft(error)))
                case _:
                    self._do(action)

    def _do(self, action: act.Action) -> None:
        environment, spec = self._environment, self._spec
        match action:
            case act.CountStep():
                self._count_step(action)
            case act.ChangeSpeculation(changes):
                assert self._attempt is not None
                self._attempt.apply(changes)
            case act.ReleaseSlot(slot):
                environment.placement.admission.leave(spec.model, slot)
            case act.ReportFallback(before, after, trigger):
                self._report_fallback(before, after, trigger)
            case act.ReportLeft(target, error):
                request_id = spec.request.request_id
                _log.warning(
                    "request %s leaves target %s: %s",
                    request_id,
                    target.worker_id,
                    error.message,
                    extra={"request_id": request_id, "worker_id": target.worker_id},
                )
                spec.span.event("left its target", {"target": target.worker_id, "because": error.message})
            case act.CountReplay():
                environment.metrics.target_replays.inc()
            case act.ShareLosses():
                environment.losses.exchange.share_soon()
            case act.ReportPoison():
                self._report_poison()

    async def _open(self, slot: Slot) -> None:
        environment, spec, machine = self._environment, self._spec, self._machine
        self._slot = slot
        if len(spec.prompt_token_ids) + len(spec.prediction_token_ids) > LONG_PROMPT_TOKENS:
            # One per turn of the loop, or 64 sequences of one request would all be encoded in the same one.
            async with environment.loop.long_prompts:
                await asyncio.sleep(0)
        # A new id each time: a lost target or its draft worker may keep the old session for a while.
        session_id, target, hint_token = slot.token, slot.target, environment.new_id()
        spec.span.event("placed", {"target": target.worker_id, "session_id": session_id})
        request = target_pb2.GenerateRequest(
            session_id=session_id,
            hint_token=hint_token,
            token_ids=machine.committed(),
            num_prompt_tokens=len(spec.prompt_token_ids),
            sampling=self._sampling,
            speculation=machine.speculation.to_proto(),
            priority=machine.ticket.priority,
            deadline_ms=remaining_ms(machine.deadline_s, environment.now_s()),
            incarnation=target.incarnation,
            cache_salt=spec.cache_salt,
            owner=spec.owner,
            trial_tokens=machine.losses.trial_tokens,
            prediction=spec.prediction_token_ids,
            slo=spec.objective.since(1e3 * (environment.now_s() - machine.arrival_s)).to_proto(),
            decoding_ms=machine.output.times.since_first_token_ms(environment.now_s()),
        )
        session = LinkedSession(spec, request, target, machine.deadline_s, machine.committed, machine.committed_len)
        self._attempt = Attempt(
            environment,
            slot,
            session,
            speculation=lambda: machine.speculation.to_proto(),
            on_no_draft=self._lose_draft,
        )
        self._slot = None

    def _lose_draft(self) -> None:
        if self._machine.state is SequenceState.RUNNING:  # not while its last item waits for the client
            for action in self._handle(seen.DraftLost()):
                self._do(action)

    async def _leave_target(self) -> None:
        attempt, self._attempt = self._attempt, None
        slot, self._slot = self._slot, None
        if slot is not None:
            self._environment.placement.admission.leave(self._spec.model, slot)
        if attempt is not None:
            attempt.leave()
            await attempt.close()

    def _count_step(self, step: act.CountStep) -> None:
        environment, spec, metrics = self._environment, self._spec, self._environment.metrics
        if not spec.is_background:
            environment.limits.rates.owe(spec.request.origin.caller, step.num_tokens)
            if step.gap_s is not None:
                metrics.observe_gap(spec.model, step.gap_s)
        environment.placement.admission.count_output(spec.model, self._machine.ticket.tenant, step.num_tokens)
        if not step.num_draft_tokens:
            return
        metrics.observe_step(spec.model, step.num_draft_tokens, step.num_accepted)
        draft = None if self._attempt is None else self._attempt.draft
        if draft is None:
            return
        on_path = step.num_draft_tokens - step.num_branches, step.num_accepted - step.num_accepted_branches
        finding = environment.speculation.watch.observe(draft, spec.model, *on_path)
        if finding is not None:
            _log.log(logging.ERROR if finding.is_alarm else logging.INFO, "%s", finding)
            metrics.show_draft_alarms(environment.speculation.watch.alarms)

    def _starting_mode(self, index: int) -> StartingMode:
        if not self._uses_priors:
            return StartingMode.SPECULATING
        sequence_id = f"{self._spec.request.request_id}/{index}"
        return self._environment.speculation.priors.start(self._prior_key, sequence_id, self._environment.now_s())

    def _show_state(self) -> None:
        controller = self._machine.controller
        is_undrafted = controller.state is FallbackState.PAUSED and controller.last_trigger is Trigger.NO_DRAFT
        shown = "undrafted" if is_undrafted else controller.state.name.lower()
        self._environment.metrics.move_fallback(self._spec.model, self._shown_state, shown)
        self._shown_state = shown

    def _report_fallback(self, before: FallbackState, after: FallbackState, trigger: Trigger) -> None:
        metrics, why = self._environment.metrics, trigger.name.lower()
        self._show_state()
        metrics.fallback_transitions.labels(after.name.lower()).inc()
        self._spec.span.event("fallback", {"state": after.name.lower(), "because": why})
        if before is FallbackState.PROBING:
            metrics.count_probe(self._spec.model, why)

    def _report_poison(self) -> None:
        environment, spec, digest = self._environment, self._spec, self._machine.losses.prompt_digest
        environment.metrics.show_poison(environment.losses.poison.convicted(environment.now_s()))
        _log.error(
            "request %s lost %d target workers one after the other and is ended; its prompt's digest is %s",
            spec.request.request_id,
            spec.run.num_losses,
            digest,
            extra={"request_id": spec.request.request_id, "prompt_digest": digest},
        )


def _event_of(answer: target_pb2.GenerateEvent) -> Event:
    match answer.WhichOneof("event"):
        case "step":
            return seen.StepTaken(answer.step)
        case "finished":
            end = answer.finished
            stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
            return seen.TargetEnded(end.reason, stop_token_id, end)
        case "started":
            started = answer.started
            return seen.TargetStarted(started.decoding_mode, seen.exactness_of(started))
        case "prompt":
            return seen.PromptScored(answer.prompt)
        case _:
            return seen.TargetWaits()
