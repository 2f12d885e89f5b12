"""Every parameter of sampling reaches both workers as it was meant, over HTTP and over gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.api.grpc import grpc_api
from outrider.errors import InvalidRequest
from outrider.sampling_params import DecodingMode, SamplingParams
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import TEXT, Cluster, ClusterFactory
from tests.coordinator.fakes import FakeDraft, eventually


async def seen_by_target(cluster: Cluster, **body: Any) -> SamplingParams:
    response = await cluster.complete(**body)
    assert response.status_code == 200, response.text
    return SamplingParams.from_proto(cluster.targets[0].requests[-1].sampling)


async def test_http_parameters_mean_what_they_are_called(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        seen = await seen_by_target(
            cluster, temperature=0.5, top_p=0.5, top_k=7, min_p=0.25, typical_p=0.75, presence_penalty=1.5,
            frequency_penalty=-1.5, repetition_penalty=1.25, logit_bias={"5": 2, "3": -1.5}, min_tokens=4,
            allowed_token_ids=[1, 2], stop_token_ids=[9], seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=1,
            logprobs_mode="processed",
        )  # fmt: skip
    assert seen == SamplingParams(
        temperature=0.5, top_p=0.5, top_k=7, min_p=0.25, typical_p=0.75, presence_penalty=1.5,
        frequency_penalty=-1.5, repetition_penalty=1.25, logit_bias=((3, -1.5), (5, 2.0)), min_tokens=4,
        allowed_token_ids=frozenset({1, 2}), stop_token_ids=frozenset({9}), seed=3, ignore_eos=True,
        max_tokens=12, num_logprobs=2, num_prompt_logprobs=1, are_logprobs_processed=True,
    )  # fmt: skip


async def test_unset_parameters_change_nothing(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()], settings={"seed_requests": False}) as cluster:
        response = await cluster.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 200
    assert SamplingParams.from_proto(cluster.targets[0].requests[0].sampling) == SamplingParams()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 9}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
async def test_a_top_p_of_0_is_greedy_in_every_api(clusters: ClusterFactory, path: str, body: dict[str, Any]) -> None:
    """No seed is drawn for it. What the client sent comes back where an answer repeats it."""
    async with clusters.open([clusters.target(eos_at=3)]) as cluster:
        answer = await cluster.client.post(path, json={"top_p": 0, "temperature": 1, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("top_p", 0) == 0
    seen = SamplingParams.from_proto(cluster.targets[0].requests[0].sampling)
    assert (seen.decoding_mode, seen.seed) == (DecodingMode.GREEDY, None)


async def test_a_top_p_of_0_over_grpc_is_told_from_one_that_is_unset(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target(eos_at=3)]) as cluster:
        for sampling in (common_pb2.SamplingParams(top_p=0, seed=1), common_pb2.SamplingParams(seed=1)):
            asked = generation_pb2.GenerationRequest(prompt="x", sampling=sampling)
            grpc_api.fill_defaults(asked)
            assert [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    modes = [SamplingParams.from_proto(each.sampling).decoding_mode for each in cluster.targets[0].requests]
    assert modes == [DecodingMode.GREEDY, DecodingMode.COUPLED]


async def test_grpc_hands_every_parameter_on(clusters: ClusterFactory) -> None:
    sampling = SamplingParams(
        temperature=0.5, typical_p=0.75, presence_penalty=1.5, logit_bias=((3, -1.5),), bad_words=((4, 5),),
        allowed_token_ids=frozenset({1, 2}), min_tokens=2, seed=3, max_tokens=5, num_logprobs=0,
    )  # fmt: skip
    asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling.to_proto())
    async with clusters.open([clusters.target()]) as cluster:
        assert [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    assert SamplingParams.from_proto(cluster.targets[0].requests[0].sampling) == sampling


async def test_the_draft_worker_is_told_the_same_and_how_to_send_distributions(
    clusters: ClusterFactory,
) -> None:
    draft = FakeDraft()
    target = clusters.target(may_step=lambda num_tokens: bool(draft.requests))
    speculation = {
        "acceptance_rule": "token", "num_draft_probs": 8, "draft_probs_bits": 6, "num_speculative_tokens": 5,
    }  # fmt: skip
    async with clusters.open([target], [draft]) as cluster:
        await cluster.complete(speculation=speculation, min_p=0.5)
    told = draft.requests[0]
    assert told.sampling == target.requests[0].sampling
    assert told.num_prompt_tokens == target.requests[0].num_prompt_tokens == len(told.token_ids)
    expected = common_pb2.SpeculationParams(
        enabled=True, num_speculative_tokens=5, acceptance_rule=common_pb2.ACCEPTANCE_RULE_TOKEN,
        num_draft_probs=8, draft_probs_bits=6,
    )  # fmt: skip
    assert told.speculation == target.requests[0].speculation == expected


async def test_without_speculation_nothing_is_fed_ahead_and_no_draft_asked(clusters: ClusterFactory) -> None:
    target, draft = clusters.target(), FakeDraft()
    async with clusters.open([target], [draft]) as cluster:
        await cluster.complete(speculation={"enabled": False})
    assert target.requests[0].speculation == common_pb2.SpeculationParams(enabled=False, plain=True)
    assert draft.requests == []


class TestBadWords:
    async def test_a_word_is_forbidden_bare_and_behind_a_space(self, clusters: ClusterFactory) -> None:
        def encode(text: str) -> tuple[int, ...]:
            return tuple(clusters.tokenizer.encode(text, add_special_tokens=False))

        assert encode(" text")[-len(encode("text")) :] != encode("text"), "the space belongs to a token"
        assert encode(" zq")[1:] == encode("zq")
        async with clusters.open([clusters.target()]) as cluster:
            seen = await seen_by_target(cluster, bad_words=["text", "zq", " text"])
        assert set(seen.bad_words) == {encode("text"), encode(" text"), encode("zq")}
        assert len(seen.bad_words) == 3

    async def test_a_line_break_forbids_no_space(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            seen = await seen_by_target(cluster, bad_words=["\n"])
        assert tuple(clusters.tokenizer.encode(" ")) not in seen.bad_words

    async def test_grpc_takes_words_beside_tokens(self, clusters: ClusterFactory) -> None:
        sampling = common_pb2.SamplingParams(
            top_p=1, max_tokens=3, bad_words=[common_pb2.TokenSequence(token_ids=[1, 2])]
        )
        asked = generation_pb2.GenerationRequest(prompt="x", sampling=sampling, bad_words=["zq"])
        async with clusters.open([clusters.target()]) as cluster:
            assert [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
        seen = SamplingParams.from_proto(cluster.targets[0].requests[0].sampling)
        assert seen.bad_words == ((1, 2), tuple(clusters.tokenizer.encode("zq")))


class TestMinTokens:
    async def test_stop_strings_count_behind_them_only(self, clusters: ClusterFactory) -> None:
        stop = "x"
        first = len(clusters.tokenizer.encode(TEXT.partition(stop)[0])) + 1
        async with clusters.open([clusters.target()]) as cluster:
            early = (await cluster.complete(stop=[stop], max_tokens=40)).json()["choices"][0]["text"]
            late = (await cluster.complete(stop=[stop], max_tokens=40, min_tokens=first)).json()
        assert early == TEXT.partition(stop)[0]
        assert late["choices"][0]["text"] == stop.join(TEXT.split(stop)[:2])
        assert late["choices"][0]["stop_reason"] == stop

    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    async def test_more_than_max_tokens_are_refused(self, clusters: ClusterFactory, protocol: str) -> None:
        asked = generation_pb2.GenerationRequest(
            prompt="x", sampling=common_pb2.SamplingParams(top_p=1, max_tokens=3, min_tokens=4)
        )
        async with clusters.open([clusters.target()]) as cluster:
            if protocol == "http":
                response = await cluster.complete(max_tokens=3, min_tokens=4)
                assert response.json()["error"]["param"] == "min_tokens"
            else:
                with pytest.raises(InvalidRequest) as caught:
                    await anext(grpc_api.generate(cluster.service, asked))
                assert caught.value.parameter == "min_tokens"


class TestNothingToSay:
    @pytest.mark.parametrize("options", [{"echo": True}, {"prompt_logprobs": 0}])
    async def test_the_prompt_alone_is_scored(self, clusters: ClusterFactory, options: dict[str, Any]) -> None:
        target = clusters.target(tokens_per_step=3)
        async with clusters.open([target]) as cluster:
            answer = (await cluster.complete(max_tokens=0, **options)).json()
            await eventually(lambda: cluster.num_open == 0, "the target is free")
        assert answer["choices"][0]["text"] == ("import" if "echo" in options else "")
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert target.requests[0].sampling.max_tokens == 1

    async def test_an_end_right_away_is_still_the_length(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(eos_at=0)]) as cluster:
            answer = (await cluster.complete(max_tokens=0, echo=True)).json()
        assert answer["choices"][0]["finish_reason"] == "length"


class TestSeeds:
    async def test_a_seed_that_was_used_is_told(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()], settings={"seed_requests": False}) as cluster:
            given = (await cluster.complete(temperature=1, seed=2**64 - 1)).json()["metrics"]
            none = (await cluster.complete(temperature=1)).json()["metrics"]
        assert given["seed"] == 2**64 - 1
        assert (none["decoding_mode"], "seed" in none) == ("rejection", False)

    @pytest.mark.parametrize(
        "asked", [{"acceptance_rule": "token"}, {"num_draft_probs": 8}, {"draft_probs_bits": 16}], ids=str
    )
    async def test_a_request_for_rejection_sampling_is_not_seeded(
        self, clusters: ClusterFactory, asked: dict[str, object]
    ) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            told = (await cluster.complete(temperature=1, speculation=asked)).json()["metrics"]
        assert (told["decoding_mode"], "seed" in told) == ("rejection", False)

    async def test_sampled_requests_without_a_seed_get_one(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            drawn = [(await cluster.complete(temperature=1)).json()["metrics"] for _ in range(2)]
            greedy = (await cluster.complete()).json()["metrics"]
            own = (await cluster.complete(temperature=1, seed=5)).json()["metrics"]
        assert [each["decoding_mode"] for each in drawn] == ["coupled", "coupled"]
        assert drawn[0]["seed"] != drawn[1]["seed"]
        assert [request.sampling.seed for request in target.requests[:2]] == [each["seed"] for each in drawn]
        assert "seed" not in greedy
        assert own["seed"] == 5

    async def test_grpc_tells_it_too(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            told = []
            for temperature in (1, 0):
                sampling = common_pb2.SamplingParams(max_tokens=4, temperature=temperature)
                asked = generation_pb2.GenerationRequest(prompt="hi", sampling=sampling)
                told.append([chunk async for chunk in grpc_api.generate(cluster.service, asked)][-1].finished)
        assert told[0].seed == target.requests[0].sampling.seed
        assert not told[1].HasField("seed")


class TestNoTokenLeft:
    async def test_the_parameters_that_forbid_are_named(self, clusters: ClusterFactory) -> None:
        body = {"allowed_token_ids": [1], "logit_bias": {"1": -100}, "min_tokens": 2}
        async with clusters.open([clusters.target(no_token_at=0)]) as cluster:
            error = (await cluster.complete(**body)).json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "after 0 tokens" in error["message"]
        assert error["message"].endswith(": logit_bias, allowed_token_ids, min_tokens")

    async def test_within_a_stream_the_error_is_its_last_event(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(no_token_at=4)]) as cluster:
            response = await cluster.complete(stream=True, response_format={"type": "json_object"}, min_tokens=2)
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        assert "after 4 tokens" in events[-2]
        assert '"param":"response_format"' in events[-2]


async def test_tokens_found_in_a_cache_are_told(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target(num_cached_tokens=3)]) as cluster:
        told = (await cluster.complete()).json()["usage"]
        stopped = (await cluster.complete(stop=["return"])).json()["usage"]
    assert told["prompt_tokens_details"] == {"cached_tokens": 3}
    assert stopped["prompt_tokens_details"] == {"cached_tokens": 0}, "OpenAI's clients read it always"


async def test_what_only_the_last_event_tells_is_null_without_it(clusters: ClusterFactory) -> None:
    stats = common_pb2.SpeculationStats(num_hint_bytes=240, num_forced_tokens=3, num_stale_hints=2)
    async with clusters.open([clusters.target(stats=stats)]) as cluster:
        told = (await cluster.complete()).json()["metrics"]["speculative_decoding"]
        stopped = (await cluster.complete(stop=["return"])).json()["metrics"]["speculative_decoding"]
        asked = generation_pb2.GenerationRequest(prompt="x")
        chunks = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    assert (told["num_hint_bytes"], told["num_forced_tokens"]) == (240, 3)
    assert told["hint_bytes_per_token"] == pytest.approx(240 / 12)
    assert {stopped[name] for name in ("num_hint_bytes", "num_forced_tokens", "hint_bytes_per_token")} == {None}
    assert chunks[-1].finished.stats.num_hint_bytes == 240
