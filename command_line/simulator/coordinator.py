"""A coordinator replica with its real routing, queue, state machine and fallback, and exact reservations.

This is the shell around `coordinator.request.sequence` in virtual time: the product's runner awaits what is here a
message of a link or an event of the clock. Every replica has its own router and queue, and sees the others' load with
each refresh. Left out: priors from earlier requests (`coordinator.speculation.priors`), tenants, failures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from command_line.simulator.clock import Clock, Link
from command_line.simulator.streams import MODEL, Reservations, Stream
from command_line.simulator.workers import DraftWorker, TargetWorker
from coordinator.formats.output_format import choose_format
from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.models.served_model import ServedModel
from coordinator.placement.fair_queue import Ticket
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.routing import Router, WorkerKey, key_of
from coordinator.placement.slot_queue import Offer, Round, Slot, SlotQueue
from coordinator.recovery.poison import PoisonRecord, Trials
from coordinator.recovery.retry_policy import RetryPolicy
from coordinator.request import sequence_actions as act
from coordinator.request.sequence import SequenceMachine
from coordinator.request.sequence_events import (
    DraftLost,
    Event,
    SequenceState,
    SlotGranted,
    SlotRefused,
    Started,
    StepTaken,
    TargetEnded,
    TargetLeft,
    WaitOver,
)
from coordinator.request.sequence_losses import SequenceLosses
from coordinator.request.target_choice import TargetChoice
from coordinator.speculation.fallback import FallbackAction, FallbackController, FallbackPolicy
from draft_worker.messages import Action as DraftAction
from draft_worker.messages import AttachmentEnded, AttachmentRefused, AttachSession, DetachSession
from outrider.errors import OutriderError
from outrider.registry.worker_record import WorkerRecord
from outrider.sampling_params import SamplingParams, SpeculationSettings
from outrider.text.tokenizer import Tokenizer
from target_worker.messages import (
    Action,
    ChangeSpeculation,
    SessionEnded,
    SessionRefused,
    StartSession,
    TokensCommitted,
)

REFRESH_S: Final = 0.5
"""Interval of reading the pools, as in `coordinator.workers.worker_directory`."""
DRAFT_ATTEMPTS_MAX: Final = 3
_TARGET_ATTEMPTS_MAX: Final = 3
_WAIT_S: Final = 0.1
_FOREVER_S: Final = 1e9
_POLICY: Final = FallbackPolicy()


class _NoTokenizer:
    """Stands for the tokenizer: requests are token ids, and nobody reads the output."""

    fingerprint = ""


_SERVED: Final = ServedModel(cast(Tokenizer, _NoTokenizer()), choose_format(""))


@dataclass(slots=True, eq=False)
class _Session:
    """A stream's session at its workers, as one replica sees it."""

    session_id: str
    stream: Stream
    machine: SequenceMachine
    sampling: SamplingParams
    slot: Slot | None = None
    waiting: PlacementRequest | None = None
    draft: WorkerRecord | None = None
    num_attachments: int = 0
    tried: set[WorkerKey] = field(default_factory=set)


class Coordinator:
    """One coordinator replica."""

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        reservations: Reservations,
        targets: dict[str, TargetWorker],
        drafts: dict[str, DraftWorker],
        link_to: Callable[[str], Link],
        on_end: Callable[[Stream], None],
        max_queue_wait_s: float,
    ) -> None:
        """`targets` and `drafts` are the workers by address; `on_end` gets every stream that ended or was refused."""
        self._clock, self._reservations = clock, reservations
        self._targets, self._drafts, self._link_to, self._on_end = targets, drafts, link_to, on_end
        self._router = Router(lambda _: None, chance, quarantine_s=3.0)
        self._slots = SlotQueue(MODEL, self._router, wait_max_s=max_queue_wait_s, weights={})
        self._poison, self._trials = PoisonRecord(), Trials()
        self._sessions: dict[str, _Session] = {}
        self._waiting: dict[PlacementRequest, _Session] = {}
        self.num_tokens = 0  # requests that arrived
        reservations.on_released.append(self._give_out)

    def take(self, stream: Stream) -> None:
        """Takes a new request."""
        request, arrived_s, is_plain = stream.request, stream.arrived_s, not self._drafts
        speculation = SpeculationSettings(enabled=not is_plain, is_plain=is_plain)
        sampling = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
        spec = GenerationSpec(
            request=GenerationInput(request_id=str(request.number), speculation=speculation),
            model=MODEL,
            prompt_token_ids=tuple(request.prompt),
            max_tokens=request.num_output_tokens,
            sampling=sampling,
            deadline_s=_FOREVER_S,
            served=_SERVED,
        )
        losses = SequenceLosses(
            spec,
            0,
            self._poison,
            self._trials,
            num_losses_max=_TARGET_ATTEMPTS_MAX,
            arrival_s=arrived_s,
        )
        machine = SequenceMachine(
            spec,
            0,
            arrival_s=arrived_s,
            output=stream.output,
            choice=TargetChoice(spec, self._router, lambda: self._reservations.snapshot, losses),
            losses=losses,
            controller=FallbackController(_POLICY, is_enabled=not is_plain),
            retries=RetryPolicy(_TARGET_ATTEMPTS_MAX, _FOREVER_S),
            ticket=Ticket(num_prompt_tokens=len(request.prompt)),
        )
        self._handle(_Session(str(request.number), stream, machine, sampling), Started())

    def on_target_actions(self, actions: list[Action]) -> None:
        """Handles a target's messages. Those about other replicas' sessions never arrive here."""
        for action in actions:
            session = self._sessions.get(getattr(action, "session_id", ""))
            if session is None:
                continue
            match action:
                case TokensCommitted():
                    self.num_tokens += len(action.token_ids)
                    self._handle(session, StepTaken(action))
                case SessionEnded():
                    self._handle(session, TargetEnded(action.reason, action.stop_token_id, action))
                case SessionRefused():
                    if (slot := self._leave(session)) is not None:
                        self._reservations.give_back(slot.target)
                    self._handle(session, TargetLeft(action.error))

    def on_draft_action(self, action: DraftAction) -> None:
        """Tries another draft worker: this one turned out to be full, or cannot follow the session any further."""
        session = self._sessions.get(getattr(action, "session_id", ""))
        if session is None or session.draft is None:
            return
        is_refusal = isinstance(action, AttachmentRefused) and action.attachment == session.num_attachments
        if is_refusal or (isinstance(action, AttachmentEnded) and not action.is_finished):
            self._let_go_of_draft(session)
            self._attach(session)

    # Shell of the state machine.

    def _handle(self, session: _Session, event: Event) -> None:
        machine = session.machine
        for action in machine.handle(event, self._clock.now_s):
            self._do(session, action)
        match machine.state:
            case SequenceState.QUEUED if session.waiting is None:
                self._queue(session)
            case SequenceState.WAITING:
                self._clock.at(self._clock.now_s + _WAIT_S, self._handle, session, WaitOver())
            case SequenceState.FINISHED | SequenceState.FAILED:
                session.stream.is_refused = machine.state is SequenceState.FAILED
                self._end(session)

    def _do(self, session: _Session, action: act.Action) -> None:
        match action:
            case act.OpenCall(slot):
                session.slot = slot
                self._sessions[session.session_id] = session
                prompt = session.stream.request.prompt
                start = StartSession(
                    session.session_id, prompt, len(prompt), session.sampling, session.machine.speculation, 0
                )  # fmt: skip
                self._tell_target(session, start)
            case act.ChangeSpeculation(changes):
                self._apply(session, changes)
            case act.ReleaseSlot(slot):
                self._release(slot)
            case act.Reject(error):
                raise AssertionError(error)

    def _queue(self, session: _Session) -> None:
        """Takes a slot, or queues for one."""
        stream, machine, now_s = session.stream, session.machine, self._clock.now_s
        request = PlacementRequest(
            model=MODEL,
            ticket=machine.ticket,
            rank=lambda: machine.choice.rank(self._clock.now_s),
            is_hopeless=machine.choice.is_hopeless,
            token=session.session_id,
            since_s=stream.arrived_s,
            deadline_s=machine.deadline_s,
            num_tokens=machine.spec.num_tokens_max,
            restrictions=frozenset,
        )
        if not self._slots and (slot := self._take_slot(self._slots.offer(request, now_s))) is not None:
            self._handle(session, SlotGranted(slot))
            return
        try:
            until_s = self._slots.push(request, now_s)
        except OutriderError as error:
            self._handle(session, SlotRefused(error))
            return
        session.waiting = request
        self._waiting[request] = session
        self._clock.at(until_s, self._give_up, request)

    def _give_up(self, request: PlacementRequest) -> None:
        session = self._waiting.pop(request, None)
        if session is not None:
            session.waiting = None
            error = self._slots.timeout_error(request, self._clock.now_s)
            self._slots.forget(request)
            self._handle(session, SlotRefused(error))

    def _give_out(self) -> None:
        """Gives slots to queued requests while there are any."""
        round_ = Round(self._slots)
        while (offer := round_.next(self._clock.now_s)) is not None:
            slot = self._take_slot(offer)
            if slot is None:
                round_.found_full(offer)
                continue
            session = self._waiting.pop(offer.request)
            session.waiting = None
            self._slots.forget(offer.request)
            self._handle(session, SlotGranted(slot))
            round_ = Round(self._slots)

    def _take_slot(self, offer: Offer) -> Slot | None:
        target = self._reservations.take(offer.asked, offer.limits)
        return self._slots.take(offer, target, self._clock.now_s)

    def _leave(self, session: _Session) -> Slot | None:
        """Detaches from the target and the draft worker. The slot's reservation is returned separately."""
        slot = session.slot
        if slot is not None:
            del self._sessions[session.session_id]
            self._detach(session)
            self._slots.leave(slot, self._clock.now_s)
            session.slot = None
        return slot

    def _release(self, slot: Slot) -> None:
        self._slots.leave(slot, self._clock.now_s)
        self._reservations.give_back(slot.target)

    def _end(self, session: _Session) -> None:
        slot = self._leave(session)
        self._on_end(session.stream)
        if slot is not None:
            self._reservations.give_back(slot.target)

    # Draft workers.

    def _apply(self, session: _Session, actions: Sequence[FallbackAction]) -> None:
        for action in actions:
            match action:
                case FallbackAction.ATTACH:
                    session.tried.clear()
                    self._attach(session)
                case FallbackAction.DETACH:
                    self._detach(session)
                case FallbackAction.START_ACCEPTING_HINTS | FallbackAction.STOP_ACCEPTING_HINTS:
                    self._tell_target(session, ChangeSpeculation(session.session_id, session.machine.speculation))

    def _attach(self, session: _Session) -> None:
        assert session.slot is not None
        stream, worker, target = session.stream, None, session.slot.target
        if len(session.tried) < DRAFT_ATTEMPTS_MAX:
            ranked = self._router.rank_drafts(
                self._reservations.snapshot,
                self._clock.now_s,
                num_known=session.machine.committed_len(),
                num_tokens=session.machine.spec.num_tokens_max,
                excluded=session.tried,
                target=target,
            )
            worker = self._reservations.take(ranked, [each.max_num_seqs for each in ranked])
        if worker is None:
            self._handle(session, DraftLost())
            return
        self._router.open_session(worker)
        session.tried.add(key_of(worker))
        session.draft = worker
        session.num_attachments += 1
        attach = AttachSession(
            session.session_id,
            session.num_attachments,
            target.address,
            session.machine.committed(),
            session.sampling,
            seed=0,
            num_prompt_tokens=len(stream.request.prompt),
        )
        self._link_to(worker.address).send(self._drafts[worker.address].take, [attach])

    def _detach(self, session: _Session) -> None:
        if session.draft is not None:
            detach = DetachSession(session.session_id, session.num_attachments)
            self._link_to(session.draft.address).send(self._drafts[session.draft.address].take, [detach])
            self._let_go_of_draft(session)

    def _let_go_of_draft(self, session: _Session) -> None:
        assert session.draft is not None
        self._router.close_session(session.draft)
        self._reservations.give_back(session.draft)
        session.draft = None

    def _tell_target(self, session: _Session, event: StartSession | ChangeSpeculation) -> None:
        assert session.slot is not None
        address = session.slot.target.address
        self._link_to(address).send(self._targets[address].take, [event])
