"""The sessions of a target worker on vLLM, in place of the scheduler and the model thread. Runs on the event loop.

It takes the servicer's events and returns actions, as these do. vLLM decides which sessions run and what they generate;
here they are bounded, ended at their deadlines and counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.concurrency.background import end_tasks
from outrider.concurrency.turnover import Turnover, retry_after_s
from outrider.engines.vllm.sessions import StepCounts
from outrider.errors import DeadlineExceeded, InvalidRequest, NotFound, OutriderError, Overloaded, WorkerFailed
from outrider.observability.telemetry import TargetMetrics
from outrider.registry.worker_record import WorkerLoad
from outrider.sampling_params import DecodingMode, Exactness
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.admission import check_request
from target_worker.messages import (
    Action,
    CancelSession,
    ChangeSpeculation,
    Event,
    PromptScored,
    SessionAborted,
    SessionAdmitted,
    SessionEnded,
    SessionRefused,
    SourceCount,
    StartSession,
    TokensCommitted,
)
from target_worker.vllm.engine import EngineDescription, EngineLoad, EngineLost, EngineOutput, EngineRequest
from target_worker.vllm.hints import SessionHints
from target_worker.vllm.parameters import vllm_parameters

logger = logging.getLogger(__name__)

_REASONS = {
    "stop": target_pb2.FINISH_REASON_STOP,
    "repetition": target_pb2.FINISH_REASON_STOP,
    "length": target_pb2.FINISH_REASON_LENGTH,
}


class Engine(Protocol):
    """vLLM, as it is used here (`target_worker.vllm.engine.VllmEngine`)."""

    @property
    def description(self) -> EngineDescription: ...
    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput]: ...
    async def ping(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Session:
    event: StartSession
    began_at: float
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    error: OutriderError | None = None  # with which it ends, if that was decided here
    is_cancelled: bool = False
    num_output_tokens: int = 0
    counts: StepCounts = field(default_factory=StepCounts)
    has_started: bool = False  # it has output


class EngineSessions:
    """All sessions of one worker."""

    def __init__(
        self,
        engine: Engine,
        hints: SessionHints,
        metrics: TargetMetrics,
        dispatch: Callable[[list[Action]], None],
        on_loss: Callable[[OutriderError], None],
        *,
        max_num_waiting: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`dispatch` carries out actions; `on_loss` is called when the engine has ended; `now` is a clock, seconds."""
        self._engine = engine
        self._about = engine.description
        self._hints = hints
        self._metrics = metrics
        self._dispatch = dispatch
        self._on_loss = on_loss
        self._max_num_sessions = self._about.max_num_seqs + max_num_waiting
        self._now = now
        self._sessions: dict[str, _Session] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._turnover = Turnover()
        self._reported = EngineLoad(0, 0, 0.0)
        self._ping: asyncio.Task[None] | None = None
        self._pinged_at = 0.0
        self._last_step = 0

    # The servicer's driver.

    def submit(self, event: Event, *, is_release: bool = False, peer: str | None = None) -> bool:
        """Takes an event at once; the result is always true."""
        match event:
            case StartSession():
                self._start(event)
            case CancelSession():
                self._cancel(event.session_id)
            case ChangeSpeculation():
                self._change(event)
            case _:
                self._hints.submit(event)
        return True

    def has_room(self, peer: str) -> bool:
        return True

    def has_events(self) -> bool:
        return False

    def stalled_s(self) -> float:
        """How long the engine has not answered a question between two steps, seconds; asks the next one."""
        if self._ping is None or self._ping.done():
            self._pinged_at = self._now()
            self._ping = asyncio.create_task(self._ask(), name="vLLM's pulse")
            return 0.0
        return self._now() - self._pinged_at

    async def _ask(self) -> None:
        try:
            await self._engine.ping()
        except EngineLost as error:
            self._on_loss(error)
        except Exception:  # not known to be its end; the next question tells
            logger.exception("vLLM did not answer")

    async def end(self) -> None:
        """Aborts what is left, and waits for its end."""
        tasks = [session.task for session in self._sessions.values()]
        await end_tasks(self._ping, *tasks, *self._ending)

    # Load.

    @property
    def load(self) -> WorkerLoad:
        """The load to report. vLLM may make sessions wait that have a slot, for want of KV blocks."""
        num_sessions = len(self._sessions)
        num_waiting = max(num_sessions - self._about.max_num_seqs, min(self._reported.num_waiting, num_sessions))
        wait_ms = self._wait_s(num_waiting) * 1e3
        return WorkerLoad(num_sessions - num_waiting, num_waiting, round(min(wait_ms, 3.6e6)))

    def _wait_s(self, num_waiting: int) -> float:
        num_running = len(self._sessions) - num_waiting
        if len(self._sessions) < self._about.max_num_seqs and not num_waiting:
            return 0.0
        return self._turnover.wait_s(num_waiting, max(num_running, 1))

    def observe(self, reported: EngineLoad) -> None:
        """Takes the engine's load after a step."""
        self._reported = reported
        self._metrics.num_requests_running.set(reported.num_running)
        self._metrics.num_requests_waiting.set(reported.num_waiting)
        self._metrics.kv_cache_usage_perc.set(reported.kv_usage)

    # One session.

    def _start(self, event: StartSession) -> None:
        name = event.session_id
        if name in self._sessions:
            self._dispatch([SessionRefused(name, InvalidRequest("session_id", "this session runs here already"))])
            return
        try:
            if len(self._sessions) >= self._max_num_sessions:
                load = self.load
                why = f"{load.num_running} sessions run here and {load.num_waiting} wait"
                raise Overloaded(why, retry_after_s(load.wait_ms / 1e3))
            if event.deadline_at <= self._now():
                raise DeadlineExceeded("not finished within the request's deadline")
            check_request(event, self._about.max_model_len, self._about.vocab_size)
        except OutriderError as error:
            self._dispatch([SessionRefused(name, error)])
            return
        session = self._sessions[name] = _Session(
            event, self._now(), num_output_tokens=len(event.token_ids) - event.num_prompt_tokens
        )
        if math.isfinite(event.deadline_at):
            delay_s = event.deadline_at - self._now()
            session.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, session)
        self._hints.open(name, event.token_ids, is_on=_permits_hints(event.speculation))
        session.task = asyncio.create_task(self._run(session), name=f"session {name}")

    def _expire(self, session: _Session) -> None:
        session.error = DeadlineExceeded("not finished within the request's deadline")
        if session.task is not None:
            session.task.cancel()

    def _cancel(self, name: str) -> None:
        session = self._sessions.get(name)
        if session is not None and session.task is not None:
            session.is_cancelled = True
            self._forget(session)  # its name may come again before vLLM has heard of the end
            self._ending.add(session.task)
            session.task.add_done_callback(self._ending.discard)
            session.task.cancel()

    def _change(self, event: ChangeSpeculation) -> None:
        if event.session_id in self._sessions:
            self._hints.switch(event.session_id, is_on=_permits_hints(event.speculation))
        else:
            self._dispatch([SessionRefused(event.session_id, NotFound("no such session here"))])

    async def _run(self, session: _Session) -> None:
        """Generates one session's output; returns when it has ended, however it did."""
        try:
            action: Action = await self._generate(session)
        except asyncio.CancelledError:
            if session.error is None:
                if not session.is_cancelled:
                    self._forget(session)
                raise
            action = self._failed(session, session.error)
        except OutriderError as error:
            action = self._failed(session, error)
            if isinstance(error, EngineLost):
                self._on_loss(error)
        except Exception as error:
            logger.exception("session %s failed", session.event.session_id)
            action = self._failed(session, WorkerFailed(f"this worker failed on the request: {error}"))
        if not session.is_cancelled:
            self._forget(session)
            self._dispatch([action])

    def _failed(self, session: _Session, error: OutriderError) -> Action:
        kind = SessionAborted if session.has_started else SessionRefused
        return kind(session.event.session_id, error)

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.event.session_id]
        if session.timer is not None:
            session.timer.cancel()
        self._hints.close(session.event.session_id)
        if not self._sessions:  # vLLM tells of steps only, and none follows
            self.observe(EngineLoad(0, 0, 0.0))
        if session.has_started:
            self._turnover.leave(self._now() - session.began_at)

    async def _generate(self, session: _Session) -> Action:
        event = session.event
        # Its grammar may take a moment to be read.
        parameters = await asyncio.to_thread(vllm_parameters, event, self._about.facts)
        mode, exactness = _mode_of(event), self._exactness(event)
        request = EngineRequest(event.session_id, event.token_ids, parameters, event.priority, event.cache_salt)
        self._dispatch([SessionAdmitted(event.session_id, mode, exactness)])
        session.has_started = True
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                actions = self._take(session, output)
                if output.finish_reason is not None:
                    self._dispatch(actions[:-1])
                    return actions[-1]
                self._dispatch(actions)
        raise WorkerFailed("vLLM ended this request without saying why")

    def _exactness(self, event: StartSession) -> Exactness:
        """Seeded output depends on hints in vLLM: a verified hint draws other random numbers."""
        is_greedy = event.sampling.decoding_mode is DecodingMode.GREEDY
        return Exactness.TOKENS if self._about.is_batch_invariant and is_greedy else Exactness.DISTRIBUTION

    def _take(self, session: _Session, output: EngineOutput) -> list[Action]:
        """The actions of an output; of the last one, its end comes last."""
        name, token_ids, logprobs = session.event.session_id, output.token_ids, output.logprobs
        actions: list[Action] = []
        if output.prompt_logprobs:
            actions.append(PromptScored(name, 1, output.prompt_logprobs))
        stop_token_id: int | None = None
        if output.finish_reason == "stop" and token_ids:  # an end token, which is no part of the output
            stop_token_id = token_ids[-1]
            token_ids, logprobs = token_ids[:-1], None if logprobs is None else logprobs[:-1]
        before, session.counts = session.counts, output.counts or session.counts
        self._observe_step(session.counts)
        session.num_output_tokens += len(token_ids)
        num_hints = session.counts.num_draft_tokens - before.num_draft_tokens
        num_accepted = session.counts.num_accepted - before.num_accepted
        if token_ids:
            origins = _origins(len(token_ids), num_hints, num_accepted)
            is_resting = self._hints.is_resting(name)
            drafted = SourceCount(common_pb2.HINT_SOURCE_DRAFT, num_hints, num_accepted)
            actions.append(
                TokensCommitted(
                    *(name, token_ids, origins, num_hints, num_accepted, session.counts.step_ms, logprobs),
                    sources=(drafted,) if num_hints else (),
                    is_resting=is_resting,
                )
            )
        if output.finish_reason is not None:
            actions.append(self._end(session, output, stop_token_id))
        return actions

    def _end(self, session: _Session, output: EngineOutput, stop_token_id: int | None) -> Action:
        event = session.event
        reason = _REASONS.get(output.finish_reason or "")
        if reason is None:
            if event.sampling.grammar is not None and output.finish_reason == "error":
                why = "vLLM could not compile this grammar, or tokens that are already committed leave it"
                return SessionAborted(event.session_id, InvalidRequest("grammar", why))
            return SessionAborted(event.session_id, WorkerFailed(f"vLLM ended this request: {output.finish_reason}"))
        return SessionEnded(
            event.session_id,
            reason,
            stop_token_id,
            event.num_prompt_tokens,
            session.num_output_tokens,
            min(output.num_cached_tokens, event.num_prompt_tokens),
            _stats(session.counts),
            output.queue_ms,
            output.prefill_ms,
            output.num_preemptions,
        )

    def _observe_step(self, counts: StepCounts) -> None:
        if counts.step != self._last_step:
            self._last_step = counts.step
            self._metrics.step_ms.observe(counts.step_ms)
            self._metrics.step_sessions.observe(max(self._reported.num_running, 1))


def _permits_hints(speculation: Any) -> bool:
    return bool(speculation.enabled and not speculation.is_plain)


def _mode_of(event: StartSession) -> DecodingMode:
    """vLLM couples no noise: a seed makes its random numbers repeatable, and no more."""
    mode = event.sampling.decoding_mode
    return DecodingMode.REJECTION if mode is DecodingMode.COUPLED else mode


def _origins(num_tokens: int, num_hints: int, num_accepted: int) -> list[common_pb2.TokenOrigin]:
    """Origins of the tokens. Of several steps that came together, the accepted hints are shown first."""
    if not num_hints:
        return [common_pb2.TOKEN_ORIGIN_PLAIN] * num_tokens
    last = common_pb2.TOKEN_ORIGIN_BONUS if num_accepted == num_hints else common_pb2.TOKEN_ORIGIN_RECOVERED
    num_accepted = min(num_accepted, num_tokens)
    return [common_pb2.TOKEN_ORIGIN_ACCEPTED] * num_accepted + [last] * (num_tokens - num_accepted)


def _stats(counts: StepCounts) -> common_pb2.SpeculationStats:
    return common_pb2.SpeculationStats(
        num_steps=counts.num_steps,
        num_spec_steps=counts.num_spec_steps,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_draft_tokens=counts.num_accepted,
        acceptance_histogram=counts.acceptance_histogram,
        draft_length_histogram=counts.draft_length_histogram,
    )
