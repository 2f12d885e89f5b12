"""A session that becomes longer than its draft worker can follow ends there, and nobody takes that for a fault."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc.aio
import pytest

from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachmentEnded, AttachmentRefused, AttachSession, CommitReceived, Event, Unsubscribe
from draft_worker.scheduler import DraftScheduler
from draft_worker.server import DraftServicer
from outrider.observability.telemetry import DraftMetrics
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.models import VOCAB_SIZE
from tests.served import listening, new_allocator

LIMIT = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def scheduler() -> DraftScheduler:
    return DraftScheduler(DraftLimits(max_num_seqs=2, max_model_len=LIMIT), new_allocator(), VOCAB_SIZE)


def commit(made: DraftScheduler, from_len: int, num_tokens: int) -> list[object]:
    return [*made.handle(CommitReceived("a", from_len, [1] * num_tokens, True, False))]


def test_it_is_followed_as_long_as_a_hint_can_come_and_left_at_once_when_none_can() -> None:
    made = scheduler()
    made.handle(AttachSession("a", 1, "t:1", [1] * 4, GREEDY, 7))
    assert commit(made, 4, LIMIT - 6) == []
    session = made.progress("a")
    assert session is not None
    assert session.committed_len == LIMIT - 2
    assert made.next_step() is not None, "one more token can be drafted"
    assert commit(made, LIMIT - 2, 1) == [Unsubscribe("t:1", "a"), AttachmentEnded("a", is_finished=False)]
    assert made.num_sessions == 0
    (refused,) = made.handle(AttachSession("a", 2, "t:1", [1] * (LIMIT - 1), GREEDY, 7))
    assert isinstance(refused, AttachmentRefused)
    assert f"--max-model-len {LIMIT}" in refused.error.message


class Unheard:
    """Takes events, and nothing comes of them."""

    def submit(self, event: Event, *, is_release: bool = False, peer: str | None = None) -> bool:
        return True

    def has_room(self, peer: str) -> bool:
        return True

    def has_events(self) -> bool:
        return False

    def stalled_s(self) -> float:
        return 0.0


@pytest.mark.parametrize("is_finished", [True, False])
async def test_its_coordinator_hears_whether_the_session_has_finished(*, is_finished: bool) -> None:
    info = common_pb2.WorkerInfo(vocab_size=VOCAB_SIZE)
    servicer = DraftServicer(info, scheduler(), DraftMetrics("tiny", "draft"), None)
    servicer.bind(Unheard())
    request = draft_pb2.AttachRequest(
        session_id="a", hint_token="token", token_ids=[5], target_address="127.0.0.1:1", sampling=GREEDY.to_proto()
    )
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(servicer.close)
        channel = await stack.enter_async_context(listening(server))
        call = draft_pb2_grpc.DraftStub(channel).Attach(request, timeout=30)
        statuses: list[bool] = []
        async for status in call:
            if not statuses:  # the call is open
                servicer.dispatch([AttachmentEnded("a", is_finished)])
            statuses.append(status.is_finished)
        assert await call.code() is grpc.StatusCode.OK
    assert statuses[-1] is is_finished
    assert not any(statuses[:-1])
