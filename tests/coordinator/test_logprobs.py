"""Log probabilities, as OpenAI and vLLM write them: the formats, and how they travel with their tokens."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest

from coordinator.api.grpc import grpc_api
from coordinator.intake.generation_request import GenerationInput
from coordinator.output import logprobs
from coordinator.output.logprobs import TokenNames
from coordinator.output.prompt_scores import PromptScores
from outrider.errors import WorkerFailed
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2, generation_pb2, target_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import token_logprobs
from tests.coordinator.test_http_api import events_of, openai_client


def of(logprob: float, *top: tuple[int, float]) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprob,
        rank=9,
        top_token_ids=[each[0] for each in top],
        top_logprobs=[each[1] for each in top],
    )


@pytest.fixture(scope="module")
def names(clusters: ClusterFactory) -> TokenNames:
    return TokenNames(clusters.tokenizer)


class TestFormats:
    def test_a_completion_has_the_token_itself_beside_the_likeliest(self, names: TokenNames) -> None:
        a, b, c = (names.tokenizer.encode(text)[0] for text in "abc")  # type: ignore[attr-defined]
        shown = logprobs.for_completion(names, [a], [of(-3, (b, -1), (c, -2))], [4], 1)
        assert shown == {
            "tokens": ["a"], "token_logprobs": [-3], "top_logprobs": [{"b": -1, "a": -3}], "text_offset": [4],
        }  # fmt: skip

    def test_a_chat_has_exactly_the_likeliest(self, names: TokenNames) -> None:
        a, b = (names.tokenizer.encode(text)[0] for text in "ab")  # type: ignore[attr-defined]
        (entry,) = logprobs.for_chat(names, [a], [of(-3, (b, -1))], 1)["content"]
        assert entry == {
            "token": "a", "logprob": -3, "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -1, "bytes": [98]}],
        }  # fmt: skip

    def test_a_token_that_is_part_of_a_character_shows_its_bytes(self, clusters: ClusterFactory) -> None:
        names, token_ids = TokenNames(clusters.tokenizer), clusters.tokenizer.encode("𓀀")
        content = logprobs.for_chat(names, token_ids, [of(-1)] * len(token_ids), 0)["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "𓀀"
        assert content[0]["token"] == "bytes:\\xf0"

    def test_minus_infinity_is_a_number_that_json_has(self, names: TokenNames) -> None:
        shown = logprobs.for_completion(names, [1], [of(float("-inf"), (2, float("-inf")))], [0], 1)
        assert json.loads(json.dumps(shown, allow_nan=False))["token_logprobs"] == [-9999.0]
        assert set(shown["top_logprobs"][0].values()) == {-9999.0}

    def test_tokens_may_be_shown_by_their_ids(self, clusters: ClusterFactory) -> None:
        names = TokenNames(clusters.tokenizer, as_token_ids=True)
        shown = logprobs.for_completion(names, [65], [of(-1, (66, -2))], [0], 1)
        assert shown["tokens"] == ["token_id:65"]
        assert set(shown["top_logprobs"][0]) == {"token_id:65", "token_id:66"}

    def test_a_prompt_begins_with_null_and_names_tokens_by_id(self, names: TokenNames) -> None:
        first, second = logprobs.for_prompt(names, [65, 66], [of(-3, (67, -1), (66, -3))], 2)
        assert first is None
        assert second is not None
        assert {key: (value["logprob"], value["rank"]) for key, value in second.items()} == {
            "66": (-3, 9), "67": (-1, 1),
        }  # fmt: skip
        assert second["67"]["decoded_token"] == names.text(67)

    def test_offsets_are_where_the_tokens_text_begins(self) -> None:
        assert logprobs.offsets(["ab", "", "𓀀", "c"], 10) == ([10, 12, 12, 13], 14)

    def test_a_text_without_tokens_is_the_least_likely(self) -> None:
        assert logprobs.mean_logprob([]) < logprobs.mean_logprob([of(float("-inf"))]) < -9000
        assert logprobs.mean_logprob([of(-1), of(-2)]) == -1.5


class TestCompletions:
    async def test_each_token_has_its_own(self, clusters: ClusterFactory) -> None:
        async with (
            clusters.open([clusters.target(tokens_per_step=3)]) as cluster,
            openai_client(cluster) as client,
        ):
            answer = await client.completions.create(model="demo", prompt="import", max_tokens=7, logprobs=2)
        shown = answer.choices[0].logprobs
        assert shown is not None
        assert shown.token_logprobs == [-1.0 - at for at in range(7)]
        assert shown.tokens is not None
        assert "".join(shown.tokens) == answer.choices[0].text
        assert shown.text_offset == [len("".join(shown.tokens[:at])) for at in range(7)]
        assert shown.top_logprobs is not None
        assert [len(top) for top in shown.top_logprobs] == [3] * 7

    @pytest.mark.parametrize("stop", [[], ["+ 1"]])
    async def test_in_a_stream_they_come_with_their_tokens(self, clusters: ClusterFactory, stop: list[str]) -> None:
        body = {"max_tokens": 30, "logprobs": 1, "return_token_ids": True, "stop": stop}
        async with clusters.open([clusters.target(tokens_per_step=3)]) as cluster:
            whole = (await cluster.complete(**body)).json()["choices"][0]
            events = events_of(await cluster.complete(stream=True, **body))
        choices = [event["choices"][0] for event in events]
        for choice in choices:
            num_shown = len(choice["logprobs"]["tokens"]) if choice["logprobs"] else 0
            assert num_shown == len(choice.get("token_ids", []))
        for name, values in whole["logprobs"].items():
            streamed = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
            assert list(itertools.chain(*streamed)) == values
        assert len(whole["logprobs"]["tokens"]) == len(whole["token_ids"])
        assert bool(stop) == (len(whole["token_ids"]) < 30)

    async def test_an_echo_puts_the_prompt_first_and_the_first_token_has_none(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            choice = (await cluster.complete(echo=True, logprobs=1, max_tokens=4)).json()["choices"][0]
            silent = (await cluster.complete(echo=True, logprobs=1, max_tokens=0)).json()["choices"][0]
        num_prompt = len(clusters.tokenizer.encode("import"))
        assert choice["text"] == "import" + clusters.tokenizer.decode(clusters.script[:4])
        shown = choice["logprobs"]
        assert "".join(shown["tokens"]) == choice["text"]
        assert shown["token_logprobs"] == [
            None, *[-0.5 * at for at in range(1, num_prompt)], *[-1.0 - at for at in range(4)],
        ]  # fmt: skip
        assert shown["top_logprobs"][0] is None
        assert shown["text_offset"] == [len("".join(shown["tokens"][:at])) for at in range(num_prompt + 4)]
        assert silent["text"] == "import"
        assert len(silent["logprobs"]["tokens"]) == num_prompt

    async def test_an_echo_alone_asks_for_none(self, clusters: ClusterFactory) -> None:
        target = clusters.target(tokens_per_step=3)
        async with clusters.open([target]) as cluster:
            choice = (await cluster.complete(echo=True, prompt=clusters.script[:3])).json()["choices"][0]
            events = events_of(await cluster.complete(echo=True, stream=True))
        assert choice["text"].startswith(clusters.tokenizer.decode(clusters.script[:3]))
        assert choice["logprobs"] is None
        assert events[0]["choices"][0]["text"] == "import"
        assert not target.requests[0].sampling.HasField("num_prompt_logprobs")

    async def test_prompt_logprobs_are_cut_to_what_was_asked_for(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            choice = (await cluster.complete(echo=True, logprobs=5, prompt_logprobs=2)).json()["choices"][0]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert len(others) == len(clusters.tokenizer.encode("import")) - 1
        assert all(len(each) in (2, 3) for each in others)


class TestChats:
    async def test_content_has_one_entry_per_token(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, openai_client(cluster) as client:
            answer = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=6, logprobs=True,
                top_logprobs=2, extra_body={"prompt_logprobs": 0},
            )  # fmt: skip
        shown = answer.choices[0].logprobs
        assert shown is not None
        assert shown.content is not None
        assert "".join(entry.token for entry in shown.content) == answer.choices[0].message.content
        assert [len(entry.top_logprobs) for entry in shown.content] == [2] * 6
        assert [entry.logprob for entry in shown.content] == [-1.0 - at for at in range(6)]
        assert answer.model_extra is not None
        assert answer.model_extra["prompt_logprobs"][0] is None

    async def test_none_are_shown_unless_asked_for(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, openai_client(cluster) as client:
            answer = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=6, logprobs=False
            )
        assert answer.choices[0].logprobs is None
        assert not cluster.targets[0].requests[0].sampling.HasField("num_logprobs")


class TestFaults:
    async def test_a_replay_shows_the_prompt_once(self, clusters: ClusterFactory) -> None:
        body = {"prompt_logprobs": 1, "echo": True, "logprobs": 0}
        mortal, heir = clusters.target(dies_at=6), clusters.target()
        async with clusters.open([mortal, heir]) as cluster:
            for _ in range(50):
                choice = (await cluster.complete(**body)).json()["choices"][0]
                if mortal.requests:
                    break
        assert choice["text"] == "import" + clusters.tokenizer.decode(clusters.script[:12])
        num_prompt = len(clusters.tokenizer.encode("import"))
        assert len(choice["prompt_logprobs"]) == num_prompt
        assert len(choice["logprobs"]["tokens"]) == num_prompt + 12

    async def test_tokens_without_the_logprobs_asked_for_are_not_believed(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = clusters.target()
        step_of = target._step

        def forgetful(request: Any, position: int, count: int) -> target_pb2.StepOutput:
            step = step_of(request, position, count)
            step.ClearField("logprobs")
            return step

        monkeypatch.setattr(target, "_step", forgetful)
        async with clusters.open([target]) as cluster:
            assert (await cluster.complete(logprobs=1)).status_code == 503
            assert (await cluster.complete()).status_code == 200
        heir = clusters.target()
        async with clusters.open([target, heir]) as cluster:
            for _ in range(50):
                num_seen = len(target.requests)
                text = (await cluster.complete(logprobs=1, echo=True)).json()["choices"][0]["text"]
                assert text == "import" + clusters.tokenizer.decode(clusters.script[:12])
                if len(target.requests) > num_seen:
                    break

    async def test_a_prompt_is_shown_complete_or_not_at_all(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            spec = await cluster.service.prepare(
                GenerationInput(
                    request_id="r", token_ids=[5] * 4,
                    sampling=SamplingParams(max_tokens=5, num_prompt_logprobs=0),
                )
            )  # fmt: skip
        scores, chunk = PromptScores(spec), target_pb2.PromptLogprobs
        scores.add(chunk(first_position=1, logprobs=[token_logprobs(-1, 1, 0), token_logprobs(-2, 2, 0)]))
        with pytest.raises(WorkerFailed, match="2 of 3"):
            scores.shown()
        scores.add(chunk(first_position=2, logprobs=[token_logprobs(-9, 2, 0), token_logprobs(-3, 3, 0)]))
        (output,) = scores.shown()
        assert [each.logprob for each in output.logprobs] == [-1, -2, -3]
        assert scores.shown() == []


async def test_grpc_chunks_carry_them(clusters: ClusterFactory) -> None:
    sampling = SamplingParams(max_tokens=5, num_logprobs=3, num_prompt_logprobs=1).to_proto()
    asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling, echo=True)
    async with clusters.open([clusters.target(tokens_per_step=2)]) as cluster:
        first, *others = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    assert first.text == "import"
    assert len(first.prompt_logprobs) == len(clusters.tokenizer.encode("import")) - 1
    assert {len(each.top_token_ids) for each in first.prompt_logprobs} == {1}
    for chunk in others:
        assert len(chunk.logprobs) == len(chunk.token_ids)
    assert {len(each.top_token_ids) for chunk in others for each in chunk.logprobs} == {3}


async def test_a_bound_is_told_in_the_clients_words(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()]) as cluster, openai_client(cluster) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="demo", prompt="x", logprobs=21)
    assert caught.value.param == "logprobs"
    assert "logprobs is 21" in caught.value.message
