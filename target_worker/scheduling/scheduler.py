"""Scheduler of one target worker: chooses the sequences and hints of the next step. Pure: events in, actions and steps
out; the clock is an argument.

A session's life: `StartSession` → refused, or admitted and waiting → gets a batch slot → prefill in chunks → decode
steps with whatever hints have arrived → ended. There is one kind of step: every running session feeds the committed
tokens that have no KV yet, then some hints. Prefill is a step with many pending tokens, plain decoding a step without
hints, and a preempted session is prefilled again.

Hints may arrive before the coordinator has started their session (both workers get the request at once); a bounded
number of such events is kept and replayed.
"""

from __future__ import annotations

import math

from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.prompt_queue import PromptQueue
from outrider.engine.sampling.verdict import Verdict
from outrider.errors import DeadlineExceeded, InvalidRequest, NotFound, OutriderError, detached
from outrider.hints.confidence import branch_calibrations, calibrations
from outrider.hints.hint_wait import Expecting, HintWait
from outrider.hints.pace import Pace
from outrider.hints.step_cost import StepCost, StepLine
from protos.outrider.v1 import target_pb2
from target_worker.admission import check_request
from target_worker.core_sharing import CoreSharing
from target_worker.hints.lookup import RecentOutputs
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    CancelSession,
    ChangeSpeculation,
    CloseStream,
    Event,
    HintsArrived,
    SessionAborted,
    SessionAdmitted,
    SessionEnded,
    SessionRefused,
    StartSession,
    Step,
    StepItem,
    StepResult,
    StreamId,
    SubscribeDraft,
    TokensCommitted,
    UnsubscribeDraft,
    WaitForHints,
)
from target_worker.scheduling.background_turns import BackgroundTurns
from target_worker.scheduling.batch_intake import BatchIntake
from target_worker.scheduling.batch_slots import BatchSlots
from target_worker.scheduling.early_events import EarlyEvents
from target_worker.scheduling.forecast import Forecast
from target_worker.scheduling.head_turns import DraftsLocally, HeadTurns
from target_worker.scheduling.session import Session
from target_worker.scheduling.session_sources import local_sources, take_hints
from target_worker.scheduling.step_composition import compose, learn_chunks, learn_cost, wait_left_ms

LOOK_EVERY_S = 0.05
"""Least time between two checks of the deadlines."""


class Scheduler:
    """Schedules all sessions of one worker. Every method returns at once; the caller runs the steps."""

    def __init__(
        self, limits: SchedulerLimits, allocator: BlockAllocator, vocab_size: int,
        head: DraftsLocally | None = None, cores: CoreSharing | None = None,
    ) -> None:  # fmt: skip
        """head: a draft head that runs beside the model; called before steps, and so the one part that is not pure.
        cores: chooses those of each step; None where no draft worker's can be shared."""
        self.limits = limits
        self.allocator = allocator
        self.vocab_size = vocab_size
        self._cores = cores
        self.cost = StepCost() if cores is None else cores.cost  # of steps such as the one that comes
        self._prompts = PromptQueue()
        self._intake = BatchIntake(may_pause=limits.may_pause)
        self._pace = Pace()
        self._wait = HintWait(limits.hint_wait_ms_max, limits.wait_for_num_hints)
        self._turns = BackgroundTurns(limits.num_local_tokens_max)
        num_recent = limits.max_lookup_tokens if limits.has_lookup else 0
        self._recent = RecentOutputs(max_tokens=num_recent) if num_recent else None
        self._sessions: dict[str, Session] = {}
        self._num_started = 0
        self._slots = BatchSlots(limits, allocator)
        self._forecast = Forecast(limits, self._slots)
        self._next_deadline_check_s = -math.inf
        self._early = EarlyEvents(limits)
        self._calibrations = calibrations()
        self._branch_calibrations = branch_calibrations() if limits.verifies_branches else {}
        self._heads = HeadTurns(head, may_pause=limits.may_pause)
        self._memory_calibrations = calibrations()

    @property
    def num_running(self) -> int:
        return len(self._slots.running)

    @property
    def num_waiting(self) -> int:
        return len(self._slots.waiting)

    @property
    def num_background(self) -> int:
        return self._slots.num_background

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks that sessions hold."""
        return self.allocator.usage

    @property
    def num_preemptions(self) -> int:
        """Total number of preemptions."""
        return self._slots.num_preemptions

    @property
    def wait_ms(self) -> int:
        """Expected wait of a session that came now, milliseconds. Safe to call from any thread."""
        return round(1e3 * self._forecast.wait_s(self._pace.ms_per_token))

    @property
    def speedup(self) -> float | None:
        """Recent speed relative to plain decoding; None while unknown."""
        return self._intake.speed

    def check_room(self, *, is_background: bool = False) -> None:
        """Raises Overloaded when no other session may wait. Safe to call from any thread; `handle` decides."""
        self._forecast.check_room(self._pace.ms_per_token, is_background=is_background)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handles one event. Errors of a session become actions and are never raised."""
        match event:
            case StartSession():
                return self._start(event, now)
            case CancelSession():
                return self._cancel(event.session_id, now)
            case ChangeSpeculation():
                return self._change_speculation(event, now)
            case SubscribeDraft():
                return self._subscribe(event, now)
            case UnsubscribeDraft():
                self._unsubscribe(event.stream_id, event.session_id)
            case CloseStream():
                for session in self._sessions.values():
                    session.subscribers.pop(event.stream_id, None)
                self._early.forget_subscriber(event.stream_id)
            case HintsArrived():
                self._add_hints(event, now)
        return []

    def _start(self, event: StartSession, now: float) -> list[Action]:
        try:
            if event.session_id in self._sessions:
                raise InvalidRequest("session_id", f"session {event.session_id} is already running here")
            check_request(event, self.limits.max_model_len, self.vocab_size)
            self._slots.check_fits(event)
            self.check_room(is_background=event.is_background)
            head = self._heads.hints(event)
            session = Session.from_event(
                event,
                self.limits,
                kv=KVSequence(self.allocator),
                number=self._num_started,
                local=local_sources(event, self.limits, self._recent, head),
                head=head,
                calibration=self._calibrations.get(event.sampling.decoding_mode),
                of_branches=self._branch_calibrations.get(event.sampling.decoding_mode),
                now=now,
            )
            self._forecast.check_in_time(session, now, self._best_step_ms)
            is_complete = session.is_output_complete()
        except OutriderError as error:
            return [SessionRefused(event.session_id, detached(error))]
        actions: list[Action] = [SessionAdmitted(session.session_id, session.decoding_mode)]
        self._num_started += 1
        self._sessions[session.session_id] = session
        self._slots.add(session)
        self._forecast.come(session)
        if is_complete:  # a replay of all tokens: only its end was missing
            self._early.take(session.session_id)
            return [*actions, self._end(session, target_pb2.FINISH_REASON_STOP, now)]
        for early in self._early.take(session.session_id):
            actions += self.handle(early, now)
        return actions

    def _remove(self, session: Session, now: float) -> None:
        del self._sessions[session.session_id]
        self._slots.remove(session)
        self._forecast.leave(session, now)
        session.kv.free()
        if session.head is not None:
            session.head.forget()

    def _cancel(self, session_id: str, now: float) -> list[Action]:
        self._early.take(session_id)
        session = self._sessions.get(session_id)
        if session is None:
            return []
        self._remove(session, now)
        return session.publish(is_finished=True)

    @property
    def _best_step_ms(self) -> float:
        """Time of a step of one token; 0.0 while unknown."""
        return self.cost.line().step_ms(1) if self.cost.coefficients is not None else 0.0

    def _end_overdue(self, now: float) -> list[Action]:
        """Ends sessions whose deadline has passed, and waiting ones that cannot meet theirs."""
        actions: list[Action] = []
        if now >= self._next_deadline_check_s:
            self._next_deadline_check_s = now + LOOK_EVERY_S
            for session in list(self._sessions.values()):
                try:
                    self._forecast.check_in_time(session, now, self._best_step_ms)
                except DeadlineExceeded as error:
                    self._remove(session, now)
                    actions += session.publish(is_finished=True)
                    actions.append(SessionAborted(session.session_id, detached(error)))
        return actions

    def _change_speculation(self, event: ChangeSpeculation, now: float) -> list[Action]:
        session = self._sessions.get(event.session_id)
        if session is None:
            return [SessionRefused(event.session_id, NotFound(f"no session {event.session_id} here"))]
        if event.speculation.enabled and not session.wants_hints:
            session.reset_draft_statistics(now, self._wait.usual_timing)
        session.speculation = event.speculation
        return session.publish()

    def _subscribe(self, event: SubscribeDraft, now: float) -> list[Action]:
        session = self._sessions.get(event.session_id)
        if session is None:
            self._early.keep(event.session_id, event, now)
            return []
        if not event.is_memory and not session.is_drafted:
            session.reset_draft_statistics(now, self._wait.usual_timing)
            session.intake = self._intake.start(session, len(self._active()))
        return session.subscribe(event)

    def _unsubscribe(self, stream_id: StreamId, session_id: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            session.subscribers.pop(stream_id, None)
        self._early.forget_subscriber(stream_id, session_id)

    def _add_hints(self, event: HintsArrived, now: float) -> None:
        session = self._sessions.get(event.session_id)
        if session is None:
            self._early.keep(event.session_id, event, now)
        elif take_hints(session, event, self._memory_calibrations):
            path_len = len(session.tree.primary_path(self.limits.num_speculative_tokens))
            self._wait.on_hints(session.timing, event.arrived_at, path_len, event.base_len)

    def next_step(self, now: float) -> Step | WaitForHints | None:
        """Returns what to run now: a step, a wait until some moment, or None to wait for an event. Where it pays, the
        draft head runs before a step."""
        self._slots.promote(now)
        if not self._slots.running:
            self._pace.idle()
            return None
        for session in self._slots.running.values():
            session.count_outcome()
        active = self._turns.hold(self._slots.running.values(), self.cost)
        if self._cores is not None:
            self.cost = self._cores.choose(active)
        line = self.cost.line(sum(session.committed_len for session in active))
        if (wait_until := self._wait_for_hints(active, line, now)) is not None:
            self._pace.wait()
            return WaitForHints(wait_until)
        self._wait.end()
        if self._heads.draft(active, line, self.limits, self._pace.rate * len(active)):
            self._pace.wait()  # its time is no part of a step's
        self._turns.begin_step()
        room = self._slots.make_room().without(self._turns.left_out)
        return compose(room, self.limits, line, self._prompts, now)

    def _active(self) -> list[Session]:
        return self._turns.active(self._slots.running.values())

    def _wait_for_hints(self, active: list[Session], line: StepLine, now: float) -> float | None:
        """Returns the moment to wait for, or None to run a step now."""
        if any(session.num_pending > 1 for session in active):
            return None  # prefill keeps the worker busy
        expecting = [
            Expecting(session.timing, session.acceptance, session.hint_limit(self.limits.num_speculative_tokens))
            for session in active
            if session.can_expect_hints() and not session.has_certain_hints()
        ]
        if not expecting:
            return None
        most_s = wait_left_ms(active, line, self.limits, now) / 1e3
        return self._wait.until(now, expecting, len(active), line, self._pace.rate * len(active), most_s)

    def finish_step(self, step: Step, result: StepResult, now: float) -> list[Action]:
        """Commits what a step decided; returns the actions that report it."""
        actions: list[Action] = []
        # Read before commits change sessions and their KV lengths.
        num_context = step.num_context
        hinted = self._intake.hinted(self._active())
        busy_ms = self._pace.busy_ms(result.step_ms, now)
        hint_price = learn_cost(self.cost, step, num_context, busy_ms) if step.only_decodes else None
        learn_chunks(self._prompts.cost, self.cost, step, result.step_ms)
        num_committed = sum(len(verdict.token_ids) for verdict in result.verdicts if verdict is not None)
        if step.only_decodes:
            self._pace.commit(num_committed, len(step.items))
        scored = result.prompt_logprobs or [[]] * len(step.items)
        for item, verdict, logprobs in zip(step.items, result.verdicts, scored, strict=True):
            if (session := self._sessions.get(item.session_id)) is None:
                continue
            if logprobs:
                first = session.kv.length - len(item.token_ids) + 1
                actions += session.score(first, logprobs)
            if verdict is not None:
                actions += self._commit(session, item, verdict, result.step_ms, hint_price, now)
            if self._slots.shares_prefix(session):
                session.blocks.publish(session.token_ids, session.kv.length)
        if self._recent is not None:
            self._recent.read_some()
        if step.only_decodes and self._pace.whole_ms > 0.0 and not self._turns.is_turn:
            whole_ms = self._pace.whole_ms
            self._intake.observe(hinted, step, num_committed, num_context, whole_ms)
            if self._cores is not None:
                self._cores.observe(len(step.items), num_committed, num_context, whole_ms, hinted.shares)
            self._heads.observe(len(step.items), step.num_tokens, num_committed, num_context, whole_ms)
        for session in self._intake.update(hinted, len(self._active())):
            if session.session_id in self._sessions:  # its draft workers learn that it is paused or resumed
                if session.accepts_hints:
                    session.timing = session.timing.fresh(now)
                actions += session.publish()
        return actions + self._end_overdue(now)

    def _commit(
        self, session: Session, item: StepItem, verdict: Verdict, step_ms: float, hint_price: float | None, now: float
    ) -> list[Action]:
        actions: list[Action] = []
        outcome = session.commit(verdict, item)
        if hint_price is not None and (outcome.num_draft_tokens or not item.num_fed_hints):
            self._intake.judge(session, outcome.num_accepted - outcome.num_draft_tokens * hint_price)
        if session.first_token_at is None:
            session.first_token_at = now
        if outcome.token_ids:
            actions.append(
                TokensCommitted(
                    session.session_id,
                    outcome.token_ids,
                    outcome.origins,
                    outcome.num_draft_tokens,
                    outcome.num_accepted,
                    step_ms,
                    outcome.logprobs,
                    num_prediction_tokens=outcome.num_prediction_tokens,
                    num_accepted_prediction_tokens=outcome.num_accepted_prediction_tokens,
                    num_branches=len(item.branches),
                    num_accepted_branches=outcome.num_accepted_branches,
                    sources=outcome.sources,
                    is_resting=session.wants_hints and session.intake.is_paused,
                )
            )
        refusal = session.cost_refusal(outcome.reason)
        actions += session.publish(
            is_finished=outcome.reason is not None or refusal is not None,
            num_verified=outcome.num_verified,
            num_matched=outcome.num_matched,
        )
        if refusal is not None:
            self._remove(session, now)
            actions.append(SessionAborted(session.session_id, refusal))
        elif outcome.reason is not None:
            actions.append(self._end(session, outcome.reason, now, outcome.stop_token_id))
        elif session.can_expect_hints():
            path = session.tree.primary_path(self.limits.num_speculative_tokens)
            session.timing.on_commit(now, len(path), session.committed_len)
        return actions

    def _end(
        self,
        session: Session,
        reason: target_pb2.FinishReason,
        now: float,
        stop_token_id: int | None = None,
    ) -> SessionEnded:
        self._remove(session, now)
        if self._recent is not None and not session.speculation.is_plain:
            self._recent.add(session.token_ids[session.num_prompt_tokens :], session.blocks.salt)
        first_step_at = session.first_step_at or session.arrived_at
        return SessionEnded(
            session.session_id,
            reason,
            stop_token_id,
            session.num_prompt_tokens,
            session.num_output_tokens,
            session.num_cached_tokens,
            session.final_stats(),
            queue_ms=(first_step_at - session.arrived_at) * 1e3,
            prefill_ms=((session.first_token_at or first_step_at) - first_step_at) * 1e3,
            num_preemptions=session.num_preemptions,
        )
