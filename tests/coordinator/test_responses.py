"""OpenAI's Responses API: its events, its conversations and its refusals, in part through the real `openai` package."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio
from pydantic import BaseModel

from coordinator.access.api_keys import ANYBODY, Caller, Scope
from coordinator.api.answer.choice_writer import Piece
from coordinator.api.responses.input_items import InputItem, read_items
from coordinator.api.responses.output_items import OutputItems
from coordinator.api.responses.response_body import ResponseBody
from coordinator.api.responses.response_writer import ResponsesWriter
from coordinator.api.schema.chat_messages import read_messages
from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.request.choices import ChoiceOutput, RequestFinished
from coordinator.service.stored_responses import (
    REFERENCES_MAX,
    RESPONSE_BYTES_MAX,
    References,
    StoredResponses,
)
from outrider.errors import InvalidRequest, NotFound, RegistryUnavailable
from outrider.registry.registry import Registry
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget, served_model
from tests.coordinator.named_events import CALL, PARAMETERS, TWO_CALLS, answering, check_events, events_of, steady
from tests.coordinator.test_answer_size import end
from tests.coordinator.test_http_api import openai_client

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS}
SEARCH: dict[str, Any] = {"type": "web_search"}


class Store:
    """The part of a registry that stores responses."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, str]] = {}
        self.is_away = False

    async def write_response(self, name: str, fields: Any, life_s: float) -> None:
        if self.is_away:
            raise RegistryUnavailable("no Redis")
        self.stored[name] = dict(fields)

    async def read_response(self, name: str, *fields: str) -> list[str | None]:
        return [self.stored.get(name, {}).get(each) for each in fields]

    async def delete_responses(self, names: Any) -> int:
        return sum(self.stored.pop(name, None) is not None for name in names)


def keeping(cluster: Cluster) -> Store:
    """Lets the cluster keep responses."""
    store = Store()
    cluster.service.responses = StoredResponses(store, cluster.service.environment.now_s, 60)
    return store


async def ask(cluster: Cluster, request_id: str = "r1", **body: Any) -> httpx.Response:
    headers = {"X-Request-Id": request_id}
    return await cluster.client.post("/v1/responses", json={"input": "hi", **body}, headers=headers)


def prompt_of(cluster: Cluster) -> str:
    """The last prompt: the messages' contents, joined by newlines without a chat template."""
    request = cluster.targets[0].requests[-1]
    tokenizer = cluster.tokenizer
    return tokenizer.decode(request.token_ids[: request.num_prompt_tokens])


class TestEvents:
    async def test_of_text_and_calls_that_end(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, TWO_CALLS) as cluster:
            streamed = events_of(await ask(cluster, tools=[TOOL], stream=True))
            whole = (await ask(cluster, tools=[TOOL])).json()
        check_events("responses_calls", streamed)
        assert [event["sequence_number"] for event in streamed] == [*range(len(streamed))]
        assert steady(streamed[-1]["response"]) == steady(whole)

    async def test_of_text_that_is_cut_off(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello there, world.") as cluster:
            streamed = events_of(await ask(cluster, max_output_tokens=3, stream=True, instructions="Be kind."))
            whole = (await ask(cluster, max_output_tokens=3, instructions="Be kind.")).json()
        check_events("responses_cut", streamed)
        assert steady(streamed[-1]["response"]) == steady(whole)

    async def test_of_an_empty_output_there_is_a_message(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "x", eos_at=0) as cluster:
            streamed = events_of(await ask(cluster, stream=True))
        (item,) = streamed[-1]["response"]["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", "")

    async def test_of_an_error_tell_why_it_failed(self, clusters: ClusterFactory) -> None:
        settings = {"target_wait_max_s": 0.2}
        async with clusters.open([clusters.target(dies_at=5)], settings=settings) as cluster:
            streamed = events_of(await ask(cluster, stream=True))
        *_, error, failed = streamed
        assert (error["type"], error["code"]) == ("error", "unavailable")
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}

    def test_of_reasoning_come_before_those_of_the_message(self) -> None:
        items = OutputItems("r1")
        events = [*items.add_reasoning("Well"), *items.add_reasoning("..."), *items.add_text("Hi", []), *items.end()]
        check_events("responses_reasoning", events)
        assert [item["type"] for item in items.output] == ["reasoning", "message"]

    def test_count_the_tokens_of_reasoning(self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        request = GenerationInput(request_id="r1", text="hi")
        spec = GenerationSpec(
            request=request,
            model="demo",
            prompt_token_ids=(1,),
            max_tokens=9,
            sampling=request.sampling,
            deadline_s=1,
            served=served_model(),
        )
        writer = ResponsesWriter(
            spec, ResponseBody(input="hi"), clusters.tokenizer, created_s=0, new_call_id=lambda: "call_1", is_kept=False
        )
        pieces = iter([Piece(reasoning="Well"), Piece(text="Hi", finish_reason="stop")])
        monkeypatch.setattr(writer._choice, "piece", lambda item: next(pieces))
        writer._choice.num_reasoning_tokens = 5
        for _ in range(2):
            writer.event(ChoiceOutput(0, end()))
        closing = json.loads(writer.closing(RequestFinished((end(),)))[0].partition("data: ")[2])
        assert closing["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
        assert [item["type"] for item in closing["response"]["output"]] == ["reasoning", "message"]

    async def test_have_the_log_probabilities_of_all_text(self, clusters: ClusterFactory) -> None:
        asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        async with answering(clusters, "Let me see.") as cluster:
            streamed = events_of(await ask(cluster, **asked, stream=True))
        shown = [each for event in streamed if event["type"].endswith("text.delta") for each in event["logprobs"]]
        (item,) = streamed[-1]["response"]["output"]
        assert "".join(each["token"] for each in shown) == item["content"][0]["text"] == "Let me see."
        assert item["content"][0]["logprobs"] == shown
        assert len(shown[0]["top_logprobs"]) == 2


class TestConversations:
    def test_what_the_assistant_did_in_a_row_is_one_message(self) -> None:
        items = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
            {"type": "function_call_output", "call_id": "c2", "output": "noon"},
            {"role": "assistant", "content": "Sunny."},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
            {"role": "developer", "content": [{"type": "input_text", "text": each} for each in "ab"]},
        ]  # fmt: skip
        calls = [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ]
        assert read_messages(read_items([InputItem.model_validate(each) for each in items])) == [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "Hm.",
                "thinking": "",
                "tool_calls": calls,
            },
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
            {"role": "tool", "content": "noon", "tool_call_id": "c2"},
            {"role": "assistant", "content": "Sunny."},
            {"role": "assistant", "content": None, "reasoning_content": "So."},
            {"role": "system", "content": "a\nb"},
        ]

    async def test_goes_on_from_a_stored_response(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster:
            keeping(cluster)
            first = (await ask(cluster, instructions="Be kind.", request_id="a")).json()
            assert first["store"]
            second = await ask(cluster, input="more", previous_response_id=first["id"], stream=True, request_id="b")
            assert "Be kind." not in prompt_of(cluster), "instructions are of one response"
            events_of(second)
            assert (await ask(cluster, input="last", previous_response_id="resp_b", request_id="c")).json()["store"]
            assert prompt_of(cluster) == "hi\nHello.\nmore\nHello.\nlast\n"

    async def test_items_of_stored_responses_can_be_referred_to(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster:
            keeping(cluster)
            item_id = (await ask(cluster, request_id="a/1")).json()["output"][0]["id"]
            items = [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": item_id}]
            answer = await ask(
                cluster, input=[*items, {"role": "user", "content": "more"}], store=False, request_id="b"
            )
            assert answer.status_code == 200, answer.text
            assert prompt_of(cluster) == "hi\nHello.\nmore\n"
            missing = await ask(cluster, previous_response_id="resp_b")
            assert (missing.status_code, missing.json()["error"]["param"]) == (400, "previous_response_id")
            missing = await ask(cluster, input=[{"type": "item_reference", "id": "msg_b_0"}])
            assert (missing.status_code, missing.json()["error"]["param"]) == (400, "input")

    async def test_tools_of_the_conversation_can_be_declared_again(self, clusters: ClusterFactory) -> None:
        def named(name: str, said: str) -> dict[str, Any]:
            return {"type": "function", "name": name, "description": said}

        def item(*tools: dict[str, Any]) -> dict[str, Any]:
            return {"type": "additional_tools", "role": "developer", "tools": list(tools)}

        script = clusters.tokenizer.encode("Hello.")
        target = FakeTarget(script, eos_at=len(script))
        settings = {"chat_template": "{{ tools | tojson }}"}
        async with clusters.open([target], settings=settings, max_model_len=2048) as cluster:
            keeping(cluster)
            input_ = [item(named("b", "first b"), named("c", "first c"), SEARCH), *BEFORE]
            answers = [await ask(cluster, input=input_, tools=[named("a", "first a")], request_id="r0")]
            prompts = [prompt_of(cluster)]
            for turn, items in enumerate(([item(named("b", "second b"))], [], [item(named("b", "third b"))]), 1):
                asked = {"input": [*items, *BEFORE], "previous_response_id": f"resp_r{turn - 1}"}
                tools = [named("a", f"a of turn {turn}"), *([named("c", "last c")] if turn == 3 else [])]
                answers.append(await ask(cluster, **asked, tools=tools, request_id=f"r{turn}"))
                prompts.append(prompt_of(cluster))
        assert [answer.status_code for answer in answers] == [200] * 4, answers[-1].text
        found = [[tool["function"]["description"] for tool in json.loads(prompt)] for prompt in prompts]
        assert found == [
            ["first a", "first b", "first c"],
            ["a of turn 1", "second b", "first c"],
            ["a of turn 2", "second b", "first c"],
            ["a of turn 3", "last c", "third b"],
        ]

    @pytest.mark.parametrize(
        ("tools", "items", "parameter"),
        [
            ([TOOL, TOOL], [], "tools"),
            ([], [[TOOL, SEARCH, TOOL]], "input[0].tools"),
            ([SEARCH] * 129, [], "tools"),
            ([], [[SEARCH], [SEARCH] * 129], "input[1].tools"),
            ([], [[{**TOOL, "name": f"{turn}_{index}"} for index in range(65)] for turn in range(2)], "tools"),
        ],
    )
    async def test_one_list_has_each_name_once_and_there_are_not_too_many(
        self, clusters: ClusterFactory, tools: list[Any], items: list[list[Any]], parameter: str
    ) -> None:
        input_ = [*({"type": "additional_tools", "tools": each} for each in items), *BEFORE]
        async with answering(clusters, "Hello.") as cluster:
            answer = await ask(cluster, input=input_, tools=tools)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter), answer.text

    async def test_a_stored_response_can_be_read_and_deleted(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster:
            keeping(cluster)
            whole = (await ask(cluster)).json()
            path = f"/v1/responses/{whole['id']}"
            assert (await cluster.client.get(path)).json() == whole
            deleted = await cluster.client.delete(path)
            assert deleted.json() == {"id": whole["id"], "object": "response", "deleted": True}
            for answer in (await cluster.client.get(path), await cluster.client.delete(path)):
                assert (answer.status_code, answer.json()["error"]["param"]) == (404, "response_id")

    async def test_without_a_store_the_error_says_how_to_go_on(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster:
            assert not (await ask(cluster)).json()["store"]
            answer = await ask(cluster, previous_response_id="resp_r1")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "previous_response_id")
        assert "send the items of the conversation themselves as input" in error["message"]


RESPONSE: dict[str, Any] = {"id": "resp_r1", "output": [{"id": "msg_r1_0", "type": "message", "content": []}]}
BEFORE = [{"role": "user", "content": "hi"}]


class TestStoredResponses:
    async def test_are_found_by_other_replicas_until_they_expire(self, registry: Registry, redis_url: str) -> None:
        one, other = (StoredResponses(registry, lambda: 0.0, 60) for _ in range(2))
        assert await one.keep(ANYBODY, "r1", RESPONSE, BEFORE)
        assert await other.get(ANYBODY, "resp_r1") == RESPONSE
        found = await other.look_up(ANYBODY, References("resp_r1", ("msg_r1_0",)))
        assert (found.before, found.items["msg_r1_0"]) == ([*BEFORE, *RESPONSE["output"]], RESPONSE["output"][0])
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            assert 0 < await client.ttl("or:response::r1") <= 60
        await other.delete(ANYBODY, "resp_r1")
        with pytest.raises(NotFound):
            await one.get(ANYBODY, "resp_r1")

    async def test_of_one_tenant_are_nothing_to_others(self) -> None:
        responses = StoredResponses(Store(), lambda: 0.0, 60)
        one, other = (Caller(name, frozenset(Scope)) for name in ("one", "other"))
        assert await responses.keep(one, "r1", RESPONSE, BEFORE)
        for caller in (other, ANYBODY):
            with pytest.raises(InvalidRequest):
                await responses.look_up(caller, References("resp_r1"))
            with pytest.raises(NotFound):
                await responses.delete(caller, "resp_r1")
        assert await responses.get(one, "resp_r1")

    async def test_the_oldest_make_room_first_of_the_tenant_with_too_many(self) -> None:
        store = Store()
        responses = StoredResponses(store, lambda: 0.0, 60, bytes_max=40_000)
        long = [{"role": "user", "content": "x" * 3000}]
        one, other = (Caller(name, frozenset(Scope)) for name in ("one", "other"))
        assert await responses.keep(other, "theirs", RESPONSE, long)
        for index in range(5):
            assert await responses.keep(one, f"r{index}", RESPONSE, long)
        names = sorted(name.partition(":")[2] for name in store.stored)
        assert names == ["r2", "r3", "r4", "theirs"], "a tenant has a quarter of the room"

    async def test_expired_ones_take_up_no_room(self) -> None:
        now_s = 0.0
        store = Store()
        responses = StoredResponses(store, lambda: now_s, 60, bytes_max=5000)
        long = [{"role": "user", "content": "x" * 3000}]
        assert await responses.keep(ANYBODY, "r1", RESPONSE, long)
        now_s = 61.0
        assert await responses.keep(ANYBODY, "r2", RESPONSE, long)
        assert sorted(store.stored) == [":r1", ":r2"], "Redis has dropped the first one by itself"

    async def test_what_is_too_long_or_not_taken_is_not_kept(self) -> None:
        store = Store()
        responses = StoredResponses(store, lambda: 0.0, 60)
        assert not await responses.keep(ANYBODY, "r1", RESPONSE, [{"content": "x" * RESPONSE_BYTES_MAX}])
        store.is_away = True
        assert not await responses.keep(ANYBODY, "r1", RESPONSE, BEFORE)
        assert not await StoredResponses(store, lambda: 0.0, 0).keep(ANYBODY, "r1", RESPONSE, BEFORE)

    async def test_a_request_may_refer_to_so_many(self) -> None:
        ids = tuple(f"msg_r{index}_0" for index in range(REFERENCES_MAX + 1))
        with pytest.raises(InvalidRequest, match="permitted"):
            await StoredResponses(Store(), lambda: 0.0, 60).look_up(ANYBODY, References(None, ids))

    async def test_log_probabilities_are_not_kept(self) -> None:
        part = {"type": "output_text", "text": "x", "logprobs": [{"token": "x"}]}
        item = {"id": "msg_r1_0", "type": "message", "content": [part]}
        responses = StoredResponses(Store(), lambda: 0.0, 60)
        assert await responses.keep(ANYBODY, "r1", {"output": [item]}, BEFORE)
        assert (await responses.get(ANYBODY, "resp_r1"))["output"][0]["content"] == [{**part, "logprobs": []}]


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "parameter"),
        [
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"context_management": [{"type": "compaction"}]}, "context_management[0].compact_threshold"),
            ({"context_management": [{"type": "other", "compact_threshold": 9}]}, "context_management[0].type"),
            ({"context_management": [{"type": "compaction", "compact_threshold": 1}]},
             "context_management[0].compact_threshold"),
            ({"tools": [{"type": 3}]}, "tools[0].type"),
            ({"tools": [SEARCH] * 129}, "tools"),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
            ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}},
             "tool_choice"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
            ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
            ({"input": [{"type": "computer_call"}]}, "input[0].type"),
            ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
            ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
            ({"input": [{"content": "hi"}]}, "input[0].role"),
            ({"input": []}, "input"),
            ({"input": "x" * 3000}, "input"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"include": ["everything"]}, "include[0]"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format.json_schema"),
            ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "text.format"),
            ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
            ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
            ({"temperature": 3}, "temperature"),
            ({"n": 2}, "n"),
        ],
    )  # fmt: skip
    async def test_name_the_parameter(self, clusters: ClusterFactory, body: dict[str, Any], parameter: str) -> None:
        async with answering(clusters, "Hello.") as cluster:
            answer = await ask(cluster, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter), answer.text

    async def test_what_changes_nothing_is_accepted_and_named(self, clusters: ClusterFactory) -> None:
        body: dict[str, Any] = {
            "input": [{"role": "user", "content": "hi", "phase": None, "color": "red"}],
            "truncation": "auto",
            "service_tier": "auto",
            "safety_identifier": "x",
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
            "tools": [{**TOOL, "defer_loading": True}],
            "background": False,
        }
        async with answering(clusters, "Hello.") as cluster:
            answer = await ask(cluster, **body)
        assert answer.status_code == 200, answer.text
        assert set(answer.headers["x-outrider-ignored"].split(", ")) == {
            "input[].color", "truncation", "service_tier", "safety_identifier", "include", "reasoning.effort",
            "reasoning.summary", "text.verbosity", "tools[].defer_loading",
        }  # fmt: skip
        assert answer.json()["truncation"] == "disabled"

    async def test_tools_that_are_no_functions_are_left_out_and_named(self, clusters: ClusterFactory) -> None:
        tools = [SEARCH, TOOL, {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]
        allowed = {"type": "allowed_tools", "tools": [SEARCH, {"type": "function", "name": "weather"}]}
        async with answering(clusters, CALL) as cluster:
            answers = [await ask(cluster, tools=tools, tool_choice=choice) for choice in (None, "required", allowed)]
            alone = await ask(cluster, tools=[SEARCH])
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-outrider-ignored"] == "tools[0] (web_search), tools[2] (custom apply_patch)"
            assert answer.json()["output"][0]["name"] == "weather"
            assert [tool["type"] for tool in answer.json()["tools"]] == ["function"], "what is told is what was used"
        assert alone.headers["x-outrider-ignored"] == "tools[0] (web_search)"
        assert "<tool_call>" in alone.json()["output"][0]["content"][0]["text"], "without tools there are no calls"

    async def test_a_compaction_with_nothing_to_do_is_accepted(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster:
            management = [{"type": "compaction", "compact_threshold": 200_000}]
            assert (await ask(cluster, context_management=management)).status_code == 200

    async def test_an_output_longer_than_the_context_is_cut_to_it(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.", eos_at=None) as cluster:
            answer = (await ask(cluster, max_output_tokens=100_000)).json()
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["usage"]["total_tokens"] == 1024


class City(BaseModel):
    city: str


class TestOpenAIPackage:
    async def test_a_loop_of_tools(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, CALL) as cluster, openai_client(cluster) as client:
            items: Any = [{"role": "user", "content": "How is it in Rome?"}]
            tools: Any = [{**TOOL, "strict": True}]
            first = await client.responses.create(
                model="demo", input=items, tools=tools, metadata={"a": "b"}, store=False
            )
            (call,) = first.output
            assert call.type == "function_call"
            assert json.loads(call.arguments) == {"city": "Rome"}
            items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
            async with client.responses.stream(model="demo", input=items) as stream:
                last = await stream.get_final_response()
        assert first.metadata == {"a": "b"}
        assert prompt_of(cluster).endswith("\nsunny\n")
        assert last.usage is not None
        assert last.usage.output_tokens == len(clusters.tokenizer.encode(CALL)) + 1

    async def test_a_parsed_answer_follows_its_schema(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, '{"city": "Rome"}') as cluster, openai_client(cluster) as client:
            answer = await client.responses.parse(model="demo", input="hi", text_format=City)
        assert answer.output_parsed == City(city="Rome")
        assert cluster.targets[0].requests[0].sampling.HasField("grammar")

    async def test_a_response_that_is_not_stored(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster, openai_client(cluster) as client:
            with pytest.raises(openai.NotFoundError, match="keeps no responses"):
                await client.responses.retrieve("resp_r1")
