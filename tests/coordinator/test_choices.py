"""Several texts of one request: seeds, interleaving, ranking, and that they live and die together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.api.grpc import grpc_api
from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2, generation_pb2, target_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft, FakeTarget, eventually
from tests.coordinator.test_http_api import events_of, openai_client


def by_seed(clusters: ClusterFactory, **options: Any) -> FakeTarget:
    """A target whose text begins at the token with the seed's number, so that each seed has a text of its own."""
    script = clusters.script

    def script_of(request: target_pb2.GenerateRequest) -> list[int]:
        first = request.sampling.seed % len(script)
        return script[first:] + script[:first]

    return clusters.target(script_of=script_of, **options)


def text_of_seed(clusters: ClusterFactory, seed: int, num_tokens: int) -> str:
    script = clusters.script * 4
    return clusters.tokenizer.decode(script[seed : seed + num_tokens])


async def test_choice_i_uses_the_seed_plus_i(clusters: ClusterFactory) -> None:
    async with clusters.open([by_seed(clusters)]) as cluster, openai_client(cluster) as client:
        answer = await client.completions.create(model="demo", prompt="import", max_tokens=6, n=3, seed=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [text_of_seed(clusters, seed, 6) for seed in (2, 3, 4)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18
    assert answer.usage.prompt_tokens == len(clusters.tokenizer.encode("import"))


async def test_seeds_wrap_around(clusters: ClusterFactory) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        await cluster.complete(n=2, seed=2**64 - 1)
    assert {request.sampling.seed for request in target.requests} == {2**64 - 1, 0}


async def test_all_go_to_one_target_while_it_has_room(clusters: ClusterFactory) -> None:
    targets = [clusters.target(step_s=0.005), clusters.target(step_s=0.005)]
    async with clusters.open(targets, max_num_seqs=4) as cluster:
        await cluster.complete(n=4)
        assert sorted(len(target.requests) for target in targets) == [0, 4]
        await cluster.complete(n=6)
    assert sum(len(target.requests) for target in targets) == 10
    assert all(len(target.requests) >= 1 for target in targets)


async def test_a_stream_interleaves_them_by_index(clusters: ClusterFactory) -> None:
    body = {"n": 3, "seed": 1, "max_tokens": 9, "stream_options": {"include_usage": True}}
    async with clusters.open([by_seed(clusters, step_s=0.005)]) as cluster:
        *events, usage = events_of(await cluster.complete(stream=True, **body))
    choices = [event["choices"][0] for event in events]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text_of_seed(clusters, 1 + index, 9)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order), "they ran side by side"
    assert usage["usage"]["completion_tokens"] == 27
    assert usage["metrics"]["speculative_decoding"]["num_steps"] == 27


async def test_each_chat_choice_begins_with_its_role(clusters: ClusterFactory) -> None:
    async with clusters.open([by_seed(clusters)]) as cluster:
        response = await cluster.client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True, "max_tokens": 3},
        )
    first, second, *_ = events_of(response)
    assert [each["choices"][0]["index"] for each in (first, second)] == [0, 1]
    assert first["choices"][0]["delta"]["role"] == "assistant"


class TestBestOf:
    async def test_the_likeliest_by_token_come_back_best_first(self, clusters: ClusterFactory) -> None:
        likelihood = {5: -3.0, 6: -1.0, 7: -2.0, 8: -4.0}
        target = by_seed(clusters, logprob_of=lambda request, position: likelihood[request.sampling.seed])
        async with clusters.open([target]) as cluster:
            answer = (await cluster.complete(n=2, best_of=4, seed=5, max_tokens=4)).json()
        assert [choice["text"] for choice in answer["choices"]] == [text_of_seed(clusters, seed, 4) for seed in (6, 7)]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 16, "what was dropped was generated too"
        assert {request.sampling.num_logprobs for request in target.requests} == {0}

    async def test_a_long_text_is_judged_by_its_mean(self, clusters: ClusterFactory) -> None:
        target = by_seed(clusters, logprob_of=lambda request, position: -1.0 - request.sampling.seed - 0.1 * position)
        async with clusters.open([target]) as cluster:
            answer = (await cluster.complete(best_of=3, seed=0, max_tokens=4, logprobs=0)).json()
        assert answer["choices"][0]["text"] == text_of_seed(clusters, 0, 4)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx([-1, -1.1, -1.2, -1.3])

    async def test_as_many_as_n_need_no_ranking_and_may_be_streamed(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            assert events_of(await cluster.complete(n=2, best_of=2, stream=True))
        assert not target.requests[0].sampling.HasField("num_logprobs")


class TestTogether:
    async def test_if_one_fails_the_request_fails_and_all_are_freed(self, clusters: ClusterFactory) -> None:
        def script_of(request: target_pb2.GenerateRequest) -> list[int]:
            if request.sampling.seed == 4:
                raise RuntimeError("this one fails")
            return clusters.script

        target = clusters.target(script_of=script_of, step_s=0.005)
        async with clusters.open([target], [FakeDraft()]) as cluster:
            response = await cluster.complete(n=3, seed=3, max_tokens=400)
            assert response.status_code == 503
            await eventually(lambda: cluster.num_open == 0, "every worker is free")

    async def test_leaving_cancels_all(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.02), FakeDraft()
        async with clusters.open([target], [draft]) as cluster, openai_client(cluster) as client:
            stream = await client.completions.create(model="demo", prompt="x", max_tokens=200, n=4, stream=True)
            await anext(aiter(stream))
            await eventually(lambda: target.num_open == 4, "all four run")
            await stream.close()
            await eventually(lambda: cluster.num_open == 0, "every worker is free")
        assert target.num_cancelled == 4

    async def test_requests_are_counted_once_and_their_tokens_all(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            await cluster.complete(n=3, max_tokens=5)
            text = (await cluster.client.get("/metrics")).text
        labels = '{engine="coordinator",model_name="demo"}'
        assert f"outrider_generation_tokens_total{labels} 15.0" in text
        assert f"outrider_e2e_request_latency_seconds_count{labels} 1.0" in text
        num_prompt = len(clusters.tokenizer.encode("import"))
        assert f"outrider_prompt_tokens_total{labels} {num_prompt}.0" in text
        assert f"outrider_num_requests_running{labels} 0.0" in text


class TestOverGrpc:
    async def test_chunks_tell_their_text_by_index(self, clusters: ClusterFactory) -> None:
        sampling = common_pb2.SamplingParams(top_p=1, temperature=1, seed=1, max_tokens=6)
        asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling, n=2)
        async with clusters.open([by_seed(clusters)]) as cluster:
            chunks = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
        for index in range(2):
            own = [chunk for chunk in chunks if chunk.index == index]
            assert "".join(chunk.text for chunk in own) == text_of_seed(clusters, 1 + index, 6)
            assert [chunk.HasField("finished") for chunk in own] == [False] * (len(own) - 1) + [True]

    async def test_the_best_come_when_all_are_known(self, clusters: ClusterFactory) -> None:
        target = by_seed(clusters, logprob_of=lambda request, position: -10.0 + request.sampling.seed)
        sampling = common_pb2.SamplingParams(top_p=1, temperature=1, seed=1, max_tokens=6)
        asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling, best_of=3)
        async with clusters.open([target]) as cluster:
            chunks = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
        assert "".join(chunk.text for chunk in chunks) == text_of_seed(clusters, 3, 6)
        assert not any(chunk.logprobs for chunk in chunks)

    @pytest.mark.parametrize(
        ("fields", "parameter"),
        [({"n": 129}, "n"), ({"n": 2, "best_of": 1}, "best_of"), ({"best_of": 129}, "best_of")],
    )
    async def test_bounds_are_those_of_http(
        self, clusters: ClusterFactory, fields: dict[str, int], parameter: str
    ) -> None:
        asked = generation_pb2.GenerationRequest(prompt="import", **fields)  # type: ignore[arg-type]
        async with clusters.open([clusters.target()]) as cluster:
            with pytest.raises(InvalidRequest) as caught:
                await anext(grpc_api.generate(cluster.service, asked))
        assert caught.value.parameter == parameter


async def test_many_requests_of_many_texts_stay_apart(clusters: ClusterFactory) -> None:
    targets = [by_seed(clusters, step_s=0.001, tokens_per_step=2) for _ in range(2)]
    async with clusters.open(targets, [FakeDraft()]) as cluster:
        answers = await asyncio.gather(*(cluster.complete(n=3, seed=seed, max_tokens=10) for seed in range(8)))
        await eventually(lambda: cluster.num_open == 0, "every worker is free")
    for seed, answer in enumerate(answers):
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert texts == [text_of_seed(clusters, seed + index, 10) for index in range(3)]
