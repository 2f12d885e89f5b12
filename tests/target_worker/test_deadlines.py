"""Workers keep the deadlines of those who do not, over real streams."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import grpc
import pytest

from outrider.observability.telemetry import TargetMetrics
from protos.outrider.v1 import common_pb2, draft_pb2, target_pb2
from target_worker.runner import run_step
from target_worker.serving.generate_messages import parse_generate
from target_worker.serving.server import TargetServicer
from tests.hostile import WAIT_S
from tests.served import ATTACH, GENERATE, event_kind, served_draft, served_target

LONG = target_pb2.GenerateRequest(
    session_id="a",
    token_ids=[5, 6, 7],
    sampling=common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=250, ignore_eos=True),
    speculation=common_pb2.SpeculationParams(plain=True),
)


@pytest.mark.thorough
def test_a_target_ends_a_session_whose_time_is_up_and_frees_it_before_its_caller_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slowly(*arguments: Any) -> Any:
        time.sleep(0.005)
        return run_step(*arguments)

    monkeypatch.setattr("target_worker.runner.run_step", slowly)
    with served_target() as target:
        request = target_pb2.GenerateRequest()
        request.CopyFrom(LONG)
        request.deadline_ms = 500  # the text would take more than twice as long
        started_s = time.monotonic()
        code, answers = target.call(GENERATE, request.SerializeToString())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started_s >= 0.5
        assert [*map(event_kind, answers[:2])] == ["waiting", "started"]
        target.runner.run(target.until_idle())
        # Now it knows how long its steps take: this one is sent away before any work.
        code, answers = target.call(GENERATE, request.SerializeToString())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        code, _ = target.call(GENERATE, LONG.SerializeToString())
        assert code is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("deadline_ms", "of_call_s", "expected"),
    [(0, None, float("inf")), (0, 3.0, 103.0), (2000, None, 102.0), (2000, 3.0, 102.0), (9000, 3.0, 103.0)],
)
def test_the_sooner_of_both_deadlines_counts(deadline_ms: int, of_call_s: float | None, expected: float) -> None:
    class Context:
        def time_remaining(self) -> float | None:
            return of_call_s

    servicer = TargetServicer(common_pb2.WorkerInfo(), TargetMetrics("m", "t"), cast(Any, None), now=lambda: 100.0)
    request = target_pb2.GenerateRequest(deadline_ms=deadline_ms)
    assert servicer._deadline_at(request, cast(Any, Context())) == expected


def test_priority_and_deadline_reach_the_scheduler() -> None:
    request = target_pb2.GenerateRequest()
    request.CopyFrom(LONG)
    request.priority = -3
    event = parse_generate(request, 12.5)
    assert (event.priority, event.deadline_at) == (-3, 12.5)


def test_a_draft_worker_lets_go_of_a_session_whose_time_is_up() -> None:
    with served_draft() as draft:
        request = draft_pb2.AttachRequest(
            session_id="a", attachment=1, target_address="127.0.0.1:1", token_ids=[5, 6, 7],
            sampling=LONG.sampling, deadline_ms=150,
        )  # fmt: skip
        started_s = time.monotonic()
        code, _ = draft.call(ATTACH, request.SerializeToString())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.15 <= time.monotonic() - started_s < WAIT_S / 2

        async def until_free() -> None:
            async with asyncio.timeout(WAIT_S):
                while draft.scheduler.num_sessions:  # noqa: ASYNC110 - the model's thread owns them
                    await asyncio.sleep(0.005)

        draft.runner.run(until_free())
        draft.scheduler.allocator.check_integrity([])
