"""A target worker that says anything at all: its requests have an answer or a documented error, and the next target's
are answered as ever."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import strategies as st

from protos.outrider.v1 import common_pb2, target_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.coordinator.held import held
from tests.hostile import EFFORTS, ENUM, FLOAT, UINT32, messages, try_out


class LyingTarget(FakeTarget):
    """Says `said` to requests of the user `lie`, and tells the truth to others."""

    said: list[target_pb2.GenerateEvent]

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[target_pb2.GenerateEvent]:
        if request.sampling.seed != 666:
            async for event in super().Generate(request, context):
                yield event
            return
        for event in self.said:
            yield event


TOKEN_IDS = st.lists(st.integers(0, 400) | UINT32, max_size=6)
LOGPROBS = st.lists(
    st.builds(
        common_pb2.TokenLogprobs,
        logprob=FLOAT,
        rank=UINT32,
        top_token_ids=TOKEN_IDS,
        top_logprobs=st.lists(FLOAT, max_size=6),
    ),
    max_size=6,
)
ANYTHING = messages(
    target_pb2.GenerateEvent,
    step=messages(target_pb2.StepOutput, token_ids=TOKEN_IDS, origins=st.lists(ENUM, max_size=6), logprobs=LOGPROBS),
    prompt=messages(target_pb2.PromptLogprobs, logprobs=LOGPROBS),
)
COUNTS = st.sampled_from([0, 1, 5, 1024, 1025, 2**32 - 1])
STEPS = st.builds(
    lambda tokens, drafted, accepted, branches, step_ms: target_pb2.GenerateEvent(
        step=target_pb2.StepOutput(
            token_ids=[token_id for token_id, _, _ in tokens],
            origins=[origin for _, origin, _ in tokens],
            logprobs=[common_pb2.TokenLogprobs(logprob=logprob) for _, _, logprob in tokens],
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            num_branches=branches,
            num_accepted_branches=branches,
            step_ms=step_ms,
        )
    ),
    st.lists(st.tuples(st.integers(0, 400) | UINT32, ENUM, FLOAT), max_size=12),
    COUNTS,
    COUNTS,
    COUNTS,
    FLOAT,
)
ENDS = st.builds(
    lambda reason, queue_ms, prefill_ms, count: target_pb2.GenerateEvent(
        finished=target_pb2.SessionFinished(
            reason=reason,
            queue_ms=queue_ms,
            prefill_ms=prefill_ms,
            num_cached_tokens=count,
            stats=common_pb2.SpeculationStats(num_stale_hints=count, num_hint_bytes=count),
        )
    ),
    ENUM,
    FLOAT,
    FLOAT,
    UINT32,
)
STORIES = st.builds(
    lambda steps, end: [*steps, *end], st.lists(STEPS | ANYTHING, max_size=4), st.lists(ENDS, max_size=1)
)


@pytest.mark.thorough
@EFFORTS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_whatever_a_target_says_the_client_is_answered(clusters: ClusterFactory, stream: bool, effort: int) -> None:
    target = LyingTarget(clusters.script, tokens_per_step=5)
    # It is not passed over for long, so that its next lie is heard too.
    with held(clusters, target=target, settings={"quarantine_s": 1e-6}) as cluster:

        def check(said: list[target_pb2.GenerateEvent], wishes: dict[str, Any]) -> None:
            target.said = said
            body = {"prompt": "import", "max_tokens": 9, "seed": 666, "stream": stream} | wishes
            answer = cluster.send("POST", "/v1/completions", json=body)
            assert answer.status_code in (200, 400, 503), answer.text
            for event in answer.text.split("\n\n") if answer.text.startswith("data: ") else [answer.text]:
                if event not in ("", "data: [DONE]"):
                    json.loads(event.removeprefix("data: "), parse_constant=pytest.fail)

        wishes = st.fixed_dictionaries(
            {},
            optional={
                "logprobs": st.integers(0, 3),
                "prompt_logprobs": st.integers(0, 3),
                "echo": st.just(True),
                "return_token_ids": st.just(True),
                "stop": st.just(["x"]),
                "speculation": st.just({"detail": True}),
                "stream_options": st.just({"include_usage": True}),
            },
        )
        try_out(check, effort, 100, said=STORIES, wishes=wishes)
