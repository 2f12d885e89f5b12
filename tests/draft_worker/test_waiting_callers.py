"""A caller that waits for a draft worker hears that it is there."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc.aio
import pytest

from draft_worker import server as draft_server
from draft_worker.limits import DraftLimits
from draft_worker.scheduler import DraftScheduler
from draft_worker.server import DraftServicer
from outrider.observability.telemetry import DraftMetrics
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.models import VOCAB_SIZE
from tests.served import listening, new_allocator
from tests.target_worker.test_waiting_callers import SlowCompiler, refusal_of


async def test_a_caller_hears_that_the_worker_is_there_while_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its coordinator would take silence for the end of the worker, and give it up."""
    monkeypatch.setattr(draft_server, "STATUS_EVERY_S", 0.02)
    compiler = SlowCompiler()
    scheduler = DraftScheduler(DraftLimits(max_num_seqs=8, max_model_len=64), new_allocator(), VOCAB_SIZE)
    info = common_pb2.WorkerInfo(vocab_size=VOCAB_SIZE)
    servicer = DraftServicer(info, scheduler, DraftMetrics("tiny", "draft"), compiler)
    request = draft_pb2.AttachRequest(
        session_id="s",
        hint_token="token",
        token_ids=[5],
        target_address="127.0.0.1:1",
        sampling=common_pb2.SamplingParams(top_p=1, max_tokens=4, grammar=common_pb2.Grammar(regex="a")),
    )
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(servicer.close)
        channel = await stack.enter_async_context(listening(server))
        call = draft_pb2_grpc.DraftStub(channel).Attach(request, timeout=30)
        for _ in range(3):
            status = await call.read()
            assert isinstance(status, draft_pb2.AttachStatus)
            assert not status.is_finished
        compiler.gate.set()
        refusal = await refusal_of(call)
        assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "longer than 5 s" in (refusal.details() or "")
