"""`prediction` at both edges: it reaches the target as tokens, is counted in the answer, and does no harm (I7)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.api.grpc import grpc_api
from coordinator.intake.generation_request import PROMPT_BYTES_MAX, PROMPT_TOKENS_MAX
from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import TEXT, ClusterFactory

CHAT = "/v1/chat/completions"
CONTEXT = 1024


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


def chat(**body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 12, **body}


@pytest.mark.parametrize(
    "given",
    [TEXT, [{"type": "text", "text": TEXT}], [{"type": "text", "text": TEXT[:5]}, {"type": "text", "text": TEXT[5:]}]],
    ids=["text", "part", "parts"],
)
async def test_a_chats_prediction_is_sent_to_the_target_as_tokens(clusters: ClusterFactory, given: Any) -> None:
    target = clusters.target(tokens_per_step=4)
    async with clusters.open([target]) as cluster:
        answer = (await cluster.client.post(CHAT, json=chat(prediction=content(given)))).json()
    assert list(target.requests[0].prediction) == clusters.script
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 12, "rejected_prediction_tokens": 0}
    counts = answer["metrics"]["speculative_decoding"]
    assert (counts["num_accepted_prediction_tokens"], counts["num_rejected_prediction_tokens"]) == (12, 0)


async def test_tokens_that_did_not_come_true_are_told_and_do_not_count_as_output(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target(tokens_per_step=4)]) as cluster:
        usage = (await cluster.client.post(CHAT, json=chat(prediction=content("1 " * 40)))).json()["usage"]
    details = usage["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] > 0
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == 12
    assert usage["completion_tokens"] == 12


async def test_a_stop_string_takes_no_count_away(clusters: ClusterFactory) -> None:
    """The target's last event does not come then."""
    async with clusters.open([clusters.target()]) as cluster:
        answer = (await cluster.complete(prediction=content(TEXT), stop=["return"])).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_completions_and_streams_have_the_counts(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        plain = (await cluster.complete()).json()["usage"]
        told = (await cluster.complete(prediction=content(TEXT))).json()["usage"]
        body = chat(prediction=content(TEXT), stream=True, stream_options={"include_usage": True})
        events = (await cluster.client.post(CHAT, json=body)).text.split("\n\n")
    assert "completion_tokens_details" not in plain
    assert told["completion_tokens_details"] == {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 0}
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 12


async def test_every_sequence_and_every_prompt_has_it(clusters: ClusterFactory) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        usage = (await cluster.complete(prompt=["a", "b"], n=2, prediction=content(TEXT))).json()["usage"]
    assert [list(each.prediction) for each in target.requests] == [clusters.script] * 4
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 4 * 12


async def test_a_replay_has_it_and_the_counts_of_both_targets_are_told(clusters: ClusterFactory) -> None:
    mortal, heir = clusters.target(dies_at=6), clusters.target()
    async with clusters.open([mortal, heir]) as cluster:
        for _ in range(8):  # until it is chosen
            answer = (await cluster.complete(prediction=content(TEXT))).json()
            if mortal.num_died:
                break
    assert mortal.num_died
    assert list(heir.requests[-1].prediction) == clusters.script
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 12


async def test_parameters_that_openai_refuses_beside_it_work(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        for others in (
            {"n": 2},
            {"logprobs": True},
            {"presence_penalty": 1, "frequency_penalty": 1},
            {"max_tokens": None, "max_completion_tokens": 5},
            {"tools": tools, "tool_choice": "none"},
            {"seed": 1, "temperature": 1},
        ):
            answer = await cluster.client.post(CHAT, json=chat(prediction=content(TEXT), **others))
            assert answer.status_code == 200, others


async def test_without_speculation_it_is_named_as_ignored(clusters: ClusterFactory) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        answer = await cluster.complete(prediction=content(TEXT), speculation={"enabled": False})
        other = await cluster.complete(prediction=content(TEXT))
    assert "prediction" in answer.headers["x-outrider-ignored"]
    assert "x-outrider-ignored" not in other.headers
    assert not target.requests[0].prediction


@pytest.mark.parametrize(
    ("prediction", "parameter"),
    [
        ("text", "prediction"),
        ([content("a")], "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        (content(5), "prediction.content"),
        (content([{"type": "image_url", "image_url": {"url": "x"}}]), "prediction.content[0].type"),
        (content([{"type": "text"}]), "prediction.content[0].text"),
        ({**content("a"), "other": 1}, "prediction.other"),
        (content("x" * (PROMPT_BYTES_MAX + 1)), "prediction"),
        (content("\u6f22" * (PROMPT_BYTES_MAX // 3 + 1)), "prediction"),
    ],
)
async def test_a_malformed_prediction_is_refused_by_name(
    clusters: ClusterFactory, prediction: Any, parameter: str
) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        answer = await cluster.client.post(CHAT, json=chat(prediction=prediction))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter
    assert not target.requests


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 200,
        "\u6f22\u5b57" * 300,
        "\U0001f600\u200d" * 200,
        "\u202e\ufffe",
        " " * 100_000,
        "a" * PROMPT_BYTES_MAX,
    ],
    ids=["empty", "nulls", "chinese", "joined", "direction", "blanks", "longest"],
)
async def test_any_text_may_be_predicted(clusters: ClusterFactory, text: str) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        answer = await cluster.client.post(CHAT, json=chat(prediction=content(text)))
        assert answer.status_code == 200
    assert len(target.requests[0].prediction) <= CONTEXT, "the context's length, whatever came"


async def test_an_unpaired_surrogate_is_refused_as_everywhere(clusters: ClusterFactory) -> None:
    body = json.dumps(chat(prediction=content("a\ud800b")))
    async with clusters.open([clusters.target()]) as cluster:
        answer = await cluster.client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert (await cluster.complete()).status_code == 200


async def test_grpc_takes_text_and_token_ids(clusters: ClusterFactory) -> None:
    target = clusters.target()
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=9)
    token_ids = generation_pb2.TokenPrompt(token_ids=clusters.script)
    async with clusters.open([target]) as cluster:
        for given in ({"prediction_text": TEXT}, {"prediction_token_ids": token_ids}):
            asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling, **given)
            chunks = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
            stats = chunks[-1].finished.stats
            assert (stats.num_prediction_tokens, stats.num_accepted_prediction_tokens) == (9, 9)
    assert [list(each.prediction) for each in target.requests] == [clusters.script] * 2


@pytest.mark.parametrize(
    "token_ids", [[1 << 20], [2**32 - 1], [1] * (PROMPT_TOKENS_MAX + 1)], ids=["unknown", "largest", "many"]
)
async def test_grpc_refuses_token_ids_by_name(clusters: ClusterFactory, token_ids: list[int]) -> None:
    asked = generation_pb2.GenerationRequest(
        prompt="import", prediction_token_ids=generation_pb2.TokenPrompt(token_ids=token_ids)
    )
    async with clusters.open([clusters.target()]) as cluster:
        with pytest.raises(InvalidRequest) as error:
            assert [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
    assert error.value.parameter == "prediction_token_ids"
