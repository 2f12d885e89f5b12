"""Anthropic's Messages API: its events, its conversations, its refusals and the form of its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.anthropic.content_blocks import ContentBlocks
from coordinator.api.anthropic.conversation import InputMessage, read_conversation
from coordinator.api.anthropic.message_body import MessageBody
from coordinator.api.schema.chat_messages import read_messages
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.named_events import CALL, PARAMETERS, TWO_CALLS, answering, check_events, events_of
from tests.coordinator.test_responses import prompt_of

TOOL: dict[str, Any] = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
HI = [{"role": "user", "content": "hi"}]


async def ask(cluster: Cluster, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    body = {"model": "demo", "max_tokens": 200, "messages": HI, **body}
    return await cluster.client.post("/v1/messages", json=body, headers={"X-Request-Id": "r1", **(headers or {})})


class TestEvents:
    async def test_of_text_and_calls_that_end(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, TWO_CALLS, num_cached_tokens=1) as cluster:
            check_events("anthropic_calls", events_of(await ask(cluster, tools=[TOOL], stream=True)))
            whole = (await ask(cluster, tools=[TOOL])).json()
        text, *calls = whole["content"]
        assert text == {"type": "text", "text": "Let me see."}
        assert [(each["type"], each["name"], each["input"]) for each in calls] == [
            ("tool_use", "weather", {"city": "Rome"})
        ] * 2
        assert whole["stop_reason"] == "tool_use"
        num_output = len(clusters.tokenizer.encode(TWO_CALLS)) + 1
        assert whole["usage"] == {
            "input_tokens": len(clusters.tokenizer.encode("hi\n")) - 1,
            "cache_read_input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "output_tokens": num_output,
        }

    async def test_of_an_error_tell_what_it_is(self, clusters: ClusterFactory) -> None:
        settings = {"target_wait_max_s": 0.2}
        async with clusters.open([clusters.target(dies_at=5)], settings=settings) as cluster:
            *_, last = events_of(await ask(cluster, stream=True))
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert "a target worker was lost while it had this request" in last["error"]["message"]

    def test_of_thinking_come_before_those_of_the_text(self) -> None:
        blocks = ContentBlocks()
        events = [*blocks.add_thinking("Well"), *blocks.add_thinking("..."), *blocks.add_text("Hi"), *blocks.end()]
        check_events("anthropic_thinking", events)
        assert blocks.content == [
            {"type": "thinking", "thinking": "Well...", "signature": ""},
            {"type": "text", "text": "Hi"},
        ]

    @pytest.mark.parametrize(
        ("body", "reason", "sequence"),
        [
            ({}, "end_turn", None),
            ({"max_tokens": 3}, "max_tokens", None),
            ({"stop_sequences": ["there"]}, "stop_sequence", "there"),
        ],
    )
    async def test_end_with_the_reason(
        self, clusters: ClusterFactory, body: dict[str, Any], reason: str, sequence: str | None
    ) -> None:
        async with answering(clusters, "Hello there, world.") as cluster:
            whole = (await ask(cluster, **body)).json()
            delta = events_of(await ask(cluster, **body, stream=True))[-2]["delta"]
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        assert delta == {"stop_reason": reason, "stop_sequence": sequence}

    async def test_say_that_the_context_is_full(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.", eos_at=None) as cluster:
            whole = (await ask(cluster, max_tokens=100_000)).json()
        assert whole["stop_reason"] == "model_context_window_exceeded"

    async def test_a_call_that_is_cut_off_has_no_input(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, CALL) as cluster:
            num_tokens = len(clusters.tokenizer.encode(CALL[: CALL.index("Rome")]))
            whole = (await ask(cluster, tools=[TOOL], max_tokens=num_tokens)).json()
        assert (whole["content"][0]["input"], whole["stop_reason"]) == ({}, "max_tokens")


class TestConversations:
    def test_results_become_messages_in_order(self) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "Here:"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "So?"},
            ]},
        ]  # fmt: skip
        call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        assert read_messages(read_conversation([InputMessage.model_validate(each) for each in messages])) == [
            {"role": "user", "content": "a\nb"},
            {
                "role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "thinking": "",
                "tool_calls": [call],
            },
            {"role": "user", "content": "Here:"},
            {"role": "tool", "content": "sunny", "tool_call_id": "t1"},
            {"role": "tool", "content": "", "tool_call_id": "t2"},
            {"role": "user", "content": "So?"},
        ]  # fmt: skip

    async def test_the_output_goes_on_with_a_begun_answer(self, clusters: ClusterFactory) -> None:
        messages = [*HI, {"role": "assistant", "content": "Well, "}]
        async with answering(clusters, "Hello.") as cluster:
            assert (await ask(cluster, messages=messages, system=[{"type": "text", "text": "Be kind."}])).is_success
        assert prompt_of(cluster) == "Be kind.\nhi\nWell, "

    async def test_tokens_are_counted_as_they_are_charged(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster:
            body: dict[str, Any] = {"model": "demo", "messages": HI, "system": "Be kind.", "tools": [TOOL]}
            counted = await cluster.client.post("/v1/messages/count_tokens", json=body)
            usage = (await ask(cluster, **body)).json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}

    async def test_the_parameters_reach_the_target(self, clusters: ClusterFactory) -> None:
        config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        async with answering(clusters, "{}") as cluster:
            answer = await ask(cluster, temperature=0.5, top_k=7, top_p=0.9, seed=3, output_config=config)
        assert answer.is_success, answer.text
        sampling = cluster.targets[0].requests[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 3)
        assert sampling.HasField("grammar")

    async def test_what_changes_nothing_is_accepted_and_named(self, clusters: ClusterFactory) -> None:
        mark = {"cache_control": {"type": "ephemeral"}}
        body: dict[str, Any] = {
            "system": [{"type": "text", "text": "x", **mark}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}],
            "tools": [{**TOOL, **mark}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "somebody"},
            "service_tier": "auto",
        }
        async with answering(clusters, "Hello.") as cluster:
            answer = await ask(cluster, {"anthropic-version": "2023-06-01"}, **body)
        assert answer.status_code == 200, answer.text
        assert set(answer.headers["x-outrider-ignored"].split(", ")) == {
            "system[].cache_control", "messages[].content[].cache_control", "tools[].cache_control", "thinking",
            "thinking.budget_tokens", "service_tier",
        }  # fmt: skip

    async def test_tools_that_run_on_a_server_are_left_out_and_named(self, clusters: ClusterFactory) -> None:
        tools = [{"type": "bash_20250124", "name": "bash"}, TOOL, {"type": "mcp_toolset", "mcp_server_name": "docs"}]
        async with answering(clusters, CALL) as cluster:
            answer = await ask(cluster, tools=tools, tool_choice={"type": "any"})
            alone = await ask(cluster, tools=[SEARCH])
        assert answer.status_code == alone.status_code == 200, answer.text
        assert answer.json()["stop_reason"] == "tool_use"
        assert answer.headers["x-outrider-ignored"] == "tools[0] (bash_20250124 bash), tools[2] (mcp_toolset)"
        assert alone.headers["x-outrider-ignored"] == "tools[0] (web_search_20250305 web_search)"


def looped(num_calls: int) -> list[dict[str, Any]]:
    """A conversation with so many calls, each in a turn of its own, after some thinking."""
    messages: list[dict[str, Any]] = []
    for index in range(num_calls):
        use = {"type": "tool_use", "id": f"t{index}", "name": "weather", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{index}", "content": "sunny"}
        messages += [
            {"role": "user", "content": f"question {index}"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": f"thought {index}"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "reminder"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": f"so {index}"},
                                              {"type": "text", "text": "Sunny."}]},
        ]  # fmt: skip
    return [*messages, *HI]


class TestContextManagement:
    """Anthropic's servers would clear parts of the conversation."""

    @pytest.mark.parametrize(
        ("edit", "kept"),
        [
            ({"keep": "all"}, [0, 1, 2]),
            ({}, [2]),
            ({"keep": {"type": "thinking_turns", "value": 2}}, [1, 2]),
            ({"keep": {"type": "thinking_turns", "value": 9}}, [0, 1, 2]),
        ],
    )
    def test_clears_thinking_of_older_turns(self, edit: dict[str, Any], kept: list[int]) -> None:
        management = {"edits": [{"type": "clear_thinking_20251015", **edit}]}
        body = MessageBody.model_validate(
            {"max_tokens": 9, "messages": looped(3), "context_management": management}, strict=False
        )
        chat = body.translate()
        thoughts = [message.reasoning_content for message in chat.messages if message.reasoning_content]
        assert thoughts == [f"{word} {turn}" for turn in kept for word in ("thought", "so")]
        assert len([message for message in chat.messages if message.tool_calls]) == 3
        assert body.prompt_limit is None

    @pytest.mark.parametrize(
        "edit",
        [
            {"type": "clear_tool_uses_20250919"},
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 30_000},
             "clear_at_least": {"type": "input_tokens", "value": 5}, "clear_tool_inputs": True},
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 5}},
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 0},
             "exclude_tools": ["weather"]},
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 0},
             "keep": {"type": "tool_uses", "value": 5}},
            {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}, "instructions": "x"},
        ],
    )  # fmt: skip
    async def test_that_clears_nothing_is_accepted(self, clusters: ClusterFactory, edit: dict[str, Any]) -> None:
        async with answering(clusters, "Hello.") as cluster:
            plain = await ask(cluster, messages=looped(5))
            answer = await ask(cluster, messages=looped(5), context_management={"edits": [edit]})
            first, second = (list(request.token_ids) for request in cluster.targets[0].requests)
        assert plain.status_code == answer.status_code == 200, answer.text
        assert first == second

    @pytest.mark.parametrize(
        ("edit", "named"),
        [
            ({"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}, "more than 100"),
            ({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}, "clear results"),
            ({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 100}}, "more than 100 tokens"),
            ({"type": "clear_everything_20300101"}, "'clear_everything_20300101' is not served"),
        ],
    )
    async def test_that_would_change_the_prompt_is_refused_and_can_be_counted(
        self, clusters: ClusterFactory, edit: dict[str, Any], named: str
    ) -> None:
        asked: dict[str, Any] = {"model": "demo", "messages": looped(5)}
        async with answering(clusters, "Hello.") as cluster:
            answer = await ask(cluster, messages=looped(5), context_management={"edits": [edit]})
            plain = await cluster.client.post("/v1/messages/count_tokens", json=asked)
            asked["context_management"] = {"edits": [edit]}
            counted = await cluster.client.post("/v1/messages/count_tokens", json=asked)
        assert counted.status_code == 200, counted.text
        assert counted.json() == plain.json(), "a client counts to decide whether to shorten the conversation"
        assert answer.status_code == 400
        assert "context_management.edits[0]" in answer.json()["error"]["message"]
        assert named in answer.json()["error"]["message"]


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "named"),
        [
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 0}, "max_tokens is 0"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
             "messages[0].content[0] is of type 'image'"),
            ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
            ({"messages": []}, "messages must hold"),
            ({"tools": [SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
             "left out here: tools[0] (web_search_20250305 web_search)"),
            ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "left out here: tools[0] (web_search_20250305"),
            ({"tools": [SEARCH] * 129}, "tools has 129 entries"),
            ({"tools": [{"input_schema": {}}]}, "'tools[0].name' is required"),
            ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
            ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"mcp_servers": [{}]}, "mcp_servers"),
            ({"container": "c"}, "container"),
            ({"colour": "red"}, "unknown parameter 'colour'"),
        ],
    )  # fmt: skip
    async def test_name_the_parameter(self, clusters: ClusterFactory, body: dict[str, Any], named: str) -> None:
        async with answering(clusters, "Hello.") as cluster:
            answer = await ask(cluster, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()
        assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "invalid_request_error", "r1")
        assert named in error["error"]["message"]

    async def test_have_anthropics_form_on_its_paths_only(self, clusters: ClusterFactory) -> None:
        async with answering(clusters, "Hello.") as cluster:
            other_model = await ask(cluster, model="other")
            wrong_method = await cluster.client.get("/v1/messages/count_tokens")
            elsewhere = await cluster.client.get("/v1/messages_of_others")
        assert (other_model.status_code, other_model.json()["error"]["type"]) == (404, "not_found_error")
        assert (wrong_method.status_code, wrong_method.json()["error"]["type"]) == (405, "invalid_request_error")
        assert (elsewhere.status_code, "param" in elsewhere.json()["error"]) == (404, True)

    async def test_a_full_server_says_when_to_come_back(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(is_full=True)], settings={"queue_wait_max_s": 0.05}) as cluster:
            answer = await ask(cluster)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1

    async def test_the_key_may_come_in_anthropics_header(self, clusters: ClusterFactory, tmp_path: Path) -> None:
        key, path = new_key(), tmp_path / "keys.toml"
        path.write_text(entry(key, "search", frozenset({Scope.GENERATE}), None, ""))
        async with clusters.open([clusters.target(eos_at=3)], settings={"api_keys_file": str(path)}) as cluster:
            assert (await ask(cluster, {"x-api-key": key})).status_code == 200
            assert (await ask(cluster, {"Authorization": f"Bearer {key}"})).status_code == 200
            wrong = await ask(cluster, {"x-api-key": "or-wrong"})
            none = await ask(cluster)
        for answer in (wrong, none):
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
