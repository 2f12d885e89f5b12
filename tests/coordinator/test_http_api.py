"""The OpenAI surface: served by uvicorn to the real `openai` package, and its refusals."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from coordinator.api.http.application import create_app
from tests.coordinator.conftest import TEXT, Cluster, ClusterFactory
from tests.coordinator.fakes import FakeDraft, eventually

CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@asynccontextmanager
async def listening(cluster: Cluster) -> AsyncIterator[str]:
    """Serves the cluster's HTTP edge on a real socket; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(cluster.service), log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        await eventually(lambda: server.started, "uvicorn listens")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def openai_client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(cluster) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class TestOpenAIPackage:
    async def test_a_completion(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, openai_client(cluster) as client:
            answer = await client.completions.create(
                model="demo", prompt="import", max_tokens=10, temperature=0, seed=3, n=1, user="somebody",
                extra_body={"top_k": 5, "min_p": 0.1, "speculation": {"num_speculative_tokens": 2}},
            )  # fmt: skip
        assert answer.choices[0].text == clusters.tokenizer.decode(clusters.script[:10])
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 10
        sampling = cluster.targets[0].requests[0].sampling
        assert (sampling.top_k, sampling.seed, sampling.top_p) == (5, 3, 1)
        assert sampling.min_p == pytest.approx(0.1)

    async def test_a_streamed_chat_with_usage(self, clusters: ClusterFactory) -> None:
        target = clusters.target(tokens_per_step=3, num_draft_tokens=4, eos_at=len(clusters.script))
        async with clusters.open([target], [FakeDraft()]) as cluster, openai_client(cluster) as client:
            stream = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == TEXT
        assert chunks[-2].choices[0].finish_reason == "stop"
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens == len(clusters.script) + 1, "the end-of-sequence token was generated too"
        metrics = chunks[-1].model_extra["metrics"] if chunks[-1].model_extra else {}
        assert metrics["decoding_mode"] == "coupled"
        assert metrics["seed"] >= 0, "so that the answer can be repeated"
        assert metrics["speculative_decoding"]["num_spec_steps"] == -(-len(clusters.script) // 3)

    async def test_a_chat_without_a_bound_may_fill_the_context(self, clusters: ClusterFactory) -> None:
        target = clusters.target(tokens_per_step=50)
        async with clusters.open([target], max_model_len=300) as cluster, openai_client(cluster) as client:
            answer = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
            )
        assert answer.usage is not None
        assert answer.usage.total_tokens == 300
        assert answer.choices[0].message.role == "assistant"

    async def test_models_are_listed(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, openai_client(cluster) as client:
            assert [model.id async for model in client.models.list()] == ["demo"]
            assert (await client.models.retrieve("demo")).id == "demo"

    async def test_an_unknown_model_is_not_found_and_those_served_are_named(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, openai_client(cluster) as client:
            with pytest.raises(openai.NotFoundError, match="demo") as caught:
                await client.completions.create(model="gpt", prompt="x")
        assert caught.value.param == "model"

    async def test_a_wrong_parameter_is_named(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, openai_client(cluster) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="demo", prompt="x", temperature=3)
        assert caught.value.param == "temperature"

    async def test_closing_a_stream_frees_both_workers(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.02), FakeDraft()
        async with clusters.open([target], [draft]) as cluster, openai_client(cluster) as client:
            stream = await client.completions.create(model="demo", prompt="x", max_tokens=200, stream=True)
            await anext(aiter(stream))
            await stream.close()
            await eventually(lambda: cluster.num_open == 0, "both workers are free")
        assert target.num_cancelled == 1

    async def test_giving_up_on_an_answer_frees_both_workers(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.02), FakeDraft()
        async with clusters.open([target], [draft]) as cluster, openai_client(cluster) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(model="demo", prompt="x", max_tokens=200, timeout=1.5)
            await eventually(lambda: cluster.num_open == 0, "both workers are free")
        assert target.num_cancelled == 1


class TestStreams:
    async def test_the_first_chunk_leaves_before_the_second_exists(self, clusters: ClusterFactory) -> None:
        target = clusters.target(falls_silent_at=1)
        async with clusters.open([target]) as cluster, listening(cluster) as url:
            async with (
                httpx.AsyncClient() as client,
                client.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response,
            ):
                async for line in response.aiter_lines():
                    assert json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    break
            await eventually(lambda: cluster.num_open == 0, "the stream was left")

    async def test_streamed_and_whole_text_are_the_same(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(tokens_per_step=3)]) as cluster:
            whole = (await cluster.complete(max_tokens=30, stop=["+ 2"])).json()["choices"][0]["text"]
            events = events_of(await cluster.complete(max_tokens=30, stop=["+ 2"], stream=True))
        assert "".join(event["choices"][0]["text"] for event in events) == whole

    async def test_usage_comes_only_when_asked_for(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            without = events_of(await cluster.complete(stream=True))
            with_usage = events_of(await cluster.complete(stream=True, stream_options={"include_usage": True}))
        assert all("usage" not in event for event in without)
        assert [event["usage"] for event in with_usage[:-1]] == [None] * (len(with_usage) - 1)
        assert with_usage[-1]["choices"] == []
        assert with_usage[-1]["usage"]["total_tokens"] > 12

    async def test_detail_tells_each_tokens_origin_and_text(self, clusters: ClusterFactory) -> None:
        target = clusters.target(tokens_per_step=3, num_draft_tokens=4)
        async with clusters.open([target]) as cluster:
            events = events_of(
                await cluster.complete(
                    stream=True, stream_options={"include_usage": True}, speculation={"detail": True}
                )
            )
        details = [event["outrider"] for event in events if "outrider" in event]
        assert details[0]["origins"] == ["accepted", "accepted", "bonus"]
        assert "".join(piece for detail in details for piece in detail["pieces"]) == clusters.tokenizer.decode(
            [token_id for detail in details for token_id in detail["token_ids"]]
        )
        speculation = events[-1]["metrics"]["speculative_decoding"]
        assert speculation["per_step_accepted"] == [2, 2, 2, 2]
        assert speculation["per_step_drafted"] == [4, 4, 4, 4]

    async def test_token_ids_come_when_asked_for(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(tokens_per_step=5)]) as cluster:
            whole = (await cluster.complete(return_token_ids=True)).json()["choices"][0]
            events = events_of(await cluster.complete(return_token_ids=True, stream=True))
        assert whole["token_ids"] == clusters.script[:12]
        assert whole["prompt_token_ids"] == clusters.tokenizer.encode("import")
        choices = [event["choices"][0] for event in events]
        assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == clusters.script[:12]
        assert choices[0]["prompt_token_ids"] == clusters.tokenizer.encode("import")


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "parameter"),
        [
            ({"temperture": 1}, "temperture"),
            ({"temperature": "1"}, "temperature"),
            ({"temperature": -0.1}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"top_p": -0.1}, "top_p"),
            ({"top_k": -2}, "top_k"),
            ({"min_p": 1.5}, "min_p"),
            ({"seed": -(1 << 63) - 1}, "seed"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"stop": ["x"] * 65}, "stop"),
            ({"stop": ""}, "stop"),
            ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
            ({"prompt": ["a", [1]]}, "prompt"),
            ({"prompt": ["a"] * 1025}, "prompt"),
            ({"prompt": ["a", ""]}, "prompt"),
            (
                {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_event_ids": True}},
                "stream_options.include_event_ids",
            ),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
            ({"prompt": []}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [1, 99999]}, "prompt"),
            ({"prompt": [1, True]}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"typical_p": 0}, "typical_p"),
            ({"presence_penalty": 2.5}, "presence_penalty"),
            ({"frequency_penalty": -2.5}, "frequency_penalty"),
            ({"repetition_penalty": 0}, "repetition_penalty"),
            ({"logit_bias": {"1": 101}}, "logit_bias"),
            ({"logit_bias": {"99999": 1}}, "logit_bias"),
            ({"logit_bias": {"one": 1}}, "logit_bias"),
            ({"logit_bias": {str(number): 0 for number in range(1025)}}, "logit_bias"),
            ({"bad_words": [""]}, "bad_words"),
            ({"bad_words": ["x"] * 257}, "bad_words"),
            ({"bad_words": ["x " * 100]}, "bad_words"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
            ({"stop_token_ids": [99999]}, "stop_token_ids"),
            ({"min_tokens": 6}, "min_tokens"),
            ({"min_tokens": -1}, "min_tokens"),
            ({"top_k": 1 << 32}, "top_k"),
            ({"top_k": 10**400}, "top_k"),
            ({"seed": 10**400}, "seed"),
            ({"logprobs": 10**400}, "logprobs"),
            ({"n": 0}, "n"),
            ({"n": 129}, "n"),
            ({"best_of": 129}, "best_of"),
            ({"n": 3, "best_of": 2}, "best_of"),
            ({"best_of": 2, "stream": True}, "best_of"),
            ({"logprobs": 21}, "logprobs"),
            ({"logprobs": True}, "logprobs"),
            ({"prompt_logprobs": 21}, "prompt_logprobs"),
            ({"logprobs_mode": "cooked"}, "logprobs_mode"),
            ({"suffix": "x"}, "suffix"),
            ({"guided_json": {}}, "guided_json"),
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"structured_outputs": {}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            (
                {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
                "structured_outputs.whitespace_pattern",
            ),
            ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
            ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
            ({"structured_outputs": {"regex": "a" * (1 << 18) + "a"}}, "structured_outputs"),
            (
                {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
                "structured_outputs",
            ),
            ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
            ({"speculation": {"num_speculative_tokens": 33}}, "speculation.num_speculative_tokens"),
            ({"speculation": {"num_draft_probs": 65}}, "speculation.num_draft_probs"),
            ({"speculation": {"draft_probs_bits": 3}}, "speculation.draft_probs_bits"),
            ({"speculation": {"acceptance_rule": "maybe"}}, "speculation.acceptance_rule"),
            ({"speculation": {"off": True}}, "speculation.off"),
            ({"speculation": {"enabled": False, "always": True}}, "speculation.always"),
            ({"request_id": "a\nb"}, "request_id"),
        ],
    )
    async def test_a_wrong_parameter_is_refused_by_name(
        self, clusters: ClusterFactory, body: dict[str, Any], parameter: str
    ) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            content = json.dumps({"prompt": "import", "max_tokens": 5, **body})
            response = await cluster.client.post("/v1/completions", content=content)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(parameter)
        assert parameter.split(".")[-1] in error["message"]
        assert target.requests == []

    @pytest.mark.parametrize(
        ("body", "parameter"),
        [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "messages[0].content[0].type",
            ),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
            (
                {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
                "messages[0].tool_calls",
            ),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
            ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"tools": [TOOL, TOOL]}, "tools"),
            ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
            (
                {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
                "tool_choice",
            ),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
            ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "tool_choice"),
            ({"continue_final_message": True}, "continue_final_message"),
            ({"modalities": ["audio"]}, "modalities"),
            ({"best_of": 2}, "best_of"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"logprobs": 1}, "logprobs"),
            ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ],
    )
    async def test_chat_refuses_by_name_too(
        self, clusters: ClusterFactory, body: dict[str, Any], parameter: str
    ) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            content = {"messages": [{"role": "user", "content": "hi"}], **body}
            response = await cluster.client.post("/v1/chat/completions", json=content)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(parameter)

    async def test_values_that_change_nothing_are_accepted(self, clusters: ClusterFactory) -> None:
        neutral: dict[str, Any] = {
            "n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "logit_bias": {},
            "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "bad_words": [],
            "response_format": {"type": "text"}, "top_k": -1, "stop": None, "seed": None, "min_p": None,
            "priority": 0, "store": False, "structured_outputs": None, "min_tokens": 0, "typical_p": 1,
        }  # fmt: skip
        async with clusters.open([clusters.target()]) as cluster:
            assert (await cluster.complete(**neutral)).status_code == 200

    @pytest.mark.parametrize(
        "content",
        [
            b"{", b"[1]", b"\xff", b"[" * 100_000, b"", b'{"prompt": "\\uD800"}', b'{"prompt": "\xed\xa0\x80"}',
            b'{"prompt": "x", "structured_outputs": {"choice": ["\\udfff"]}}',
        ],
    )  # fmt: skip
    async def test_a_body_that_is_no_json_object_is_refused(self, clusters: ClusterFactory, content: bytes) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            response = await cluster.client.post("/v1/completions", content=content)
        assert response.status_code == 400
        assert "JSON" in response.json()["error"]["message"]

    @pytest.mark.parametrize("prompt", [b"\\ud83d\\ude00", "\ud55c\uad6d".encode()])
    async def test_characters_that_look_like_half_a_pair_are_welcome(
        self, clusters: ClusterFactory, prompt: bytes
    ) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            response = await cluster.client.post("/v1/completions", content=b'{"prompt": "' + prompt + b'"}')
        assert response.status_code == 200

    async def test_a_body_beyond_all_bounds_is_refused(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            response = await cluster.client.post("/v1/completions", content=b" " * (9 << 20))
        assert response.status_code == 413

    async def test_a_prompt_too_long_is_refused_with_both_numbers(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()], max_model_len=100) as cluster:
            response = await cluster.complete(prompt=[5] * 123)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "123" in message
        assert message.startswith("This model's maximum context length is 100 tokens"), "clients look for these words"
        assert response.json()["error"]["code"] == "context_length_exceeded"

    async def test_a_default_bound_gives_way_to_a_long_prompt(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()], max_model_len=100) as cluster:
            response = await cluster.client.post("/v1/completions", json={"prompt": [5] * 95})
        assert response.json()["usage"]["completion_tokens"] == 5

    async def test_without_a_target_the_client_is_told_to_come_back(self, clusters: ClusterFactory) -> None:
        async with clusters.open([]) as cluster:
            response = await cluster.complete()
            health = await cluster.client.get("/health")
            alive = await cluster.client.get("/livez")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "no target worker" in response.json()["error"]["message"]
        assert (health.status_code, alive.status_code) == (503, 200)

    async def test_health_tells_which_targets_compute_alike(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target() for _ in range(3)]) as cluster:
            for number, target in enumerate(cluster.service.snapshot().targets):
                object.__setattr__(target, "weights_fingerprint", "ab" if number < 2 else "cd")
                object.__setattr__(target, "numerics", "v1 bfloat16")
            health = (await cluster.client.get("/health")).json()
        assert health["target_weights"] == [
            {
                "model": "demo",
                "weights_fingerprint": weights,
                "numerics": "v1 bfloat16",
                "num_target_workers": count,
            }
            for weights, count in (("ab", 2), ("cd", 1))
        ]

    @pytest.mark.parametrize("name", ["max_tokenz", "Temperature", "top-k", "int", ""])
    async def test_an_unknown_parameter_is_refused_by_its_name(self, clusters: ClusterFactory, name: str) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            response = await cluster.complete(**{name: 1})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"unknown parameter {name!r}"
        assert response.json()["error"]["param"] == name

    async def test_an_unknown_path_answers_as_openai_does(self, clusters: ClusterFactory) -> None:
        async with clusters.open([]) as cluster:
            response = await cluster.client.get("/v2/models")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"


class TestAround:
    async def test_the_request_id_is_honoured_and_echoed(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            headers = {"X-Request-Id": "mine"}
            body = {"prompt": "x"}
            given = await cluster.client.post("/v1/completions", json=body, headers=headers)
            refused = await cluster.client.post("/v1/completions", json={}, headers=headers)
            made_up = await cluster.complete()
            long = await cluster.client.post("/v1/completions", json=body, headers={"X-Request-Id": "x" * 65})
        assert given.headers["x-request-id"] == refused.headers["x-request-id"] == "mine"
        assert given.json()["id"] == "cmpl-mine"
        assert len(made_up.headers["x-request-id"]) == 32
        assert long.status_code == 400

    async def test_tokenize_and_detokenize_reverse_each_other(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            tokens = (await cluster.client.post("/tokenize", json={"prompt": "naïve 中文"})).json()
            chat = await cluster.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
            text = await cluster.client.post("/detokenize", json={"tokens": tokens["tokens"]})
            wrong = await cluster.client.post("/detokenize", json={"tokens": [99999]})
        assert tokens["count"] == len(tokens["tokens"])
        assert text.json() == {"prompt": "naïve 中文"}
        assert chat.json()["count"] == 2
        assert wrong.status_code == 400

    async def test_tokenize_returns_entries_of_the_vocabulary_if_requested(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.client.post("/tokenize", json={"prompt": "naïve", "return_token_strs": True})
        tokenizer = clusters.tokenizer
        assert answer.json()["token_strs"] == [tokenizer.vocabulary_entry(each) for each in answer.json()["tokens"]]
        assert all(answer.json()["token_strs"])

    async def test_tokenize_renders_a_conversation_as_a_chat_does(self, clusters: ClusterFactory) -> None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}]
        common = {"messages": messages, "tools": [TOOL], "add_generation_prompt": False}
        async with clusters.open([clusters.target()]) as cluster:
            for more in ({}, {"continue_final_message": True}):
                tokens = await cluster.client.post("/tokenize", json=common | more)
                chat = await cluster.client.post("/v1/chat/completions", json=common | more)
                assert tokens.json()["count"] == chat.json()["usage"]["prompt_tokens"]
            wrong = {"messages": messages, "continue_final_message": True}
            refused = await cluster.client.post("/tokenize", json=wrong)
        assert refused.json()["error"]["param"] == "continue_final_message"

    async def test_tokenize_and_detokenize_know_the_names_of_models(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
                known = await cluster.client.post(path, json=body | {"model": "demo"})
                unknown = await cluster.client.post(path, json=body | {"model": "other"})
                assert (known.status_code, unknown.status_code) == (200, 404)
                assert unknown.json()["error"]["code"] == "model_not_found"

    async def test_metrics_count_what_happened(self, clusters: ClusterFactory) -> None:
        target = clusters.target(tokens_per_step=3, num_draft_tokens=4)
        async with clusters.open([target], [FakeDraft()]) as cluster:
            await cluster.complete()
            await cluster.complete(n=0)
            text = (await cluster.client.get("/metrics")).text
        labels = '{engine="coordinator",model_name="demo"}'
        for line in (
            f"outrider_spec_decode_num_drafts_total{labels} 4.0",
            f"outrider_spec_decode_num_draft_tokens_total{labels} 16.0",
            f"outrider_spec_decode_num_accepted_tokens_total{labels} 8.0",
            f"outrider_generation_tokens_total{labels} 12.0",
            f"outrider_e2e_request_latency_seconds_count{labels} 1.0",
            f"outrider_time_to_first_token_seconds_count{labels} 1.0",
            f"outrider_num_requests_running{labels} 0.0",
            f"outrider_num_requests_waiting{labels} 0.0",
            'outrider_request_failure_total{code="INVALID_ARGUMENT"} 1.0',
        ):
            assert line in text
        position = 'outrider_spec_decode_num_accepted_tokens_per_pos_total{engine="coordinator",model_name="demo",'
        assert position + 'position="0"} 4.0' in text
        assert position + 'position="1"} 4.0' in text
        assert 'finished_reason="length"' in text
