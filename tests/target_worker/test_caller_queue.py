"""A caller that does not read costs its own session, and a bounded part of the memory."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.errors import Overloaded
from outrider.grammar import GrammarCompiler
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import DecodingMode
from protos.outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_worker.messages import Action, CancelSession, Event, SessionAdmitted, TokensCommitted
from target_worker.serving.caller_queue import CALLER_BYTES_MAX, CallerQueue, size_of
from target_worker.serving.server import TargetServicer
from tests.hostile import WAIT_S

PLAIN = common_pb2.TOKEN_ORIGIN_PLAIN


def step(num_tokens: int = 1, num_alternatives: int = 0) -> TokensCommitted:
    logprobs = None
    if num_alternatives:
        logprobs = [
            TokenLogprobs(-float(at), 1, tuple((10**5 + each, -0.5 * each) for each in range(num_alternatives)))
            for at in range(num_tokens)
        ]
    token_ids = [10**5 + at for at in range(num_tokens)]
    return TokensCommitted("s", token_ids, [PLAIN] * num_tokens, 0, 0, 1.5, logprobs)


async def test_what_is_put_comes_out_in_order() -> None:
    queue = CallerQueue()
    actions: list[Action] = [SessionAdmitted("s", DecodingMode.GREEDY), step(1), step(2, 5)]
    getting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert all(queue.put(action) for action in actions)
    assert [await getting, await queue.get(), await queue.get()] == actions
    assert queue.num_bytes == 0


@pytest.mark.parametrize(("num_tokens", "num_alternatives"), [(1, 0), (1, 20), (16, 20)])
async def test_what_waits_is_bounded_in_bytes_whatever_a_step_carries(num_tokens: int, num_alternatives: int) -> None:
    queue, action = CallerQueue(), step(num_tokens, num_alternatives)
    for _ in range(CALLER_BYTES_MAX // size_of(action)):
        assert queue.put(action)
    assert queue.num_bytes <= CALLER_BYTES_MAX
    assert not queue.put(action)
    assert queue.is_overrun
    assert queue.num_bytes == 0
    assert queue.put(action), "its end is told once"
    assert queue.num_bytes == 0
    with pytest.raises(Overloaded, match="unread"):
        await queue.get()


@pytest.mark.parametrize(("num_tokens", "num_alternatives"), [(1, 0), (1, 20), (8, 20)])
def test_steps_take_no_more_memory_than_they_are_counted_for(num_tokens: int, num_alternatives: int) -> None:
    num = (16 << 20) // size_of(step(num_tokens, num_alternatives))
    gc.collect()
    before = psutil.Process().memory_info().rss
    kept = [step(num_tokens, num_alternatives) for _ in range(num)]
    assert psutil.Process().memory_info().rss - before < sum(map(size_of, kept)) + (2 << 20)


class Busy:
    """Stands for a model thread; keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def submit(self, event: Event, *, is_release: bool = False, peer: str | None = None) -> bool:
        self.events.append(event)
        return True

    def stalled_s(self) -> float:
        return 0.0


async def rest_of(call: Any) -> list[target_pb2.GenerateEvent]:
    events = []
    while isinstance(event := await call.read(), target_pb2.GenerateEvent):
        events.append(event)
    return events


async def test_a_caller_that_does_not_read_loses_its_session() -> None:
    grammars = GrammarCompiler(Path("none"), vocab_size=100, eos_token_ids=frozenset())
    servicer = TargetServicer(common_pb2.WorkerInfo(vocab_size=100), TargetMetrics("tiny", "t"), grammars)
    thread = Busy()
    servicer.bind(thread)  # type: ignore[arg-type]
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=10**6, num_logprobs=20)
    request = target_pb2.GenerateRequest(session_id="s", token_ids=[5], sampling=sampling)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = target_pb2_grpc.TargetStub(channel).Generate(request)
            servicer_waits = asyncio.ensure_future(call.read())
            async with asyncio.timeout(WAIT_S):
                while not servicer._callers:  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(0.005)
                servicer.dispatch([step()])
                await servicer_waits
                (caller,) = servicer._callers.values()
                while not caller.is_overrun:
                    servicer.dispatch([step(16, 20) for _ in range(64)])
                    assert caller.num_bytes <= CALLER_BYTES_MAX
                    await asyncio.sleep(0)
                assert thread.events[1:] == [CancelSession("s")], "at once, though its stream is still open"
                servicer.dispatch([step(16, 20)])
                assert caller.num_bytes == 0
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rest_of(call)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                while servicer._callers:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
    finally:
        await server.stop(None)
