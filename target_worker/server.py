"""The target worker's gRPC face: callers' streams of tokens, draft workers' streams of hints.

Everything here runs on the event loop; the scheduler and the model run on a thread of their own (`ModelThread`).
Calls become events for the scheduler, its actions become messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import grpc
import grpc.aio

from outrider.engine.prefix_cache import check_cache_salt
from outrider.errors import AnotherLife, InvalidRequest, NotFound, OutriderError, Overloaded, WorkerLeaves
from outrider.grammar import GrammarCompiler, GrammarState, GrammarViolation
from outrider.hint_wire import HintDecoder
from outrider.loop_share import LoopShare
from outrider.model_thread import ModelThread
from outrider.sampling_params import GrammarSpec, SamplingParams, SpeculationSettings
from outrider.telemetry import TargetMetrics
from outrider.tenants import check_owner
from outrider.tracing import OFF, Span, Tracing
from outrider.worker_process import abort
from protos.outrider.v1 import common_pb2, hints_pb2, hints_pb2_grpc, target_pb2, target_pb2_grpc
from target_worker.caller_queue import CallerQueue, Reminder
from target_worker.messages import (
    Action,
    CancelSession,
    ChangeSpeculation,
    CloseStream,
    CommitPublished,
    Event,
    HintsArrived,
    PromptScored,
    SessionAborted,
    SessionAdmitted,
    SessionEnded,
    SessionRefused,
    StartSession,
    StreamId,
    SubscribeDraft,
    TokensCommitted,
    UnsubscribeDraft,
)
from target_worker.session import add_up_to_limit

logger = logging.getLogger(__name__)

MAX_SESSION_ID = 64  # characters
MAX_HINT_TOKEN = 64  # characters
MAX_CHANNEL = 65535
MAX_FRAME_MESSAGES = 16384
MAX_FRAME_NODES = 16384  # twice as many as a draft worker gathers
MAX_COMMITS_PER_FRAME = 256
WAITING_STALL_MAX_S = 5.0
STALLED_S_MAX = 3600.0  # the most that `GetInfo` tells: 32 bits of milliseconds
WAITING_EVERY_S = 1.0  # how often a caller who waits hears that somebody is there
NEWCOMER_S = 1.0  # how long a draft worker's stream shares its part of the loop with all that are as young
MAX_PENDING_COMMITS = 4096  # per draft worker's stream; one that does not read them is cut off

Context = grpc.aio.ServicerContext[Any, Any]


class DraftStream:
    """Commits on their way to one draft worker, gathered into frames while it is slow to take them."""

    def __init__(self) -> None:
        self.channels: dict[str, int] = {}  # session id -> its number on this stream
        self._pending: list[hints_pb2.SessionCommit] = []
        self._pong = 0
        self._wake = asyncio.Event()
        self.is_overrun = False

    def put(self, commit: hints_pb2.SessionCommit) -> None:
        if len(self._pending) >= MAX_PENDING_COMMITS:
            self.is_overrun = True
        else:
            self._pending.append(commit)
        self._wake.set()

    def answer_ping(self, ping: int) -> None:
        """At once: the draft worker wants to know how far away it is."""
        self._pong = ping
        self._wake.set()

    def close(self) -> None:
        """Wakes the writer once more, so that it can see that the stream has ended."""
        self._wake.set()

    async def next_frame(self) -> hints_pb2.CommitFrame:
        await self._wake.wait()
        self._wake.clear()
        frame = hints_pb2.CommitFrame(commits=self._pending[:MAX_COMMITS_PER_FRAME], pong=self._pong)
        del self._pending[:MAX_COMMITS_PER_FRAME]
        self._pong = 0
        if self._pending:
            self._wake.set()
        return frame


class TargetServicer(target_pb2_grpc.TargetServicer, hints_pb2_grpc.HintsServicer):
    """Serves outrider.v1.Target and outrider.v1.Hints."""

    def __init__(
        self,
        info: common_pb2.WorkerInfo,
        metrics: TargetMetrics,
        grammars: GrammarCompiler,
        check_room: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        tracing: Tracing = OFF,
    ) -> None:
        """`check_room` raises Overloaded, on the event loop, when no other session could wait; the scheduler has the
        last word. `now` is the clock that the scheduler is told, seconds."""
        self._info = info
        self._metrics = metrics
        self._grammars = grammars
        self._check_room = check_room
        self._now = now
        self._callers: dict[str, CallerQueue] = {}  # by the session's name
        self._names: dict[str, str] = {}  # by its id
        self._num_commit_bytes: Counter[str] = Counter()  # by session
        self._streams: dict[StreamId, DraftStream] = {}
        self._next_stream_id = 1
        self._newcomers = LoopShare()
        self._thread: ModelThread[Event, Action] | None = None
        self._is_draining = False
        self._trial: target_pb2.GenerateRequest | None = None  # the call that is tried alone
        self._tracing = tracing
        self.num_compiling = 0  # sessions that wait for their grammar, before the scheduler hears of them

    def bind(self, thread: ModelThread[Event, Action]) -> None:
        """Must be called before the server starts."""
        self._thread = thread

    def start_draining(self) -> None:
        self._is_draining = True

    def end_calls(self) -> None:
        """Ends what has not finished within the grace of a drain, and says why: nothing was lost to it."""
        for name, caller in self._callers.items():
            caller.put(
                SessionAborted(name, WorkerLeaves("this worker was told to end, and its grace is over"))
            )

    def dispatch(self, actions: list[Action]) -> None:
        """Takes the scheduler's actions, on the event loop."""
        for action in actions:
            if isinstance(action, CommitPublished):
                self._publish(action)
                continue
            if isinstance(action, SessionRefused) and isinstance(action.error, NotFound):
                continue  # a change that met its session's end; who has its id by now is not concerned
            self._count(action)
            caller = self._callers.get(action.session_id)
            if caller is not None and not caller.put(action):
                logger.warning("session %s ends: its caller does not read", session_id_of(action.session_id))
                self._submit(CancelSession(action.session_id), is_release=True)

    def _publish(self, action: CommitPublished) -> None:
        stream = self._streams.get(action.stream_id)
        session_id = session_id_of(action.session_id)
        channel = stream.channels.get(session_id) if stream is not None else None
        if stream is None or channel is None:
            return
        message = _commit_message(action, channel)
        stream.put(message)
        num_bytes = message.ByteSize()
        self._metrics.num_commit_bytes.inc(num_bytes)
        if action.session_id in self._callers:
            self._num_commit_bytes[action.session_id] += num_bytes
        if action.is_finished:
            del stream.channels[session_id]

    def _submit(self, event: Event, *, is_release: bool = False, is_from_peer: bool = False) -> None:
        assert self._thread is not None
        if not self._thread.submit(event, is_release=is_release, is_from_peer=is_from_peer):
            raise Overloaded("the worker is too far behind to take more")

    # outrider.v1.Target

    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: Context) -> common_pb2.WorkerInfo:
        info = common_pb2.WorkerInfo()
        info.CopyFrom(self._info)
        info.stalled_ms = round(min(self._stalled_s(), STALLED_S_MAX) * 1e3)
        return info

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[target_pb2.GenerateEvent]:
        try:
            if self._is_draining:
                raise WorkerLeaves("this worker is draining")
            if request.incarnation and request.incarnation != self._info.incarnation:
                # Its record is older than this process, whose weights may be others.
                raise AnotherLife("the worker that this request is for has gone; another one answers here")
            event = parse_generate(request, self._deadline_at(request, context))
            if request.trial_tokens:
                if self._trial is not None:
                    # Of any coordinator: a worker that is lost now was lost to the one that is tried.
                    raise Overloaded(
                        "another request that workers were lost to is tried here at present", 1.0
                    )
                self._trial = request  # before its grammar is compiled, which may bring a worker down as well
            # Before anything that the request could hang this worker with: a coordinator counts against a request those
            # workers only that were well when it came.
            if self._stalled_s() < WAITING_STALL_MAX_S:
                yield target_pb2.GenerateEvent(waiting=target_pb2.SessionWaiting())
            if event.sampling.grammar is not None:
                self._check_room()  # a refusal comes before any work
                async with aclosing(self._compile(event, event.sampling.grammar)) as compiling:
                    async for news in compiling:
                        if isinstance(news, StartSession):
                            event = news
                        else:
                            yield news
            # After the last wait, so that of two calls with one id the second finds the first.
            if request.session_id in self._names:
                raise InvalidRequest("session_id", f"session {request.session_id} is already running here")
        except BaseException as error:
            self._end_trial(request)
            if not isinstance(error, OutriderError):
                raise
            await abort(context, error)
            return
        actions = CallerQueue()
        self._callers[event.session_id] = actions
        self._names[request.session_id] = event.session_id
        num_trial_tokens = request.trial_tokens
        has_ended = False
        # Not while the model is stuck, though this loop is not: the caller should look elsewhere.
        reminder = Reminder(actions, WAITING_EVERY_S, lambda: self._stalled_s() < WAITING_STALL_MAX_S)
        try:
            attributes = {"outrider.session_id": request.session_id}
            with self._tracing.span("target.generate", self._tracing.parent_of(context), attributes) as span:
                self._submit(event)
                while not has_ended:
                    action = await actions.get()
                    if action is None:
                        yield target_pb2.GenerateEvent(waiting=target_pb2.SessionWaiting())
                        continue
                    if isinstance(action, SessionRefused | SessionAborted):
                        has_ended = True
                        raise action.error
                    if isinstance(action, SessionEnded):
                        has_ended = True
                        add_up_to_limit(
                            action.stats, "num_hint_bytes", self._num_commit_bytes[event.session_id]
                        )
                    if isinstance(action, TokensCommitted) and self._trial is request:
                        num_trial_tokens -= len(action.token_ids)
                        if num_trial_tokens <= 0:
                            self._end_trial(request)
                    _show(span, action)
                    yield _event_message(action)
        except OutriderError as error:
            await abort(context, error)
        finally:
            reminder.stop()
            self._end_trial(request)
            del self._callers[event.session_id]
            del self._names[request.session_id]
            self._num_commit_bytes.pop(event.session_id, None)
            if not has_ended:
                self._submit(CancelSession(event.session_id), is_release=True)

    def _end_trial(self, request: target_pb2.GenerateRequest) -> None:
        if self._trial is request:
            self._trial = None

    def _deadline_at(self, request: target_pb2.GenerateRequest, context: Context) -> float:
        """On our clock, seconds: the request's own deadline or the call's, whichever is sooner."""
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
        """Yields that it is being compiled, once a second: silence would look as if the worker were gone. Last comes
        the session with its grammar, which has read what is committed already."""
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
        state = await self._grammars.compile_async(grammar, event.owner)
        if committed := event.token_ids[event.num_prompt_tokens :]:
            # Thousands of tokens, perhaps: neither on this loop nor on the model's thread.
            try:
                await asyncio.to_thread(state.advance, committed)
            except GrammarViolation as violation:
                raise InvalidRequest(
                    "token_ids", f"the committed tokens leave the grammar: {violation}"
                ) from violation
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

    # outrider.v1.Hints

    async def Exchange(
        self, request_iterator: AsyncIterator[hints_pb2.HintFrame], context: Context
    ) -> AsyncIterator[hints_pb2.CommitFrame]:
        stream_id, stream = self._next_stream_id, DraftStream()
        self._next_stream_id += 1
        self._streams[stream_id] = stream
        reader = asyncio.create_task(self._read_hints(request_iterator, stream_id, stream))
        reader.add_done_callback(lambda _: stream.close())
        try:
            while not reader.done():
                frame = await stream.next_frame()
                if stream.is_overrun:
                    await abort(context, Overloaded("this draft worker does not read its commits"))
                if frame.commits or frame.pong:
                    self._metrics.num_commit_frames.inc()
                    yield frame
            error = reader.exception()
            if isinstance(error, OutriderError):
                await abort(context, error)
            elif error is not None:
                logger.info("a draft worker's stream broke: %s", error)
        finally:
            reader.cancel()
            del self._streams[stream_id]
            self._submit(CloseStream(stream_id), is_release=True)

    async def _read_hints(
        self, frames: AsyncIterator[hints_pb2.HintFrame], stream_id: StreamId, stream: DraftStream
    ) -> None:
        channels: dict[int, HintChannel] = {}
        own, began_at = LoopShare(), time.monotonic()
        while True:
            # Whoever is cut off and comes again finds what it has used up; one that stays has a share of its own.
            share = own if time.monotonic() - began_at > NEWCOMER_S else self._newcomers
            await asyncio.sleep(share.wait_s(time.monotonic()))
            frame = await anext(frames, None)
            if frame is None:
                return
            began_s = time.thread_time()
            try:
                self._take_frame(frame, stream_id, stream, channels)
            finally:
                share.spend(time.thread_time() - began_s, time.monotonic())

    def _take_frame(
        self,
        frame: hints_pb2.HintFrame,
        stream_id: StreamId,
        stream: DraftStream,
        channels: dict[int, HintChannel],
    ) -> None:
        self._metrics.num_hint_frames.inc()
        check_frame(frame)
        if frame.ping:
            stream.answer_ping(frame.ping)
        for session_id in dict.fromkeys(frame.unsubscribe):
            followed = channels.get(stream.channels.pop(session_id, -1))
            name = session_id if followed is None else followed.name
            self._submit(UnsubscribeDraft(stream_id, name), is_from_peer=True)
        # A thousand words on one session cost as much as the last of them.
        for subscribe in {each.session_id: each for each in frame.subscribe}.values():
            if is_session_id(subscribe.session_id) and subscribe.channel <= MAX_CHANNEL:
                name = session_name(subscribe.session_id, subscribe.hint_token)
                before = channels.get(subscribe.channel)
                if (
                    before is not None
                    and stream.channels.get(session_id_of(before.name)) == subscribe.channel
                ):
                    del stream.channels[
                        session_id_of(before.name)
                    ]  # its commits would be taken for this one's
                channels[subscribe.channel] = HintChannel(name, subscribe.attachment)
                stream.channels[subscribe.session_id] = subscribe.channel
                self._submit(
                    SubscribeDraft(stream_id, name, subscribe.attachment, subscribe.known_len),
                    is_from_peer=True,
                )
        for nodes in frame.nodes:
            channel = channels.get(nodes.channel)
            event = None
            if channel is not None:
                event = parse_hints(nodes, channel, self._info.vocab_size, self._now())
            self._metrics.num_hint_bytes.inc(nodes.ByteSize())
            if event is None:
                self._metrics.num_bad_hints.inc()
            else:
                self._submit(event, is_from_peer=True)

    def _count(self, action: Action) -> None:
        if isinstance(action, TokensCommitted):
            self._metrics.generation_tokens.inc(len(action.token_ids))
            if action.num_draft_tokens:
                self._metrics.num_drafts.inc()
                self._metrics.num_draft_tokens.inc(action.num_draft_tokens)
                self._metrics.num_accepted_tokens.inc(action.num_accepted_draft_tokens)
                self._metrics.observe_accepted(action.num_accepted_draft_tokens)
        elif isinstance(action, SessionEnded):
            self._metrics.prompt_tokens.inc(action.num_prompt_tokens)
            self._metrics.num_cached_tokens.inc(action.num_cached_tokens)
            self._metrics.num_forced_tokens.inc(action.stats.num_forced_tokens)
            self._metrics.num_lookup_tokens.inc(action.stats.num_lookup_tokens)
            self._metrics.num_stale_hints.inc(action.stats.num_stale_hints)
            self._metrics.num_late_hints.inc(action.stats.num_late_hints)
            self._metrics.num_outcomes.inc(action.stats.num_outcomes)
            self._metrics.num_predicted_outcomes.inc(action.stats.num_predicted_outcomes)
            self._metrics.num_ready_outcomes.inc(action.stats.num_ready_outcomes)


def parse_generate(request: target_pb2.GenerateRequest, deadline_at: float = math.inf) -> StartSession:
    """Raises InvalidRequest naming the field. `deadline_at` is on the scheduler's clock, seconds."""
    if not is_session_id(request.session_id):
        raise InvalidRequest(
            "session_id", f"session_id must have 1 to {MAX_SESSION_ID} characters and no blanks"
        )
    if len(request.hint_token) > MAX_HINT_TOKEN:
        raise InvalidRequest("hint_token", f"hint_token may have at most {MAX_HINT_TOKEN} characters")
    check_cache_salt(request.cache_salt)
    check_owner(request.owner)
    if not request.token_ids:
        raise InvalidRequest("token_ids", "token_ids is empty; at least one token is needed to go on from")
    sampling = SamplingParams.from_proto(request.sampling)
    return StartSession(
        session_name(request.session_id, request.hint_token),
        list(request.token_ids),
        request.num_prompt_tokens or len(request.token_ids),
        sampling,
        (
            SpeculationSettings.from_proto(request.speculation)
            if request.HasField("speculation")
            else SpeculationSettings()
        ),
        sampling.seed if sampling.seed is not None else secrets.randbits(64),
        priority=request.priority,
        deadline_at=deadline_at,
        cache_salt=request.cache_salt,
        owner=request.owner,
    )


@dataclass(slots=True)
class HintChannel:
    """One session on a draft worker's stream."""

    name: str  # `session_name`
    attachment: int
    decoder: HintDecoder = field(default_factory=HintDecoder)


def is_session_id(text: str) -> bool:
    """Whether callers and draft workers may call a session so."""
    return 0 < len(text) <= MAX_SESSION_ID and " " not in text


def session_name(session_id: str, hint_token: str) -> str:
    """What the scheduler calls a session: a draft worker that has the id and not the token names one that does not
    exist, and its hints are kept for a moment and forgotten like those of any other.

    The token itself gets into no log: a digest stands for it.
    """
    if not hint_token:
        return session_id
    return f"{session_id} {blake2b(hint_token.encode(), digest_size=16).hexdigest()}"


def session_id_of(name: str) -> str:
    """The id in a name."""
    return name.partition(" ")[0]


def check_frame(frame: hints_pb2.HintFrame) -> None:
    """Raises InvalidRequest for a frame that would keep the event loop, and with it all callers, waiting."""
    num_messages = len(frame.subscribe) + len(frame.nodes) + len(frame.unsubscribe)
    if num_messages > MAX_FRAME_MESSAGES:
        raise InvalidRequest(
            "nodes", f"a frame of {num_messages} messages; permitted: at most {MAX_FRAME_MESSAGES}"
        )
    num_nodes = sum(len(nodes.parent_ids) for nodes in frame.nodes)
    if num_nodes > MAX_FRAME_NODES:
        raise InvalidRequest("nodes", f"a frame of {num_nodes} nodes; permitted: at most {MAX_FRAME_NODES}")


def parse_hints(
    message: hints_pb2.HintNodes, channel: HintChannel, vocab_size: int, arrived_at: float
) -> HintsArrived | None:
    """None when the message says nothing, or nothing that makes sense."""
    hints = channel.decoder.decode(message, vocab_size) if message.parent_ids else None
    if hints is None:
        return None
    return HintsArrived(
        channel.name,
        channel.attachment,
        channel.decoder.base_len,
        hints,
        arrived_at,
        message.ByteSize(),
    )


def _show(span: Span, action: Action) -> None:
    if not span.is_recorded:
        return
    if isinstance(action, TokensCommitted):
        step = {
            "tokens": len(action.token_ids),
            "draft_tokens": action.num_draft_tokens,
            "accepted_draft_tokens": action.num_accepted_draft_tokens,
            "step_ms": action.step_ms,
        }
        span.event("step", step)
    elif isinstance(action, SessionEnded):
        ended = {
            "queue_ms": action.queue_ms,
            "prefill_ms": action.prefill_ms,
            "num_prompt_tokens": action.num_prompt_tokens,
            "num_output_tokens": action.num_output_tokens,
            "num_cached_tokens": action.num_cached_tokens,
            "num_preemptions": action.num_preemptions,
        }
        span.set({f"outrider.{name}": value for name, value in ended.items()})


def _commit_message(action: CommitPublished, channel: int) -> hints_pb2.SessionCommit:
    return hints_pb2.SessionCommit(
        channel=channel,
        from_len=action.from_len,
        token_ids=action.token_ids,
        is_paused=not action.is_listening,
        is_finished=action.is_finished,
        num_tried_hints=action.num_tried,
        num_held_hints=action.num_held,
    )


def _event_message(action: Action) -> target_pb2.GenerateEvent:
    match action:
        case SessionAdmitted():
            started = target_pb2.SessionStarted(decoding_mode=action.decoding_mode.value)
            return target_pb2.GenerateEvent(started=started)
        case PromptScored():
            prompt = target_pb2.PromptLogprobs(
                first_position=action.first_position,
                logprobs=[logprobs.to_proto() for logprobs in action.logprobs],
            )
            return target_pb2.GenerateEvent(prompt=prompt)
        case TokensCommitted():
            step = target_pb2.StepOutput(
                token_ids=action.token_ids,
                origins=action.origins,
                num_draft_tokens=action.num_draft_tokens,
                num_accepted_draft_tokens=action.num_accepted_draft_tokens,
                step_ms=action.step_ms,
                logprobs=[logprobs.to_proto() for logprobs in action.logprobs or ()],
                is_resting=action.is_resting,
            )
            return target_pb2.GenerateEvent(step=step)
        case SessionEnded():
            finished = target_pb2.SessionFinished(
                reason=action.reason,
                stop_token_id=action.stop_token_id,
                num_prompt_tokens=action.num_prompt_tokens,
                num_output_tokens=action.num_output_tokens,
                num_cached_tokens=action.num_cached_tokens,
                stats=action.stats,
                queue_ms=action.queue_ms,
                prefill_ms=action.prefill_ms,
                num_preemptions=action.num_preemptions,
            )
            return target_pb2.GenerateEvent(finished=finished)
    raise AssertionError(f"{type(action).__name__} is not for callers")
