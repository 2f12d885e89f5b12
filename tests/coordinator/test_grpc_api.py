"""The gRPC edge, without Ray: what a GenerationRequest means and what chunks carry."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coordinator.access.api_keys import ANYBODY
from coordinator.api.grpc import grpc_api
from outrider.errors import InvalidRequest, NotFound
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft


def request(**fields: Any) -> generation_pb2.GenerationRequest:
    return generation_pb2.GenerationRequest(**{"prompt": "import", **fields})


async def test_unset_fields_mean_the_documented_defaults(clusters: ClusterFactory) -> None:
    target, draft = clusters.target(), FakeDraft()
    async with clusters.open([target], [draft]) as cluster:
        chunks = [chunk async for chunk in grpc_api.generate(cluster.service, request())]
    (seen,) = target.requests
    assert (seen.sampling.temperature, seen.sampling.top_p, seen.sampling.max_tokens) == (1, 1, 16)
    assert seen.speculation.enabled
    assert len(chunks[-1].request_id) == 32
    assert chunks[-1].finished.num_output_tokens == 16


@pytest.mark.parametrize(
    "given",
    [{}, {"top_k": 4}, {"temperature": 0.0}, {"top_p": 0.5}, {"max_tokens": 5}, {"temperature": 0.5, "max_tokens": 5}],
    ids=str,
)
async def test_each_unset_field_has_the_default_that_it_has_over_http(
    clusters: ClusterFactory, given: dict[str, Any]
) -> None:
    """0 is a value like any other: an unset temperature samples, a temperature of 0 does not."""
    target = clusters.target()
    asked = request(sampling=common_pb2.SamplingParams(**given))
    async with clusters.open([target], settings={"seed_requests": False}) as cluster:
        chunks = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
        answer = await cluster.client.post("/v1/completions", json={"prompt": "import"} | given)
        assert answer.status_code == 200
    by_grpc, by_http = (each.sampling for each in target.requests)
    assert by_grpc == by_http
    assert all(by_grpc.HasField(name) for name in ("temperature", "top_p", "max_tokens"))
    is_greedy = given.get("temperature") == 0.0
    assert (chunks[-1].finished.decoding_mode == common_pb2.DECODING_MODE_GREEDY) == is_greedy


async def test_a_chat_without_max_tokens_has_what_the_context_leaves(clusters: ClusterFactory) -> None:
    target = clusters.target(eos_at=3)
    chat = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    asked = [
        generation_pb2.GenerationRequest(chat=chat),
        generation_pb2.GenerationRequest(chat=chat, sampling=common_pb2.SamplingParams(temperature=0)),
    ]
    async with clusters.open([target]) as cluster:
        for each in asked:
            assert [chunk async for chunk in grpc_api.generate(cluster.service, each)]
    assert [each.sampling.max_tokens for each in target.requests] == [1024 - len(target.requests[0].token_ids)] * 2


async def test_speculation_is_on_unless_it_is_turned_off(clusters: ClusterFactory) -> None:
    target, draft = clusters.target(), FakeDraft()
    async with clusters.open([target], [draft]) as cluster:
        for given in ({"num_speculative_tokens": 3}, {"enabled": True}, {"enabled": False}):
            asked = request(speculation=common_pb2.SpeculationParams(**given))
            assert [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    assert [each.speculation.enabled for each in target.requests] == [True, True, False]
    assert target.requests[0].speculation.num_speculative_tokens == 3


async def test_chunks_carry_text_tokens_and_origins_and_the_last_one_the_statistics(
    clusters: ClusterFactory,
) -> None:
    target = clusters.target(tokens_per_step=3, num_draft_tokens=4)
    asked = request(sampling=common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=9), request_id="mine")
    async with clusters.open([target]) as cluster:
        chunks = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    *steps, last = chunks
    assert {chunk.request_id for chunk in chunks} == {"mine"}
    assert [token_id for chunk in steps for token_id in chunk.token_ids] == clusters.script[:9]
    assert "".join(chunk.text for chunk in chunks) == clusters.tokenizer.decode(clusters.script[:9])
    assert list(steps[0].origins) == [
        common_pb2.TOKEN_ORIGIN_ACCEPTED, common_pb2.TOKEN_ORIGIN_ACCEPTED, common_pb2.TOKEN_ORIGIN_BONUS,
    ]  # fmt: skip
    assert not any(chunk.HasField("finished") for chunk in steps)
    assert last.finished.finish_reason == "length"
    assert last.finished.decoding_mode == common_pb2.DECODING_MODE_GREEDY
    assert last.finished.stats.num_accepted_draft_tokens == 6
    assert 0 < last.finished.time_to_first_token_ms <= last.finished.generation_time_ms


async def test_token_prompts_and_chats_are_understood(clusters: ClusterFactory) -> None:
    target = clusters.target()
    token_prompt = generation_pb2.GenerationRequest(prompt_token_ids=generation_pb2.TokenPrompt(token_ids=[5, 6]))
    chat = generation_pb2.GenerationRequest(
        chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    )
    async with clusters.open([target]) as cluster:
        for asked in (token_prompt, chat):
            assert [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    assert list(target.requests[0].token_ids) == [5, 6]
    assert list(target.requests[1].token_ids) == clusters.tokenizer.encode("hi\n")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"sampling": common_pb2.SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"sampling": common_pb2.SamplingParams(top_p=1.5)}, "top_p"),
        ({"sampling": common_pb2.SamplingParams(temperature=5)}, "temperature"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"deadline_ms": 4_000_000_000}, "deadline_ms"),
        ({"request_id": "x" * 65}, "request_id"),
        ({"speculation": common_pb2.SpeculationParams(enabled=False, always=True)}, "speculation.always"),
    ],
)
async def test_a_field_out_of_its_bound_is_refused_by_name(
    clusters: ClusterFactory, fields: dict[str, Any], parameter: str
) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        with pytest.raises(InvalidRequest) as caught:
            await anext(grpc_api.generate(cluster.service, request(**fields)))
    assert caught.value.parameter == parameter
    assert caught.value.grpc_code == "INVALID_ARGUMENT"


CROWD = 100_000
WORDS = [common_pb2.TokenSequence()] * CROWD


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"stop": [""] * CROWD}, "stop"),
        ({"bad_words": [""] * CROWD}, "bad_words"),
        ({"request_id": "x", "resume_from": [generation_pb2.ResumePoint()] * CROWD}, "resume_from"),
        (
            {"chat": generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user")] * CROWD)},
            "messages",
        ),
        ({"sampling": common_pb2.SamplingParams(bad_words=WORDS)}, "bad_words"),
        ({"sampling": common_pb2.SamplingParams(stop_token_ids=[1] * CROWD)}, "stop_token_ids"),
        ({"sampling": common_pb2.SamplingParams(allowed_token_ids=[1] * CROWD)}, "allowed_token_ids"),
    ],
    ids=["stop", "bad words", "points", "messages", "words of sampling", "stop ids", "allowed ids"],
)
async def test_a_crowd_of_nothing_is_counted_before_it_is_copied(
    clusters: ClusterFactory, fields: dict[str, Any], parameter: str
) -> None:
    asked = request(**fields) if "chat" not in fields else generation_pb2.GenerationRequest(**fields)
    async with clusters.open([clusters.target()]) as cluster:
        began_s = time.thread_time()
        with pytest.raises(InvalidRequest, match="at most") as caught:
            await anext(grpc_api.generate(cluster.service, asked))
        assert time.thread_time() - began_s < 0.02
    assert caught.value.parameter == parameter


async def test_a_request_without_input_is_refused(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        with pytest.raises(InvalidRequest, match="prompt_token_ids"):
            await anext(grpc_api.generate(cluster.service, generation_pb2.GenerationRequest()))


async def test_an_unknown_model_is_not_found(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        with pytest.raises(NotFound, match="demo"):
            await anext(grpc_api.generate(cluster.service, request(model="other")))


async def test_models_are_listed_with_their_workers(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target(), clusters.target()], [FakeDraft()]) as cluster:
        (model,) = grpc_api.list_models(cluster.service, ANYBODY).models
    assert (model.id, model.num_target_workers, model.num_draft_workers) == ("demo", 2, 1)
    assert model.max_model_len == 1024
