"""Whatever message comes over gRPC: an answer or a refusal of ours, and the next client is served as ever."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from coordinator.api.grpc import grpc_api
from outrider.errors import InvalidRequest, OutriderError
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.held import HeldCluster, held
from tests.hostile import EFFORTS, LATE_MS, WAIT_S, mangled, messages, try_out

# Mostly valid where it decides, so that what comes after is reached.
SAMPLING = messages(
    common_pb2.SamplingParams,
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    top_p=st.just(1.0),
    max_tokens=st.integers(0, 40),
    min_tokens=st.integers(0, 3),
    logprobs_mode=st.integers(0, 2),
)
ANY = messages(generation_pb2.GenerationRequest)
NEARLY_RIGHT = st.builds(
    lambda request, sampling, prompt: generation_pb2.GenerationRequest(
        prompt=prompt,
        sampling=sampling,
        request_id=request.request_id,
        n=request.n % 70,
        best_of=request.best_of % 70,
        echo=request.echo,
        stop=request.stop[:20],
        bad_words=request.bad_words[:300],
        speculation=request.speculation,
    ),
    ANY,
    SAMPLING,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)


@EFFORTS
def test_any_message_is_read_or_refused_by_the_name_of_a_field(effort: int) -> None:
    def check(request: generation_pb2.GenerationRequest) -> None:
        refusal = None
        try:
            grpc_api.read_request(request)
        except InvalidRequest as error:
            refusal = error
        assert refusal is None or refusal.parameter

    try_out(check, effort, 200, request=ANY | NEARLY_RIGHT)


@pytest.mark.thorough
@EFFORTS
def test_any_message_is_answered(clusters: ClusterFactory, effort: int) -> None:
    with held(clusters) as cluster:

        def check(raw: bytes) -> None:
            with suppress(DecodeError):
                request = generation_pb2.GenerationRequest.FromString(raw)
                refusal, finished = cluster.runner.run(answer(cluster, request))
                if refusal is None:
                    assert sorted(finished) == list(range(request.n or 1))
                else:
                    late = {504} if 0 < request.deadline_ms < LATE_MS else set()
                    assert refusal.http_status in {400, 404} | late, refusal

        kinds = ANY | NEARLY_RIGHT
        try_out(check, effort, 200, raw=kinds.map(lambda each: each.SerializeToString()) | mangled(kinds))


async def answer(
    cluster: HeldCluster, request: generation_pb2.GenerationRequest
) -> tuple[OutriderError | None, list[int]]:
    """Returns the error that a request was refused with, or None, and the indices of the sequences that finished."""
    finished: list[int] = []
    try:
        async with (
            asyncio.timeout(WAIT_S),
            aclosing(grpc_api.generate(cluster.cluster.service, request)) as chunks,
        ):
            async for chunk in chunks:
                finished += [chunk.index] * chunk.HasField("finished")
    except OutriderError as error:
        return error, finished
    return None, finished
