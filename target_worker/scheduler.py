"""What happens next on a target worker. Pure: events in, actions and steps out; the clock is an argument.

One session's life: `StartSession` → refused, or admitted and waiting → it gets a place → prefill in chunks → decode
steps with whatever hints have arrived → ended. There is one kind of step: every running session feeds the committed
tokens that have no KV yet, then some hints. Prefill is a step with many pending tokens, plain decoding a step without
hints, and what was preempted is prefilled again.

Hints may speak of a session before the coordinator does (both workers get the request at once); a bounded number
of such events is kept and replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.confidence import calibrations
from outrider.engine.chunk_cost import Chunk, ChunkCost
from outrider.engine.kv_cache import BlockAllocator, KVSequence
from outrider.engine.verdict import Verdict
from outrider.errors import DeadlineExceeded, InvalidRequest, NotFound, OutriderError
from outrider.grammar import GrammarViolation
from protos.outrider.v1 import target_pb2
from target_worker.admission import check_request
from target_worker.batch_listening import BatchListening
from target_worker.early_events import EarlyEvents
from target_worker.forecast import Forecast
from target_worker.limits import SchedulerLimits
from target_worker.lookup import LocalHints, RecentOutputs
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
from target_worker.pace import Pace
from target_worker.places import Places
from target_worker.session import Session, add_up_to_limit
from target_worker.speculation import allot
from target_worker.step_cost import StepCost, StepLine
from target_worker.step_items import deciding_item, prefill_item
from target_worker.waiting import HintWait

LOOK_EVERY_S = 0.05
"""At deadlines, at the most so often."""
CHUNK_SHARE = 0.9
"""Of the time that chunks of prompts may take beside running sessions: the rest is for what the estimate misses. With
all of it gaps rose by 1.02 chunks' time at the 99th percentile (`python -m benchmarks.long_prompts`)."""


@dataclass(frozen=True, slots=True)
class _Prices:
    """Milliseconds, at the present batch and context."""

    plain_ms: float  # for each token, had the step decoded plainly
    token_ms: float  # for each hint that is fed


class Scheduler:
    """All sessions of one worker. Every method returns at once; the caller runs the steps."""

    def __init__(self, limits: SchedulerLimits, allocator: BlockAllocator, vocab_size: int) -> None:
        self.limits = limits
        self.allocator = allocator
        self.vocab_size = vocab_size
        self.cost = StepCost()
        self._chunk_cost = ChunkCost()
        self._listening = BatchListening(may_rest=limits.may_rest)
        self._pace = Pace()
        self._wait = HintWait(limits)
        self._recent = (
            RecentOutputs(max_tokens=limits.max_lookup_tokens)
            if limits.has_lookup and limits.max_lookup_tokens
            else None
        )
        self._sessions: dict[str, Session] = {}
        self._num_started = 0
        self._places = Places(limits, allocator)
        self._forecast = Forecast(limits, self._places)
        self._look_at = -math.inf  # at deadlines
        self._early = EarlyEvents(limits)
        self._calibrations = calibrations()

    @property
    def num_running(self) -> int:
        return len(self._places.running)

    @property
    def num_waiting(self) -> int:
        return len(self._places.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks that sessions hold."""
        return self.allocator.usage

    @property
    def num_preemptions(self) -> int:
        """So far."""
        return self._places.num_preemptions

    @property
    def wait_ms(self) -> int:
        """How long a session that came now would wait for a place, as far as can be told. For any thread."""
        return round(1e3 * self._forecast.wait_s(self._ms_per_token))

    @property
    def speedup(self) -> float | None:
        """Of late steps over plain decoding; None until that is known."""
        return self._listening.speed

    def check_room(self) -> None:
        """Raises Overloaded when no other session may wait. For any thread; `handle` has the last word."""
        self._forecast.check_room(self._ms_per_token)

    @property
    def _ms_per_token(self) -> float:
        return 1.0 / self._pace.rate if self._pace.rate else 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event. Errors of a session are answered with an action, never raised."""
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

    # Admission.

    def _start(self, event: StartSession, now: float) -> list[Action]:
        try:
            if event.session_id in self._sessions:
                raise InvalidRequest("session_id", f"session {event.session_id} is already running here")
            check_request(event, self.limits, self.vocab_size)
            self._places.check_fits(event)
            self.check_room()
            session = Session.from_event(
                event,
                max_model_len=self.limits.max_model_len,
                end_of_sequence_ids=self.limits.end_of_sequence_ids,
                kv=KVSequence(self.allocator),
                number=self._num_started,
                local=self._local_hints(event),
                calibration=self._calibrations.get(event.sampling.decoding_mode),
                now=now,
            )
            self._forecast.check_in_time(session, now, self._best_step_ms)
        except OutriderError as error:
            return [SessionRefused(event.session_id, error)]
        except GrammarViolation as violation:
            refusal = InvalidRequest("token_ids", f"the committed tokens leave the grammar: {violation}")
            return [SessionRefused(event.session_id, refusal)]
        actions: list[Action] = [SessionAdmitted(session.session_id, session.decoding_mode)]
        self._num_started += 1
        self._sessions[session.session_id] = session
        self._places.add(session)
        self._forecast.come(session)
        if session.is_text_complete():  # it moved here after its last token and before its last word
            self._early.take(session.session_id)
            return [*actions, self._end(session, target_pb2.FINISH_REASON_STOP, now)]
        for early in self._early.take(session.session_id):
            actions += self.handle(early, now)
        return actions

    def _local_hints(self, event: StartSession) -> LocalHints | None:
        if not self.limits.has_lookup or event.speculation.is_plain:
            return None
        return LocalHints(self._recent, event.cache_salt)

    def _remove(self, session: Session, now: float) -> None:
        del self._sessions[session.session_id]
        self._places.remove(session)
        self._forecast.leave(session, now)
        session.kv.free()

    def _cancel(self, session_id: str, now: float) -> list[Action]:
        self._early.take(session_id)
        session = self._sessions.get(session_id)
        if session is None:
            return []
        self._remove(session, now)
        return session.publish(is_finished=True)

    @property
    def _best_step_ms(self) -> float:
        """Of a step of one token, 0.0 while unknown."""
        return self.cost.line().step_ms(1) if self.cost.coefficients is not None else 0.0

    def _end_the_late(self, now: float) -> list[Action]:
        """Ends those whose deadline has passed, and those who wait and cannot be in time."""
        actions: list[Action] = []
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            for session in list(self._sessions.values()):
                try:
                    self._forecast.check_in_time(session, now, self._best_step_ms)
                except DeadlineExceeded as error:
                    self._remove(session, now)
                    actions += session.publish(is_finished=True)
                    actions.append(SessionAborted(session.session_id, error))
        return actions

    # Hints and those who send them.

    def _change_speculation(self, event: ChangeSpeculation, now: float) -> list[Action]:
        session = self._sessions.get(event.session_id)
        if session is None:
            return [SessionRefused(event.session_id, NotFound(f"no session {event.session_id} here"))]
        if event.speculation.enabled and not session.may_listen:
            session.forget_the_draft(now, self._wait.usual_timing)
        session.speculation = event.speculation
        return session.publish()

    def _subscribe(self, event: SubscribeDraft, now: float) -> list[Action]:
        session = self._sessions.get(event.session_id)
        if session is None:
            self._early.keep(event.session_id, event, now)
            return []
        if not session.subscribers:
            session.forget_the_draft(now, self._wait.usual_timing)
            session.listening = self._listening.start(session, self.num_running)
        return session.subscribe(event.stream_id, event.known_len)

    def _unsubscribe(self, stream_id: StreamId, session_id: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            session.subscribers.pop(stream_id, None)
        self._early.forget_subscriber(stream_id, session_id)

    def _add_hints(self, event: HintsArrived, now: float) -> None:
        session = self._sessions.get(event.session_id)
        if session is None:
            self._early.keep(event.session_id, event, now)
        elif not session.is_listening:
            session.tree.num_stale += len(event.hints)
        else:
            add_up_to_limit(session.stats, "num_hint_bytes", event.num_bytes)
            session.tree.add(session.token_ids, event.attachment, event.base_len, event.hints)
            limit = self.limits.num_speculative_tokens
            path_len = len(session.tree.primary_path(limit))
            self._wait.on_hints(session, event.arrived_at, path_len, event.base_len)

    # Steps.

    def next_step(self, now: float) -> Step | WaitForHints | None:
        """What to run now: a step, nothing until some moment, or nothing until an event comes."""
        self._places.promote(now)
        if not self._places.running:
            self._pace.idle()
            return None
        for session in self._places.running.values():
            session.count_outcome()
        wait_until = self._wait_for_hints(now)
        if wait_until is not None:
            self._pace.wait()
            return WaitForHints(wait_until)
        self._wait.end()
        return self._compose()

    def _wait_for_hints(self, now: float) -> float | None:
        """The moment to wait for, or None to go on."""
        if any(session.num_pending > 1 for session in self._places.running.values()):
            return None  # prefill is work enough
        hoping = [
            session
            for session in self._places.running.values()
            if session.can_expect_hints() and not session.has_certain_hints()
        ]
        if not hoping:
            return None
        usual_rate = self._pace.rate * self.num_running
        return self._wait.until(now, hoping, self.num_running, self._line(), usual_rate)

    def _compose(self) -> Step:
        """Decoding sessions first, then prefill chunks, within `max_num_batched_tokens`.

        While somebody decodes all chunks of a step together take no longer than one that begins a prompt and uses up
        the tokens, by estimate a little less: so much later, at most, comes what a running session says next.
        """
        room = self._places.make_room()
        decoding = room.decoding
        budget = self.limits.max_num_batched_tokens - len(decoding)
        # Hints never take more than half of what is left while prompts wait, nor all of it.
        hint_budget = budget // 2 if room.prefilling else budget
        limit = self.limits.num_speculative_tokens
        paths = [session.hint_path(limit) for session in decoding]
        gains = [session.hint_gains() for session in decoding]
        num_fed = room.cut_hints(allot(gains, self._line(), max(hint_budget, 0)))
        items = []
        for session, path, fed in zip(decoding, paths, num_fed, strict=True):
            items.append(deciding_item(session, path, fed))
            budget -= fed
        budget_ms = CHUNK_SHARE * self._chunk_cost.ms(Chunk(0, max(budget, 0)))
        for session, most in room.prefilling:
            chunk = Chunk(session.kv.length, min(most, budget))
            if decoding:
                chunk = self._chunk_cost.cut(chunk, budget_ms, is_first=len(items) == len(decoding))
            if chunk.num_tokens <= 0:
                break
            items.append(prefill_item(session, chunk.num_tokens, limit))
            budget -= chunk.num_tokens
            budget_ms -= self._chunk_cost.ms(chunk)
        return Step(items)

    def finish_step(self, step: Step, result: StepResult, now: float) -> list[Action]:
        """Commits what a step decided and says who must hear of it."""
        actions: list[Action] = []
        # Both before anything is rolled back, or ends.
        num_context = step.num_context
        audience = self._listening.audience(self._places.running.values())
        busy_ms = self._pace.busy_ms(result.step_ms, now)
        prices = self._learn_cost(step, num_context, busy_ms) if step.only_decodes else None
        self._learn_chunk_cost(step, result.step_ms)
        num_committed = sum(len(verdict.token_ids) for verdict in result.verdicts if verdict is not None)
        if step.only_decodes:
            self._pace.commit(num_committed, len(step.items))
        scored = result.prompt_logprobs or [[]] * len(step.items)
        for item, verdict, logprobs in zip(step.items, result.verdicts, scored, strict=True):
            session = self._sessions.get(item.session_id)
            if session is None:
                continue
            if logprobs:
                first = session.kv.length - len(item.token_ids) + 1
                actions += session.score(first, logprobs)
            if verdict is not None:
                actions += self._commit(session, item, verdict, result.step_ms, prices, now)
            if self._places.shares_prefix(session):
                session.blocks.publish(session.token_ids, session.kv.length)
        if self._recent is not None:
            self._recent.read_some()
        if step.only_decodes and self._pace.whole_ms > 0.0:
            self._listening.observe(audience, step, num_committed, num_context, self._pace.whole_ms)
        for session in self._listening.turn(audience, self.num_running):
            actions += self._tell_of_turn(session, now)
        return actions + self._end_the_late(now)

    def _learn_cost(self, step: Step, num_context: int, step_ms: float) -> _Prices:
        """What this step's hints are to be measured by."""
        num_sessions = len(step.items)
        self.cost.observe(step.num_tokens, step_ms, num_context)
        line = self.cost.line(num_context)
        return _Prices(line.step_ms(num_sessions) / num_sessions, line.token_ms)

    def _learn_chunk_cost(self, step: Step, step_ms: float) -> None:
        chunks = [chunk for item in step.items if (chunk := item.chunk) is not None]
        if not chunks:
            return
        if self.cost.coefficients is not None:
            decoding = [item for item in step.items if item.chunk is None]
            line = self.cost.line(sum(item.kv.length for item in decoding))
            step_ms -= line.step_ms(sum(len(item.token_ids) for item in decoding))
        self._chunk_cost.observe(chunks, max(step_ms, 0.0))

    def _line(self) -> StepLine:
        """Cost of the next step over the number of tokens it feeds."""
        return self.cost.line(sum(session.committed_len for session in self._places.running.values()))

    def _tell_of_turn(self, session: Session, now: float) -> list[Action]:
        """Tells the draft workers of a session that it rests from now on, or listens again."""
        if session.session_id not in self._sessions:
            return []
        if session.is_listening:
            session.timing = session.timing.fresh(now)
        return session.publish()

    def _commit(
        self,
        session: Session,
        item: StepItem,
        verdict: Verdict,
        step_ms: float,
        prices: _Prices | None,
        now: float,
    ) -> list[Action]:
        actions: list[Action] = []
        outcome = session.commit(verdict, item.hints, item.num_fed_hints)
        if prices is not None:
            cost = item.num_fed_hints * prices.token_ms / prices.plain_ms
            self._listening.judge(session, outcome.num_accepted - cost)
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
                    is_resting=session.may_listen and session.listening.is_resting,
                )
            )
        actions += session.publish(
            is_finished=outcome.reason is not None,
            num_tried=outcome.num_tried,
            num_held=outcome.num_held,
        )
        if outcome.reason is not None:
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
