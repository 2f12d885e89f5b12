"""The target worker's gRPC service for coordinators: calls become events for the scheduler, its actions messages.

Everything here runs on the event loop; the scheduler and the model run on a thread of their own (`ModelThread`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

from outrider.errors import AnotherLife, InvalidRequest, NotFound, OutriderError, Overloaded, WorkerLeaves
from outrider.grammar import GrammarCompiler, GrammarState
from outrider.hint_service.draft_streams import DraftStreams
from outrider.hint_service.session_names import session_id_of
from outrider.hints.hint_source import SOURCE_NAMES
from outrider.observability.telemetry import TargetMetrics
from outrider.observability.tracing import OFF, Tracing
from outrider.sampling_params import GrammarSpec, SpeculationSettings
from outrider.worker.rpc import abort
from outrider.worker.worker_servicer import Context, WorkerServicer
from protos.outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_worker.messages import (
    Action,
    CancelSession,
    ChangeSpeculation,
    CommitPublished,
    Event,
    SessionAborted,
    SessionEnded,
    SessionRefused,
    StartSession,
    TokensCommitted,
)
from target_worker.scheduling.output_grammar import read_committed
from target_worker.scheduling.session_statistics import add_up_to_limit
from target_worker.serving.caller_queue import CallerQueue, Reminder
from target_worker.serving.generate_messages import event_message, parse_generate, show

logger = logging.getLogger(__name__)

WAITING_STALL_MAX_S = 5.0
STALLED_S_MAX = 3600.0  # most that `GetInfo` reports: 32 bits of milliseconds
WAITING_EVERY_S = 1.0  # interval of signs of life to a waiting caller


class TargetServicer(WorkerServicer[Event, Action], target_pb2_grpc.TargetServicer):
    """Serves outrider.v1.Target; its `hints` serve outrider.v1.Hints."""

    def __init__(
        self,
        info: common_pb2.WorkerInfo,
        metrics: TargetMetrics,
        grammars: GrammarCompiler | None,
        check_room: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        tracing: Tracing = OFF,
    ) -> None:
        """`grammars`: None where the engine compiles them itself. `check_room` raises Overloaded, on the event loop,
        when no other session could wait; the scheduler decides. `now` is the scheduler's clock, seconds."""
        super().__init__(info)
        self.hints = DraftStreams(self._submit, metrics, info.vocab_size, now, self._has_room)
        self._metrics = metrics
        self._grammars = grammars
        self._check_room = check_room
        self._now = now
        self._callers: dict[str, CallerQueue] = {}  # by the session's name
        self._names: dict[str, str] = {}  # by its id
        self._trial: target_pb2.GenerateRequest | None = None  # the call that runs as the one trial
        self._num_trial_tokens = 0  # that it has to generate before it is no trial any more
        self._tracing = tracing
        self.num_compiling = 0  # sessions whose grammar is being compiled, not yet submitted

    def end_calls(self) -> None:
        """Ends the calls that have not finished within the grace period of a drain, with an error that says so."""
        for name, caller in self._callers.items():
            caller.put(SessionAborted(name, WorkerLeaves("this worker is shutting down; its grace period is over")))

    def dispatch(self, actions: list[Action]) -> None:
        """Carries out the scheduler's actions, on the event loop."""
        for action in actions:
            caller = self._callers.get(action.session_id)
            if isinstance(action, CommitPublished):
                num_bytes = self.hints.publish(action)
                if caller is not None:
                    caller.num_commit_bytes += num_bytes
                continue
            if isinstance(action, SessionRefused) and isinstance(action.error, NotFound):
                continue  # its session has ended; another one may have its id by now
            self._count(action)
            if caller is not None and not caller.put(action):
                logger.warning("session %s aborted: caller does not read", session_id_of(action.session_id))
                self._submit(CancelSession(action.session_id), is_release=True)

    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: Context) -> common_pb2.WorkerInfo:
        info = common_pb2.WorkerInfo()
        info.CopyFrom(self.info)
        info.stalled_ms = round(min(self._stalled_s(), STALLED_S_MAX) * 1e3)
        return info

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[target_pb2.GenerateEvent]:
        try:
            self._check_open(request)
            event = parse_generate(request, self._deadline_at(request, context))
            self._begin_trial(request)  # before its grammar is compiled, which may also crash a worker
            # Before anything in the request could hang this worker: a coordinator blames a request only for
            # workers that were well when it arrived.
            if self._stalled_s() < WAITING_STALL_MAX_S:
                yield target_pb2.GenerateEvent(waiting=target_pb2.SessionWaiting())
            if event.sampling.grammar is not None and self._grammars is not None:
                self._check_room()  # refuse before any work
                async with aclosing(self._compile(event, event.sampling.grammar)) as compiling:
                    async for compiled in compiling:
                        if isinstance(compiled, StartSession):
                            event = compiled
                        else:
                            yield compiled
            # After the last await, so that of two calls with one id the second finds the first.
            if request.session_id in self._names:
                raise InvalidRequest("session_id", f"session {request.session_id} is already running here")
        except BaseException as error:
            self._end_trial(request)
            if not isinstance(error, OutriderError):
                raise
            await abort(context, error)
            return
        caller = self._callers[event.session_id] = CallerQueue()
        self._names[request.session_id] = event.session_id
        has_ended = False
        # Not while the model is stuck, even if this loop is not: the caller should try elsewhere.
        reminder = Reminder(caller, WAITING_EVERY_S, lambda: self._stalled_s() < WAITING_STALL_MAX_S)
        try:
            attributes = {"outrider.session_id": request.session_id}
            with self._tracing.span("target.generate", self._tracing.parent_of(context), attributes) as span:
                self._submit(event)
                while not has_ended:
                    action = await caller.get()
                    if action is None:
                        yield target_pb2.GenerateEvent(waiting=target_pb2.SessionWaiting())
                        continue
                    if isinstance(action, SessionRefused | SessionAborted):
                        has_ended = True
                        raise action.error
                    if isinstance(action, SessionEnded):
                        has_ended = True
                        add_up_to_limit(action.stats, "num_hint_bytes", caller.num_commit_bytes)
                    if isinstance(action, TokensCommitted):
                        self._count_trial(request, len(action.token_ids))
                    show(span, action)
                    yield event_message(action)
        except OutriderError as error:
            await abort(context, error)
        finally:
            reminder.stop()
            self._end_trial(request)
            del self._callers[event.session_id]
            del self._names[request.session_id]
            if not has_ended:
                self._submit(CancelSession(event.session_id), is_release=True)

    def _check_open(self, request: target_pb2.GenerateRequest) -> None:
        """Raises the error with which this worker, as it is, refuses any request of its kind."""
        if self._is_draining:
            raise WorkerLeaves("this worker is draining")
        if request.incarnation and request.incarnation != self.info.incarnation:
            # The registry record is older than this process, whose weights may differ.
            raise AnotherLife("the worker that this request is for is gone; another one answers here")

    def _begin_trial(self, request: target_pb2.GenerateRequest) -> None:
        if request.trial_tokens:
            if self._trial is not None:
                # Of any coordinator: if the worker is lost now, the request on trial is the cause.
                raise Overloaded("another request that workers crashed on is on trial here", 1.0)
            self._trial, self._num_trial_tokens = request, request.trial_tokens

    def _count_trial(self, request: target_pb2.GenerateRequest, num_tokens: int) -> None:
        if self._trial is request:
            self._num_trial_tokens -= num_tokens
            if self._num_trial_tokens <= 0:
                self._trial = None

    def _end_trial(self, request: target_pb2.GenerateRequest) -> None:
        if self._trial is request:
            self._trial = None

    def _deadline_at(self, request: target_pb2.GenerateRequest, context: Context) -> float:
        """The earlier of the request's and the call's deadline, on our clock, seconds."""
        left_s = [] if not request.deadline_ms else [request.deadline_ms / 1e3]
        if (of_call_s := context.time_remaining()) is not None:
            left_s.append(of_call_s)
        return self._now() + min(left_s, default=math.inf)

    def _stalled_s(self) -> float:
        assert self._thread is not None
        return self._thread.stalled_s()

    async def _compile(
        self, event: StartSession, grammar: GrammarSpec
    ) -> AsyncGenerator[target_pb2.GenerateEvent | StartSession]:
        """Yields a sign of life once a second while the grammar is compiled, so that the worker does not seem dead.
        Last comes the session with its grammar, which has consumed the committed output."""
        compiling = asyncio.create_task(self._grammar_of(event, grammar))
        self.num_compiling += 1
        try:
            while not (await asyncio.wait([compiling], timeout=WAITING_EVERY_S))[0]:
                yield target_pb2.GenerateEvent(waiting=target_pb2.SessionWaiting(is_compiling=True))
            yield replace(event, grammar=compiling.result())
        finally:
            self.num_compiling -= 1
            compiling.cancel()

    async def _grammar_of(self, event: StartSession, grammar: GrammarSpec) -> GrammarState:
        assert self._grammars is not None
        state = await self._grammars.compile_async(grammar, event.owner)
        if committed := event.token_ids[event.num_prompt_tokens :]:
            # Possibly thousands of tokens: neither on this loop nor on the model's thread.
            await asyncio.to_thread(read_committed, state, committed)
        return state

    async def SetSpeculation(
        self, request: target_pb2.SetSpeculationRequest, context: Context
    ) -> target_pb2.SetSpeculationResponse:
        try:
            name = self._names.get(request.session_id)
            if name is None:
                raise NotFound(f"no session {request.session_id} here")
            self._submit(ChangeSpeculation(name, SpeculationSettings.from_proto(request.speculation)))
        except OutriderError as error:
            await abort(context, error)
        return target_pb2.SetSpeculationResponse()

    def _count(self, action: Action) -> None:
        if isinstance(action, TokensCommitted):
            self._metrics.generation_tokens.inc(len(action.token_ids))
            if action.num_prediction_tokens:
                num_accepted = action.num_accepted_prediction_tokens
                self._metrics.num_accepted_prediction_tokens.inc(num_accepted)
                self._metrics.num_rejected_prediction_tokens.inc(action.num_prediction_tokens - num_accepted)
            for source, *counts in action.sources:
                self._metrics.observe_source(SOURCE_NAMES[source], *counts)
            if action.num_draft_tokens:
                self._metrics.num_drafts.inc()
                self._metrics.num_draft_tokens.inc(action.num_draft_tokens)
                self._metrics.num_accepted_tokens.inc(action.num_accepted_draft_tokens)
                self._metrics.observe_accepted(action.num_accepted_draft_tokens)
        elif isinstance(action, SessionEnded):
            if action.stop_token_id is not None:  # generated, although it is not part of the output
                self._metrics.generation_tokens.inc()
            self._metrics.prompt_tokens.inc(action.num_prompt_tokens)
            self._metrics.num_cached_tokens.inc(action.num_cached_tokens)
            self._metrics.num_forced_tokens.inc(action.stats.num_forced_tokens)
            self._metrics.num_lookup_tokens.inc(action.stats.num_lookup_tokens)
            self._metrics.num_memory_tokens.inc(action.stats.num_memory_tokens)
            self._metrics.num_stale_hints.inc(action.stats.num_stale_hints)
            self._metrics.num_late_hints.inc(action.stats.num_late_hints)
            self._metrics.num_outcomes.inc(action.stats.num_outcomes)
            self._metrics.num_predicted_outcomes.inc(action.stats.num_predicted_outcomes)
            self._metrics.num_ready_outcomes.inc(action.stats.num_ready_outcomes)
