"""Requests as strangers' clients send them: lists of prompts, messages of other servers, parameters of accounts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from coordinator.api.http.generation_calls import IGNORED_HEADER
from coordinator.api.schema.gbnf import as_lark
from coordinator.service.prompts import PROMPTS_AT_ONCE
from outrider import __version__
from outrider.errors import InvalidRequest
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.test_http_api import CALL, TOOL, events_of, listening

USER = {"role": "user", "content": "hi"}


async def chat(cluster: Cluster, *messages: dict[str, Any], **body: Any) -> httpx.Response:
    """POST /v1/chat/completions of a short conversation, changed by `body`."""
    content = {"messages": list(messages) or [USER], "temperature": 0, "max_tokens": 3, **body}
    return await cluster.client.post("/v1/chat/completions", json=content)


def ignored(response: httpx.Response) -> list[str]:
    """The parameters that the response reports as ignored."""
    return response.headers.get(IGNORED_HEADER, "").split(", ")


class TestSeveralPrompts:
    @pytest.mark.parametrize("prompts", [["import", "def"], [[5, 6], [7]]], ids=["texts", "token ids"])
    async def test_each_prompt_has_its_choices_in_order(self, clusters: ClusterFactory, prompts: list[Any]) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answer = (await cluster.complete(prompt=prompts, n=2, max_tokens=4, return_token_ids=True)).json()
        encode = clusters.tokenizer.encode
        first, second = (encode(each) if isinstance(each, str) else each for each in prompts)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [first, first, second, second]
        assert answer["usage"]["prompt_tokens"] == len(first) + len(second)
        assert answer["usage"]["completion_tokens"] == 4 * 4

    async def test_a_stream_is_the_same_answer_in_pieces(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(tokens_per_step=3)]) as cluster:
            body = {"prompt": ["import", "def", "class"], "max_tokens": 9}
            whole = (await cluster.complete(**body)).json()
            events = events_of(await cluster.complete(**body, stream=True, stream_options={"include_usage": True}))
        texts = [""] * 3
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert events[-1]["usage"] == whole["usage"]
        assert len({event["id"] for event in events}) == 1

    async def test_more_prompts_than_fit_at_once_wait_for_each_other(self, clusters: ClusterFactory) -> None:
        num_prompts = 3 * PROMPTS_AT_ONCE
        async with clusters.open([clusters.target()], settings={"requests_max": 4}) as cluster:
            answer = await cluster.complete(prompt=["import"] * num_prompts, max_tokens=2)
            assert cluster.num_open == 0
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == num_prompts

    @pytest.mark.thorough
    async def test_a_prompt_that_fails_ends_the_whole_request(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(dies_at=2)]) as cluster:
            answer = await cluster.complete(prompt=["import", "def"])
            assert answer.status_code == 503
            assert cluster.num_open == 0

    async def test_it_cannot_be_resumed(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.client.post(
                "/v1/completions",
                json={"prompt": ["a", "b"], "stream": True},
                headers={"Last-Event-ID": "1"},
            )
        assert answer.status_code == 400


class TestMessages:
    @pytest.mark.parametrize(
        ("message", "names"),
        [
            ({**USER, "cache_control": {"type": "ephemeral"}}, ["cache_control"]),
            ({"role": "assistant", "content": None, "provider_specific_fields": {}}, ["provider_specific_fields"]),
            ({"role": "assistant", "content": None, "annotations": [], "audio": None}, ["annotations"]),
            ({"role": "assistant", "tool_calls": [CALL | {"index": 0}]}, ["tool_calls[].index"]),
            ({"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}, ["content[].mood"]),
            ({"role": "user", "content": "x", "tool_call_id": "1"}, ["tool_call_id"]),
        ],
    )  # fmt: skip
    async def test_fields_that_cannot_change_the_prompt_are_reported_as_ignored(
        self, clusters: ClusterFactory, message: dict[str, Any], names: list[str]
    ) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answer = await chat(cluster, USER, message)
        assert answer.status_code == 200
        assert ignored(answer) == [f"messages[].{name}" for name in names]

    @pytest.mark.parametrize(
        ("messages", "prompt"),
        [
            ([{"role": "developer", "content": "x"}], "x"),
            ([USER, {"role": "function", "name": "f", "content": "4"}], "hi\n4"),
            ([USER, {"role": "tool", "content": "4"}], "hi\n4"),
            ([{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}], "a\nb"),
            ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER], "no\nhi"),
            ([USER, {"role": "assistant", "content": None}, USER], "hi\n\nhi"),
        ],
    )
    async def test_forms_of_other_clients_reach_the_prompt(
        self, clusters: ClusterFactory, messages: list[dict[str, Any]], prompt: str
    ) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            assert (await chat(cluster, *messages)).status_code == 200
            expected = cluster.tokenizer.encode(prompt, add_special_tokens=False)
        assert list(target.requests[0].token_ids)[: len(expected)] == expected

    @pytest.mark.parametrize("arguments", ["not JSON", {"city": "Rome"}, ""])
    async def test_arguments_of_earlier_calls_may_be_anything(self, clusters: ClusterFactory, arguments: Any) -> None:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        async with clusters.open([clusters.target()]) as cluster:
            assert (await chat(cluster, USER, {"role": "assistant", "tool_calls": [call]}, USER)).status_code == 200
            old = {"role": "assistant", "content": None, "function_call": call["function"]}
            assert (await chat(cluster, USER, old, USER)).status_code == 200


class TestParameters:
    async def test_those_that_cannot_change_the_output_are_named_in_a_header(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            plain = await chat(cluster)
            sent = {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "x"}
            whole = await chat(cluster, **sent)
            stream = await chat(cluster, **sent, stream=True, stream_options={"include_obfuscation": True})
        assert IGNORED_HEADER not in plain.headers
        assert set(ignored(whole)) == set(sent)
        assert set(ignored(stream)) == {*sent, "stream_options.include_obfuscation"}
        assert whole.json()["choices"] == plain.json()["choices"]

    async def test_a_negative_seed_is_one_of_the_seeds(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            assert (await cluster.complete(seed=-1, temperature=1)).status_code == 200
        assert target.requests[0].sampling.seed == (1 << 64) - 1

    async def test_words_for_the_chat_template_are_ignored_by_one_that_does_not_read_them(
        self, clusters: ClusterFactory
    ) -> None:
        template = "{{ messages[-1].content }}{{ reasoning_effort }}"
        async with clusters.open([clusters.target()]) as cluster:
            assert ignored(await chat(cluster, reasoning_effort="low", verbosity="high")) == [
                "reasoning_effort",
                "verbosity",
            ]
        target = clusters.target()
        async with clusters.open([target], settings={"chat_template": template}) as cluster:
            answer = await chat(cluster, reasoning_effort="low")
            expected = cluster.tokenizer.encode("hilow", add_special_tokens=False)
        assert IGNORED_HEADER not in answer.headers
        assert list(target.requests[0].token_ids) == expected

    async def test_a_prompt_is_truncated_from_the_left(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target], max_model_len=20) as cluster:
            await cluster.complete(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, max_tokens=1)
            answer = await cluster.complete(prompt=[9] * 50, truncate_prompt_tokens=-1, max_tokens=8)
        assert list(target.requests[0].token_ids) == [7, 8]
        assert len(target.requests[1].token_ids) == 12
        assert answer.json()["usage"]["completion_tokens"] == 8

    async def test_an_echo_of_a_truncated_prompt_is_what_is_left_of_it(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.complete(prompt="import os", truncate_prompt_tokens=1, echo=True, max_tokens=1)
            tokenizer = cluster.tokenizer
            last = tokenizer.decode(tokenizer.encode("import os")[-1:])
        assert answer.json()["choices"][0]["text"].startswith(last)

    async def test_a_chat_goes_on_with_its_last_message(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            body = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
            answer = (await chat(cluster, USER, {"role": "assistant", "content": "So far"}, **body)).json()
            plain = (await chat(cluster)).json()
            expected = cluster.tokenizer.encode("So far", add_special_tokens=False)
        assert list(target.requests[0].token_ids)[-len(expected) :] == expected
        content = plain["choices"][0]["message"]["content"]
        assert answer["choices"][0]["message"]["content"] == "So far" + content

    async def test_functions_are_tools_and_answered_in_their_own_form(self, clusters: ClusterFactory) -> None:
        text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        script = clusters.tokenizer.encode(text, add_special_tokens=False)
        async with clusters.open([clusters.target(script_of=lambda request: script, eos_at=len(script))]) as cluster:
            body = {"functions": [TOOL["function"]], "max_tokens": 200}
            forced = (await chat(cluster, **body, function_call={"name": "f"})).json()["choices"][0]
            choice = (await chat(cluster, **body)).json()["choices"][0]
            events = events_of(await chat(cluster, **body, stream=True))
        assert forced["message"]["function_call"] == choice["message"]["function_call"]
        assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
        assert choice["finish_reason"] == "function_call"
        assert forced["finish_reason"] == "stop", "as at OpenAI, where the client has named the function"
        calls = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
        assert "".join(call.get("arguments", "") for call in calls) == "{}"
        assert [call["name"] for call in calls if "name" in call] == ["f"]


async def test_a_name_that_no_header_may_hold_is_shown_without_what_it_may_not(clusters: ClusterFactory) -> None:
    """Names of fields are the client's; a line break among them would begin another header."""
    message = {"role": "user", "content": "x", "a\r\nSet-Cookie: b": 1, "ü\x7f,": 2}
    body = {"messages": [message], "model": "demo"}
    bodies = {
        "/v1/chat/completions": body | {"max_tokens": 1},
        "/v1/messages": body | {"max_tokens": 1},
        "/v1/messages/count_tokens": body,
    }
    async with (
        clusters.open([clusters.target()]) as cluster,
        listening(cluster) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answers = [await client.post(path, json=each) for path, each in bodies.items()]
    assert [answer.status_code for answer in answers] == [200] * 3
    for answer in answers:
        names = answer.headers["x-outrider-ignored"].split(", ")
        assert {"messages[].a??Set-Cookie: b", "messages[].???"} <= set(names)
        assert "set-cookie" not in answer.headers


class TestUsage:
    async def test_each_chunk_has_the_usage_until_then_if_asked_for(self, clusters: ClusterFactory) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with clusters.open([clusters.target(tokens_per_step=2)]) as cluster:
            events = events_of(await cluster.complete(max_tokens=6, stream=True, stream_options=options))
            without = events_of(
                await cluster.complete(max_tokens=6, stream=True, stream_options={"continuous_usage_stats": True})
            )
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[0] == 2
        assert counts[-1] == 6
        assert all("usage" not in event for event in without)

    async def test_a_stop_token_counts_as_generated(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(eos_at=4)]) as cluster:
            answer = (await cluster.complete(return_token_ids=True)).json()
        assert len(answer["choices"][0]["token_ids"]) == 4
        assert answer["usage"]["completion_tokens"] == 5


class TestSpeculation:
    @pytest.mark.parametrize(("limit", "expected"), [(0, 6), (2, 2), (20, 6)])
    async def test_a_histogram_has_an_entry_for_each_number_of_hints(
        self, clusters: ClusterFactory, limit: int, expected: int
    ) -> None:
        async with clusters.open([clusters.target()], num_speculative_tokens=6) as cluster:
            answer = (await cluster.complete(speculation={"num_speculative_tokens": limit})).json()
        figures = answer["metrics"]["speculative_decoding"]
        assert figures["num_spec_tokens"] == expected
        assert figures["acceptance_histogram"] == [0] * (expected + 1)


class TestContext:
    @pytest.mark.parametrize("max_tokens", [12, 5000])
    async def test_an_output_ends_where_the_context_does(self, clusters: ClusterFactory, max_tokens: int) -> None:
        async with clusters.open([clusters.target()], max_model_len=15) as cluster:
            answer = (await cluster.complete(prompt=[5] * 10, max_tokens=max_tokens)).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "length"


class TestOtherCalls:
    async def test_a_version_and_a_ping_need_no_key_and_the_load_is_told(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            assert (await cluster.client.get("/version")).json() == {"version": __version__}
            assert (await cluster.client.get("/ping")).status_code == 200
            assert (await cluster.client.get("/load")).json() == {"server_load": 0}
        async with clusters.open([]) as cluster:
            assert (await cluster.client.get("/ping")).status_code == 503

    async def test_an_unknown_model_has_openais_code(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answers = [await cluster.complete(model="other"), await cluster.client.get("/v1/models/other")]
        for answer in answers:
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert answer.json()["error"]["param"] == "model"

    async def test_web_pages_of_permitted_origins_may_call(self, clusters: ClusterFactory) -> None:
        asks = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST"}
        async with clusters.open([clusters.target()]) as cluster:
            refused = await cluster.client.options("/v1/completions", headers=asks)
        settings = {"cors_origins": ("https://chat.example.com",)}
        async with clusters.open([clusters.target()], settings=settings) as cluster:
            asked = await cluster.client.options("/v1/completions", headers=asks)
            answer = await cluster.client.get("/v1/models", headers={"Origin": "https://chat.example.com"})
            other = await cluster.client.get("/v1/models", headers={"Origin": "https://other.example.com"})
        assert "access-control-allow-origin" not in refused.headers
        assert asked.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert IGNORED_HEADER.lower() in answer.headers["access-control-expose-headers"].lower()
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("grammar", "lark"),
    [('root ::= "a" | "b"', 'start: "a"'), ('start: "a" // ::=', 'start: "a" // ::='), ('start: "a"', 'start: "a"')],
)
def test_a_grammar_in_gbnf_becomes_one_in_lark(grammar: str, lark: str) -> None:
    assert lark in as_lark(grammar)


@pytest.mark.parametrize("grammar", ["root ::= (", "root ::= other", "root ::= " + "(" * 100_000])
def test_gbnf_that_is_not_valid_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid GBNF"):
        as_lark(grammar)
