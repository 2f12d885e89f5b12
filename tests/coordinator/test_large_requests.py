"""One large request keeps nobody else waiting: it is refused before it is read, or worked on beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.answer.choice_writer import ChoiceWriter
from coordinator.api.answer.json_text import to_json_text
from coordinator.api.answer.openai_response import ResponseWriter
from coordinator.api.grpc import grpc_api
from coordinator.api.grpc.grpc_api import generate
from coordinator.api.http import application, calls, http_api, http_transport
from coordinator.intake import preparation
from coordinator.intake.generation_request import PROMPT_LOGPROBS_MAX, PROMPT_TOKENS_MAX
from coordinator.intake.json_size import BARE_BYTES_MAX, ITEMS_MAX, PARTS_MAX, check_json_size
from coordinator.models.model_grammars import ModelGrammars
from coordinator.output.text_output import TextOutput, VisibleOutput
from coordinator.request.sequence import REPEATED_TOKENS, SequenceMachine
from coordinator.request.sequence_runner import LONG_PROMPT_TOKENS
from outrider.errors import InvalidRequest, Overloaded
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.test_resumption import Memory, events_of, said

LONG_TEXT = "import os, sys\n" * 2000
CHAT = {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 2}
PROMPT = {"prompt": LONG_TEXT, "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "owner", "name"),
    [
        ("/v1/completions", PROMPT, calls, "parse_body"),
        ("/v1/chat/completions", CHAT, calls, "parse_body"),
        ("/tokenize", {"prompt": LONG_TEXT}, http_api, "parse_body"),
        ("/detokenize", {"tokens": [65] * 20_000}, http_api, "parse_body"),
        ("/v1/completions", PROMPT, Tokenizer, "encode"),
        ("/v1/chat/completions", CHAT, Tokenizer, "render_chat"),
        ("/detokenize", {"tokens": [65] * 20_000}, Tokenizer, "decode"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1000, "logprobs": 20}, ResponseWriter, "whole"),
        ("/v1/completions", {"prompt": [65] * 2500, "prompt_logprobs": 1, "stream": True}, ChoiceWriter, "_prompt"),
        ("/v1/completions", {"prompt": [65] * 9000, "return_token_ids": True, "stream": True}, ResponseWriter, "chunk"),
        ("/v1/completions", {"prompt": "x", "bad_words": ["a", "b"] * 20}, preparation, "_bad_word_token_ids"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}, ModelGrammars, "new_compiler"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
async def test_what_may_take_long_runs_beside_the_event_loop(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, owner: Any, name: str
) -> None:
    work, threads = getattr(owner, name), list[int]()

    def seen(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return work(*args, **kwargs)

    target = clusters.target(tokens_per_step=50)
    async with clusters.open([target], max_model_len=1 << 20) as cluster:
        monkeypatch.setattr(owner, name, seen)
        answer = await cluster.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
    first = threads[0]  # detokenizing what is said, a few tokens at a time, stays on the loop
    assert first != threading.get_ident()


async def test_sequences_of_a_long_prompt_are_made_messages_one_in_a_turn_of_the_loop(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_turns, turns, committed = 0, list[int](), SequenceMachine.committed

    def seen(session: SequenceMachine) -> list[int]:
        turns.append(num_turns)
        return committed(session)

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    monkeypatch.setattr(SequenceMachine, "committed", seen)
    async with clusters.open([clusters.target()], max_model_len=1 << 20) as cluster:
        counting = asyncio.create_task(count_turns())
        answer = await cluster.complete(prompt=[65] * (LONG_PROMPT_TOKENS + 1), n=16, max_tokens=2)
        counting.cancel()
    assert answer.status_code == 200, answer.text
    assert len(turns) == 16
    assert len(set(turns)) == 16, "some were made in the same turn"


async def test_what_clients_have_of_long_streams_is_made_text_again_a_part_in_a_turn_of_the_loop(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_turns, num_in_turn, push = 0, Counter[int](), TextOutput.push

    def seen(output: TextOutput, token_ids: Sequence[int], *others: Any) -> VisibleOutput:
        num_in_turn[num_turns] += len(token_ids)
        return push(output, token_ids, *others)

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    num_tokens = 3 * REPEATED_TOKENS
    request: dict[str, Any] = {"prompt": "import", "temperature": 0, "n": 8, "max_tokens": num_tokens}
    request |= {"stream": True, "stream_options": {"include_event_ids": True}}
    target, memory = clusters.target(tokens_per_step=500), Memory()
    async with clusters.open([target], max_model_len=1 << 20, registry=memory) as cluster:  # type: ignore[arg-type]
        answer = await cluster.client.post("/v1/completions", json=request, headers={"X-Request-Id": "r1"})
        position = events_of(answer.text)[0][0].rpartition(":")[0] + ":" + ".".join([str(num_tokens)] * 8)
        await cluster.service.streams.journal._flush()  # type: ignore[union-attr]
        monkeypatch.setattr(TextOutput, "push", seen)
        counting = asyncio.create_task(count_turns())
        rest = await cluster.client.get("/v1/streams/r1", headers={"Last-Event-ID": position})
        counting.cancel()
    assert rest.status_code == 200, rest.text
    assert all(text["ends"] == ["length"] for text in said(events_of(rest.text)).values())
    assert num_in_turn.total() == 8 * num_tokens
    assert max(num_in_turn.values()) <= REPEATED_TOKENS + 8  # and the last one of each, which is generated


async def test_a_grpc_prompts_log_probabilities_are_written_beside_the_event_loop(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, threads = grpc_api._cut, list[int]()

    def seen(logprobs: common_pb2.TokenLogprobs, num_top: int) -> common_pb2.TokenLogprobs:
        threads.append(threading.get_ident())
        return cut(logprobs, num_top)

    monkeypatch.setattr(grpc_api, "_cut", seen)
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=2, num_prompt_logprobs=4)
    asked = generation_pb2.GenerationRequest(prompt=LONG_TEXT[:8000], sampling=sampling)
    async with clusters.open([clusters.target()], max_model_len=1 << 20) as cluster:
        chunks = [chunk async for chunk in generate(cluster.service, asked)]
    assert chunks[0].prompt_logprobs
    assert threading.get_ident() not in threads


class TestBodies:
    async def asgi(
        self, cluster: Cluster, receive: Callable[[], Any], *headers: tuple[bytes, bytes]
    ) -> tuple[int, Any]:
        """Status and body of an answer, at the level where the bytes of a request come in."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        path = "/v1/completions"
        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": list(headers), "scheme": "http", "server": ("test", 80),
        }  # fmt: skip
        await application.create_app(cluster.service)(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(body) if body else None

    @pytest.mark.parametrize("length", ["8388609", "9" * 400])
    async def test_a_body_that_is_announced_as_too_long_is_refused_before_it_is_read(
        self, clusters: ClusterFactory, length: str
    ) -> None:
        async def receive() -> Any:
            raise AssertionError("it was read")

        async with clusters.open([clusters.target()]) as cluster:
            status, answer = await self.asgi(cluster, receive, (b"content-length", length.encode()))
        assert status == 413
        assert "longer than 8388608 bytes" in answer["error"]["message"]

    async def test_a_tenant_that_has_used_up_its_share_is_refused_before_its_body_is_read(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def receive() -> Any:
            raise AssertionError("it was read")

        def used_up(caller: object) -> None:
            raise Overloaded("used up", 1.0)

        async with clusters.open([clusters.target()]) as cluster:
            monkeypatch.setattr(cluster.service.environment.limits.rates, "check", used_up)
            status, _ = await self.asgi(cluster, receive)
        assert status == 429

    async def test_a_body_that_trickles_in_is_given_up(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_transport, "_BODY_WAIT_MAX_S", 0.2)

        async def receive() -> Any:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async with clusters.open([clusters.target()]) as cluster:
            status, answer = await self.asgi(cluster, receive)
        assert status == 408
        assert answer["error"]["code"] == "request_timeout"

    async def test_a_client_that_leaves_while_it_sends_is_no_defect_of_ours(self, clusters: ClusterFactory) -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async with clusters.open([clusters.target()]) as cluster:
            status, _ = await self.asgi(cluster, receive)
            internal = cluster.service.environment.metrics.request_failure.labels("INTERNAL")
            assert status == 499
            assert internal._value.get() == 0


class TestBounds:
    @pytest.mark.parametrize(
        "text",
        [
            "[" + "1," * ITEMS_MAX + "1,1]",
            "[" + "[]," * PARTS_MAX + "1]",
            "{" + ",".join(f'"{name}":1' for name in range(PARTS_MAX)) + "}",
            "[" + ("9" * 4000 + ",") * (2 * BARE_BYTES_MAX // 4000) + "1]",
            "[" + '"",' * (2 * ITEMS_MAX) + "1]",
        ],
        ids=["values", "lists", "members", "digits", "strings"],
    )
    async def test_json_that_takes_long_to_parse_is_refused_before_it_is(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        parsed: list[object] = []
        parse = json.loads

        def seen(raw: str) -> object:
            parsed.append(raw)
            return parse(raw)

        async with clusters.open([clusters.target()]) as cluster:
            body = f'{{"prompt": {text}}}'
            monkeypatch.setattr(json, "loads", seen)
            answer = await cluster.client.post("/v1/completions", content=body)
            monkeypatch.undo()
        assert answer.status_code == 400
        assert "too much JSON" in answer.json()["error"]["message"]
        assert not parsed

    @settings(max_examples=20)
    @given(st.lists(st.sampled_from([",", "{", "[", ":", '\\"', "\\\\", "x", "\\u0022"]), max_size=40))
    def test_what_stands_in_strings_does_not_count(self, characters: list[str]) -> None:
        text = "".join(characters) * (3 * ITEMS_MAX // max(len(characters), 1)) or "x"
        check_json_size(f'{{"prompt": "{text}"}}'.encode())

    def test_a_prompt_of_as_many_tokens_as_permitted_passes(self) -> None:
        check_json_size(json.dumps({"prompt": [123456] * PROMPT_TOKENS_MAX}).encode())

    def test_json_within_json_is_bounded_as_well(self, clusters: ClusterFactory) -> None:
        from coordinator.api.schema.tool_schema import CalledFunction, ToolCall

        call = ToolCall(id="1", function=CalledFunction(name="f", arguments="[" + "[]," * PARTS_MAX + "1]"))
        with pytest.raises(InvalidRequest, match="too much JSON") as caught:
            call.to_template()
        assert caught.value.parameter == "messages"

    async def test_more_token_ids_than_a_prompt_may_have_are_refused_over_grpc(self, clusters: ClusterFactory) -> None:
        prompt = generation_pb2.TokenPrompt(token_ids=[1] * (PROMPT_TOKENS_MAX + 1))
        asked = generation_pb2.GenerationRequest(prompt_token_ids=prompt)
        async with clusters.open([clusters.target()], max_model_len=1 << 20) as cluster:
            with pytest.raises(InvalidRequest, match=str(PROMPT_TOKENS_MAX)):
                [chunk async for chunk in generate(cluster.service, asked)]

    async def test_more_log_probabilities_of_a_prompt_than_an_answer_may_hold_are_refused(
        self, clusters: ClusterFactory
    ) -> None:
        target = clusters.target()
        async with clusters.open([target], max_model_len=1 << 20) as cluster:
            prompt = [65] * (PROMPT_LOGPROBS_MAX // 64 // 5 + 1)
            body = {"prompt": prompt, "n": 64, "max_tokens": 1}
            for extra, parameter in (
                ({"prompt_logprobs": 4}, "prompt_logprobs"), ({"echo": True, "logprobs": 4}, "echo")
            ):  # fmt: skip
                answer = await cluster.client.post("/v1/completions", json=body | extra)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == parameter
        assert not target.requests


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
LONG_LISTS = st.builds(lambda value, count: [value] * count, SCALARS, st.sampled_from([256, 257, 513]))


@given(
    st.recursive(
        SCALARS | LONG_LISTS,
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
        max_leaves=12,
    )
)
def test_json_in_pieces_is_the_same_json(value: Any) -> None:
    assert to_json_text(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
