"""Both kinds of worker as others see them: served on loopback, with real engines on tiny random models.

For tests without an event loop of their own, which try out one thing after another: `runner` runs the loop for as long
as a call takes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from draft_worker.limits import DraftLimits
from draft_worker.runner import DraftCore
from draft_worker.scheduler import DraftScheduler
from draft_worker.server import DraftServicer
from outrider.concurrency.loop_share import LoopShare
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.grammar import GrammarCompiler
from outrider.observability.telemetry import DraftMetrics, TargetMetrics
from outrider.worker.model_thread import PEERS_S, PEERS_SHARE, Core, ModelThread
from outrider.worker.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS
from protos.outrider.v1 import common_pb2, draft_pb2_grpc, hints_pb2_grpc, target_pb2, target_pb2_grpc
from target_worker.limits import SchedulerLimits
from target_worker.runner import TargetCore
from target_worker.scheduling.scheduler import Scheduler
from target_worker.serving.server import TargetServicer
from tests.hostile import WAIT_S
from tests.models import VOCAB_SIZE, engine, model_dir

MAX_MODEL_LEN = 256
FAMILY = "llama"
GENERATE = "/outrider.v1.Target/Generate"
SET_SPECULATION = "/outrider.v1.Target/SetSpeculation"
EXCHANGE = "/outrider.v1.Hints/Exchange"
ATTACH = "/outrider.v1.Draft/Attach"


@dataclass
class Served:
    """A worker under test, of either kind, and a channel to it. failures: errors that ended its model thread."""

    channel: Any  # of bare bytes, which stubs know nothing of
    runner: asyncio.Runner
    failures: list[BaseException] = field(default_factory=list)

    def call(self, method: str, raw: bytes, *, is_streaming: bool = True) -> tuple[grpc.StatusCode, list[bytes]]:
        """How a call with these bytes ends, and the messages before that."""
        return self.runner.run(self.calling(method, raw, is_streaming=is_streaming))

    async def calling(
        self, method: str, raw: bytes, *, is_streaming: bool = True, num_max: int | None = None
    ) -> tuple[grpc.StatusCode, list[bytes]]:
        """`call`, cancelled after `num_max` messages."""
        answers: list[bytes] = []
        try:
            async with asyncio.timeout(WAIT_S):
                if not is_streaming:
                    answers.append(await self.channel.unary_unary(method)(raw))
                    return grpc.StatusCode.OK, answers
                call = self.channel.unary_stream(method)(raw)
                async for answer in call:
                    answers.append(answer)
                    if len(answers) == num_max:
                        call.cancel()
                        break
        except grpc.aio.AioRpcError as error:
            return error.code(), answers
        return grpc.StatusCode.OK, answers


@dataclass
class ServedTarget(Served):
    scheduler: Scheduler = field(kw_only=True)
    servicer: TargetServicer = field(kw_only=True)

    async def text(self, request: target_pb2.GenerateRequest) -> list[int]:
        """The tokens that a session generates until its end."""
        code, answers = await self.calling(GENERATE, request.SerializeToString())
        assert code is grpc.StatusCode.OK, code
        events = [target_pb2.GenerateEvent.FromString(answer) for answer in answers]
        assert events[-1].HasField("finished")
        return [token_id for event in events for token_id in event.step.token_ids]

    async def until_idle(self) -> None:
        """Waits until no session is left; then none of their resources may be left either."""
        async with asyncio.timeout(WAIT_S):
            while self.scheduler._sessions or self.servicer.hints:  # noqa: ASYNC110 - the model's thread owns them
                await asyncio.sleep(0.005)
        assert not self.failures
        assert not self.servicer._callers
        self.scheduler.allocator.check_integrity([])


@dataclass
class ServedDraft(Served):
    scheduler: DraftScheduler = field(kw_only=True)
    servicer: DraftServicer = field(kw_only=True)


def new_allocator() -> BlockAllocator:
    model = engine(FAMILY)
    return BlockAllocator(model.allocator.num_blocks, model.allocator.block_size)


def info() -> common_pb2.WorkerInfo:
    return common_pb2.WorkerInfo(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, tokenizer_fingerprint="tiny")


def grammars() -> GrammarCompiler:
    return GrammarCompiler(model_dir(FAMILY) / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([0]))


@asynccontextmanager
async def listening(server: grpc.aio.Server) -> AsyncIterator[grpc.aio.Channel]:
    """The server at a free port of loopback, and a channel to it."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [*CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield channel
    finally:
        await server.stop(None)


@contextmanager
def _thread(
    core: Core[Any, Any], servicer: Any, failures: list[BaseException], share: LoopShare | None = None
) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def deliver(actions: list[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(servicer.dispatch, actions)

    thread = ModelThread(core, deliver, failures.append, name="model", peers_share=share)
    servicer.bind(thread)
    thread.start()
    try:
        yield
    finally:
        thread.stop()


@contextmanager
def served_target(**limits: Any) -> Iterator[ServedTarget]:
    """A target worker that always listens and never waits."""
    chosen = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "hint_wait_ms_max": 0.0, "may_pause": False}
    scheduler = Scheduler(SchedulerLimits(**(chosen | limits)), new_allocator(), VOCAB_SIZE)
    metrics = TargetMetrics("tiny", "target")
    servicer = TargetServicer(info(), metrics, grammars())
    failures: list[BaseException] = []

    async def opened(stack: AsyncExitStack) -> grpc.aio.Channel:
        core, share = TargetCore(scheduler, engine(FAMILY), metrics), LoopShare(PEERS_SHARE, PEERS_S)
        stack.enter_context(_thread(core, servicer, failures, share))
        server = grpc.aio.server(options=SERVER_OPTIONS)
        target_pb2_grpc.add_TargetServicer_to_server(servicer, server)
        hints_pb2_grpc.add_HintsServicer_to_server(servicer.hints, server)
        return await stack.enter_async_context(listening(server))

    with _opened(opened) as (runner, channel):
        yield ServedTarget(channel, runner, failures, scheduler=scheduler, servicer=servicer)
    assert not failures


@contextmanager
def served_draft(**limits: Any) -> Iterator[ServedDraft]:
    chosen = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN}
    scheduler = DraftScheduler(DraftLimits(**(chosen | limits)), new_allocator(), VOCAB_SIZE)
    metrics = DraftMetrics("tiny", "draft")
    servicer_made: list[DraftServicer] = []
    failures: list[BaseException] = []

    async def opened(stack: AsyncExitStack) -> grpc.aio.Channel:
        servicer = DraftServicer(info(), scheduler, metrics, grammars())
        servicer_made.append(servicer)
        core = DraftCore(scheduler, engine(FAMILY), metrics)
        stack.enter_context(_thread(core, servicer, failures))
        stack.push_async_callback(servicer.close)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)
        return await stack.enter_async_context(listening(server))

    with _opened(opened) as (runner, channel):
        yield ServedDraft(channel, runner, failures, scheduler=scheduler, servicer=servicer_made[0])
    assert not failures


@contextmanager
def _opened(make: Any) -> Iterator[tuple[asyncio.Runner, grpc.aio.Channel]]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner, runner.run(make(stack))
        finally:
            runner.run(stack.aclose())


def event_kind(raw: bytes) -> str | None:
    """Which kind of event the target's answer is."""
    return target_pb2.GenerateEvent.FromString(raw).WhichOneof("event")
