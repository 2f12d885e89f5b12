"""Sessions of a target worker on vLLM: what vLLM generates becomes a target's actions. The engine is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engines.vllm.sessions import SessionArgs, StepCounts, num_matching, restore_output, split_prompt
from outrider.errors import DeadlineExceeded, InvalidRequest, NotFound, OutriderError, Overloaded, WorkerFailed
from outrider.hint_service.messages import CommitPublished, HintsArrived, SubscribeDraft
from outrider.hints.hint_tree import Hint
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import DecodingMode, Exactness, SamplingParams, SpeculationSettings
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.messages import (
    Action,
    CancelSession,
    ChangeSpeculation,
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
from target_worker.vllm.parameters import EngineFacts
from target_worker.vllm.sessions import EngineSessions

ABOUT = EngineDescription(Path("m"), 100, 64, 2, "float32", "n", is_batch_invariant=False, facts=EngineFacts())
LAST_RESORT_S = 30.0


def counts(*steps: tuple[list[int], list[int]], number: int = 1) -> StepCounts:
    """The counts after steps of (hints, tokens)."""
    made = StepCounts(step=number, step_ms=5.0)
    for hints, token_ids in steps:
        made.count(hints, token_ids)
    return made


class FakeEngine:
    """Plays what a test queues for it; an exception is raised."""

    def __init__(self, about: EngineDescription = ABOUT) -> None:
        self.description = about
        self.outputs: asyncio.Queue[EngineOutput | Exception] = asyncio.Queue()
        self.requests: list[EngineRequest] = []
        self.num_aborted = 0
        self.pings: list[asyncio.Future[None]] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput]:
        self.requests.append(request)
        has_ended = False
        try:
            while not has_ended:
                output = await self.outputs.get()
                if isinstance(output, Exception):
                    has_ended = True
                    raise output
                has_ended = output.finish_reason is not None
                yield output
        finally:
            self.num_aborted += not has_ended

    async def ping(self) -> None:
        self.pings.append(asyncio.get_running_loop().create_future())
        await self.pings[-1]


@dataclass
class Worker:
    """Sessions on a fake engine, and what they said."""

    engine: FakeEngine
    hints: SessionHints
    sessions: EngineSessions
    actions: list[Action]
    commits: list[CommitPublished]
    losses: list[OutriderError]
    now: float = 1000.0

    async def until(self, is_done: Callable[[], Any]) -> None:
        async with asyncio.timeout(LAST_RESORT_S):
            while not is_done():  # noqa: ASYNC110 - turns of the loop are what it waits for
                await asyncio.sleep(0)

    async def told(self, *kinds: type) -> list[Any]:
        """The actions of a kind, once there is one."""
        await self.until(lambda: any(isinstance(each, kinds) for each in self.actions))
        return [each for each in self.actions if isinstance(each, kinds)]


@asynccontextmanager
async def serving(about: EngineDescription = ABOUT, max_num_waiting: int = 1) -> AsyncIterator[Worker]:
    engine, actions, commits, losses = FakeEngine(about), list[Action](), list[CommitPublished](), list[OutriderError]()
    hints = SessionHints(commits.append)
    metrics = TargetMetrics("m", "w")
    worker: Worker
    sessions = EngineSessions(
        engine, hints, metrics, actions.extend, losses.append, max_num_waiting=max_num_waiting, now=lambda: worker.now
    )
    worker = Worker(engine, hints, sessions, actions, commits, losses)
    try:
        yield worker
    finally:
        await sessions.end()


def start(name: str = "s", committed: tuple[int, ...] = (), **sampling: Any) -> StartSession:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20} | sampling
    return StartSession(name, [1, 2, 3, *committed], 3, SamplingParams(**given), SpeculationSettings(), seed=0)


async def test_a_sequence_is_admitted_generated_and_ended() -> None:
    async with serving() as worker:
        worker.sessions.submit(start())
        await worker.told(SessionAdmitted)
        scores = [TokenLogprobs(-1.0, 1), TokenLogprobs(-2.0, 3)]
        worker.engine.outputs.put_nowait(EngineOutput([4], prompt_logprobs=scores, counts=counts(([], [4]))))
        second = counts(([], [4]), ([5, 6, 9], [5, 6, 7]), number=2)
        worker.engine.outputs.put_nowait(EngineOutput([5, 6, 7], counts=second))
        third = counts(([], [4]), ([5, 6, 9], [5, 6, 7]), ([8], [8, 0]), number=3)
        worker.engine.outputs.put_nowait(
            EngineOutput([8, 0], None, None, "stop", third, num_cached_tokens=2, num_preemptions=1, queue_ms=3.0)
        )
        (ended,) = await worker.told(SessionEnded)
    origin = common_pb2.TokenOrigin
    assert worker.actions[:-1] == [
        SessionAdmitted("s", DecodingMode.GREEDY, Exactness.DISTRIBUTION),
        PromptScored("s", 1, scores),
        TokensCommitted("s", [4], [origin.TOKEN_ORIGIN_PLAIN], 0, 0, 5.0),
        TokensCommitted(
            "s", [5, 6, 7],
            [origin.TOKEN_ORIGIN_ACCEPTED, origin.TOKEN_ORIGIN_ACCEPTED, origin.TOKEN_ORIGIN_RECOVERED], 3, 2, 5.0,
            sources=(SourceCount(common_pb2.HINT_SOURCE_DRAFT, 3, 2),),
        ),
        TokensCommitted(
            "s", [8], [origin.TOKEN_ORIGIN_ACCEPTED], 1, 1, 5.0,
            sources=(SourceCount(common_pb2.HINT_SOURCE_DRAFT, 1, 1),),
        ),
    ]  # fmt: skip
    assert (ended.reason, ended.stop_token_id) == (target_pb2.FINISH_REASON_STOP, 0)
    assert (ended.num_prompt_tokens, ended.num_output_tokens, ended.num_cached_tokens) == (3, 5, 2)
    assert (ended.queue_ms, ended.num_preemptions) == (3.0, 1)
    assert ended.stats == common_pb2.SpeculationStats(
        num_steps=3, num_spec_steps=2, num_draft_tokens=4, num_accepted_draft_tokens=3,
        acceptance_histogram=[0, 1, 1], draft_length_histogram=[0, 1, 0, 1],
    )  # fmt: skip
    assert worker.sessions.load.num_sessions == 0


async def test_counts_survive_outputs_that_come_together() -> None:
    """vLLM merges outputs that nobody has taken yet; the last one's counts are those of all."""
    async with serving() as worker:
        worker.sessions.submit(start())
        both = counts(([4, 5], [4, 5, 6]), ([7], [8]))
        worker.engine.outputs.put_nowait(EngineOutput([4, 5, 6, 8], counts=both))
        (step,) = await worker.told(TokensCommitted)
    assert (step.num_draft_tokens, step.num_accepted_draft_tokens) == (3, 2)
    assert len(step.origins) == 4


@pytest.mark.parametrize(
    ("is_invariant", "sampling", "mode", "exactness"),
    [
        (True, {}, DecodingMode.GREEDY, Exactness.TOKENS),
        (False, {}, DecodingMode.GREEDY, Exactness.DISTRIBUTION),
        (True, {"temperature": 1.0}, DecodingMode.REJECTION, Exactness.DISTRIBUTION),
        (True, {"temperature": 1.0, "seed": 1}, DecodingMode.REJECTION, Exactness.DISTRIBUTION),
    ],
)
async def test_what_the_output_is_a_function_of_is_said(
    *, is_invariant: bool, sampling: dict[str, Any], mode: DecodingMode, exactness: Exactness
) -> None:
    async with serving(replace(ABOUT, is_batch_invariant=is_invariant)) as worker:
        worker.sessions.submit(start(**sampling))
        assert await worker.told(SessionAdmitted) == [SessionAdmitted("s", mode, exactness)]


async def test_a_replay_counts_what_was_committed_elsewhere() -> None:
    async with serving() as worker:
        worker.sessions.submit(start(committed=(4, 5)))
        worker.engine.outputs.put_nowait(EngineOutput([6], None, None, "length", counts(([], [6]))))
        (ended,) = await worker.told(SessionEnded)
    assert (ended.reason, ended.num_prompt_tokens, ended.num_output_tokens) == (target_pb2.FINISH_REASON_LENGTH, 3, 3)
    (request,) = worker.engine.requests
    assert request.token_ids == [1, 2, 3, 4, 5]
    assert request.parameters["extra_args"]["outrider"]["num_committed"] == 2


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (start(committed=tuple(range(20))), InvalidRequest),
        (start(committed=(100,)), InvalidRequest),
        (replace(start(), token_ids=list(range(64)), num_prompt_tokens=64), InvalidRequest),
        (start(typical_p=0.5), InvalidRequest),
        (replace(start(), deadline_at=999.0), DeadlineExceeded),
    ],
)
async def test_what_cannot_be_served_is_refused(event: StartSession, kind: type[OutriderError]) -> None:
    async with serving() as worker:
        worker.sessions.submit(event)
        (refused,) = await worker.told(SessionRefused)
        assert isinstance(refused.error, kind)
        assert not worker.engine.requests
        assert worker.sessions.load.num_sessions == 0


async def test_as_many_as_there_is_room_for_are_taken() -> None:
    async with serving() as worker:
        for name in ("a", "b", "c", "d"):
            worker.sessions.submit(start(name))
        (refused,) = await worker.told(SessionRefused)
        assert refused.session_id == "d"
        assert isinstance(refused.error, Overloaded)
        assert (worker.sessions.load.num_running, worker.sessions.load.num_waiting) == (2, 1)
        worker.sessions.observe(EngineLoad(1, 2, 0.5))  # for want of KV blocks
        assert (worker.sessions.load.num_running, worker.sessions.load.num_waiting) == (1, 2)


async def test_one_that_is_cancelled_is_aborted_and_its_name_is_free_at_once() -> None:
    async with serving() as worker:
        worker.sessions.submit(start())
        await worker.told(SessionAdmitted)
        await worker.until(lambda: worker.engine.requests)
        worker.sessions.submit(CancelSession("s"))
        worker.sessions.submit(start())
        await worker.until(lambda: worker.engine.num_aborted == 1 and len(worker.engine.requests) == 2)
        assert not [each for each in worker.actions if not isinstance(each, SessionAdmitted)]


async def test_a_deadline_aborts() -> None:
    async with serving() as worker:
        worker.sessions.submit(replace(start(), deadline_at=worker.now + 0.05))
        (ended,) = await worker.told(SessionAborted)
        assert isinstance(ended.error, DeadlineExceeded)
        # On a busy machine the deadline may pass before the engine has the request.
        await worker.until(lambda: worker.engine.num_aborted == len(worker.engine.requests))


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (WorkerFailed("x"), WorkerFailed),
        (InvalidRequest("grammar", "x"), InvalidRequest),
        (RuntimeError("x"), WorkerFailed),
        (EngineOutput([], finish_reason="error"), WorkerFailed),
        (EngineOutput([], finish_reason="abort"), WorkerFailed),
    ],
)
async def test_a_failure_ends_its_session_alone(output: Any, kind: type[OutriderError]) -> None:
    async with serving() as worker:
        worker.sessions.submit(start())
        worker.engine.outputs.put_nowait(output)
        (ended,) = await worker.told(SessionAborted)
        assert isinstance(ended.error, kind)
        assert not worker.losses


async def test_the_end_of_the_engine_ends_the_worker() -> None:
    async with serving() as worker:
        worker.sessions.submit(start())
        worker.engine.outputs.put_nowait(EngineLost("gone"))
        await worker.told(SessionAborted)
        assert worker.losses


async def test_an_idle_engine_is_asked_whether_it_is_there() -> None:
    async with serving() as worker:
        assert worker.sessions.stalled_s() == 0.0
        await worker.until(lambda: worker.engine.pings)
        worker.now += 3.0
        assert worker.sessions.stalled_s() == 3.0
        worker.engine.pings[0].set_result(None)
        await worker.until(lambda: worker.sessions.stalled_s() == 0.0)
        await worker.until(lambda: len(worker.engine.pings) == 2)
        worker.engine.pings[1].set_exception(EngineLost("gone"))
        await worker.until(lambda: worker.losses)


async def test_a_draft_worker_that_comes_first_is_told_the_session_when_it_begins() -> None:
    async with serving() as worker:
        worker.sessions.submit(SubscribeDraft(1, "s", 2))
        worker.sessions.submit(HintsArrived("s", 1, 3, [Hint(1, 0, 9)], 0.0))
        assert not worker.commits
        worker.sessions.submit(start())
        (first,) = worker.commits
        assert (first.from_len, first.token_ids, first.accepts_hints) == (2, [3], True)
        worker.sessions.submit(CancelSession("s"))
        assert worker.commits[-1].is_finished


async def test_the_caller_is_told_that_the_engine_has_paused_hints() -> None:
    async with serving() as worker:
        worker.sessions.submit(start())
        request = worker.hints.named("s")
        assert request is not None
        worker.engine.outputs.put_nowait(EngineOutput([4], counts=counts(([], [4]))))
        await worker.told(TokensCommitted)
        request.is_paused = True
        worker.engine.outputs.put_nowait(EngineOutput([5], counts=counts(([], [4]), ([], [5]), number=2)))
        await worker.until(lambda: len(worker.actions) == 3)
        steps = worker.actions[1:]
    assert steps == [
        TokensCommitted("s", [token_id], [common_pb2.TOKEN_ORIGIN_PLAIN], 0, 0, 5.0, is_resting=is_resting)
        for token_id, is_resting in ((4, False), (5, True))
    ]


async def test_speculation_can_be_turned_off_and_on() -> None:
    async with serving() as worker:
        worker.sessions.submit(start())
        worker.sessions.submit(SubscribeDraft(1, "s", 3))
        worker.sessions.submit(ChangeSpeculation("s", SpeculationSettings(enabled=False)))
        worker.sessions.submit(ChangeSpeculation("s", SpeculationSettings()))
        assert [each.accepts_hints for each in worker.commits] == [True, False, True]
        worker.sessions.submit(ChangeSpeculation("t", SpeculationSettings()))
        (refused,) = await worker.told(SessionRefused)
        assert isinstance(refused.error, NotFound)


def test_matching_hints_are_counted_up_to_the_first_other_token() -> None:
    assert [num_matching(*each) for each in (([1, 2], [1, 2, 3]), ([1, 2], [1, 4]), ([], [1]), ([1, 2], [1]))] == [
        2, 1, 0, 1,
    ]  # fmt: skip


def test_counts_are_sent_and_read_again() -> None:
    made = counts(([1, 2], [1, 3]), ([], [4]), number=7)
    assert StepCounts.from_message(made.to_message(is_last=True)) == made
    between = StepCounts.from_message(made.to_message(is_last=False))
    assert between is not None
    assert (between.num_draft_tokens, between.acceptance_histogram) == (2, [])
    assert StepCounts.from_message(None) is None


def test_a_replay_has_its_output_again_in_scheduler_and_workers() -> None:
    params = SimpleNamespace(extra_args=SessionArgs("s", 2).to_args())
    state = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2, 3, 4, 5], output_token_ids=[])
    split_prompt(state)
    assert (state.prompt_token_ids, state.output_token_ids) == ([1, 2, 3], [4, 5])
    split_prompt(state)
    assert state.output_token_ids == [4, 5], "once"
    request = SimpleNamespace(num_prompt_tokens=5, _output_token_ids=[], _all_token_ids=[1, 2, 3, 4, 5])
    restore_output(request, 2)
    assert (request.num_prompt_tokens, request._output_token_ids) == (3, [4, 5])
    assert request._all_token_ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("extra_args", [None, {}, SessionArgs("s").to_args()])
def test_what_is_no_replay_stays_a_prompt(extra_args: dict[str, Any] | None) -> None:
    params = SimpleNamespace(extra_args=extra_args)
    state = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2], output_token_ids=[])
    split_prompt(state)
    assert (state.prompt_token_ids, state.output_token_ids) == ([1, 2], [])
