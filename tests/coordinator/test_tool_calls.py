"""Calls of functions over HTTP: how they are asked for, answered and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.coordinator.test_http_api import events_of, openai_client
from tests.coordinator.tiny_model import write_model_dir

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "$defs": {"days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "}\\n</tool_call>", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


WEATHER_CALL = ("weather", '{"city": "}\\n</tool_call>", "days": 2}')


def model_dir(directory: Path, *, has_marks: bool) -> Path:
    """A tokenizer that has the marks of a call as tokens, or has not."""
    write_model_dir(directory)
    if has_marks:
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
        tokenizer.save(str(directory / "tokenizer.json"))
    return directory


class TestOverHttp:
    async def ask(self, clusters: ClusterFactory, says: str, **body: Any) -> tuple[dict[str, Any], FakeTarget]:
        token_ids = clusters.tokenizer.encode(says)
        target = FakeTarget(token_ids, eos_at=len(token_ids), tokens_per_step=4)
        async with clusters.open([target]) as cluster:
            response = await cluster.client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **body},
            )
        assert response.status_code == 200, response.text
        return response.json(), target

    async def test_calls_are_told_from_the_text(self, clusters: ClusterFactory) -> None:
        answer, _ = await self.ask(clusters, f"Let me see.\n{WEATHER}\n{NOW}")
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        first, second = choice["message"]["tool_calls"]
        assert first["type"] == "function"
        assert first["function"]["name"] == "weather"
        assert json.loads(first["function"]["arguments"]) == {"city": "}\n</tool_call>", "days": 2}
        assert second["function"] == {"name": "now", "arguments": "{}"}
        assert first["id"].startswith("call_")
        assert first["id"] != second["id"]
        assert "index" not in first

    async def test_an_answer_without_a_call_is_plain_text(self, clusters: ClusterFactory) -> None:
        answer, target = await self.ask(clusters, "No need.")
        assert answer["choices"][0]["message"] == {
            "role": "assistant",
            "content": "No need.",
            "refusal": None,
        }
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert target.requests[0].sampling.grammar.lark

    async def test_a_call_alone_has_no_content(self, clusters: ClusterFactory) -> None:
        answer, _ = await self.ask(clusters, NOW, tool_choice="required")
        assert answer["choices"][0]["message"]["content"] is None

    async def test_a_call_that_was_cut_off_is_shown_as_far_as_it_got(self, clusters: ClusterFactory) -> None:
        answer, _ = await self.ask(clusters, WEATHER, max_tokens=len(clusters.tokenizer.encode(WEATHER[:60])))
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        assert WEATHER_CALL[1].startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])

    async def test_no_tools_may_be_called_where_none_was_chosen(self, clusters: ClusterFactory) -> None:
        answer, target = await self.ask(clusters, NOW, tool_choice="none")
        assert answer["choices"][0]["message"]["content"] == NOW
        assert not target.requests[0].sampling.HasField("grammar")

    async def test_a_named_function_is_the_only_one(self, clusters: ClusterFactory) -> None:
        choice = {"type": "function", "function": {"name": "now"}}
        answer, target = await self.ask(clusters, NOW, tool_choice=choice)
        assert "weather" not in target.requests[0].sampling.grammar.lark
        # As at OpenAI and vLLM, where the client named the function.
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1

    async def test_a_required_call_is_a_reason_to_end(self, clusters: ClusterFactory) -> None:
        answer, _ = await self.ask(clusters, NOW, tool_choice="required")
        assert answer["choices"][0]["finish_reason"] == "tool_calls"

    async def test_the_openai_package_streams_calls(self, clusters: ClusterFactory) -> None:
        token_ids = clusters.tokenizer.encode(f"Let me see.\n{WEATHER}\n{NOW}")
        target = FakeTarget(token_ids, eos_at=len(token_ids), tokens_per_step=3)
        async with clusters.open([target]) as cluster, openai_client(cluster) as client:
            stream = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "x"}], tools=TOOLS, stream=True
            )
            choices = [chunk.choices[0] async for chunk in stream]
        assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
        assert choices[-1].finish_reason == "tool_calls"
        for choice in choices:
            indices = [delta.index for delta in choice.delta.tool_calls or []]
            assert len(indices) == len(set(indices)), "one entry for each call in a chunk"
        deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
        for index, (name, arguments) in enumerate([WEATHER_CALL, ("now", "{}")]):
            first, *others = [delta for delta in deltas if delta.index == index]
            assert first.id is not None
            assert first.id.startswith("call_")
            assert first.function is not None
            assert first.function.name == name
            assert all(delta.id is None for delta in others)
            pieces = [delta.function.arguments or "" for delta in (first, *others) if delta.function]
            assert "".join(pieces) == arguments

    async def test_a_client_that_reads_the_first_entry_of_each_chunk_gets_the_whole_call(
        self, clusters: ClusterFactory
    ) -> None:
        token_ids = clusters.tokenizer.encode(NOW)
        target = FakeTarget(token_ids, eos_at=len(token_ids), tokens_per_step=len(token_ids))
        body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True}
        async with clusters.open([target]) as cluster:
            events = events_of(await cluster.client.post("/v1/chat/completions", json=body))
        calls = [event["choices"][0]["delta"].get("tool_calls") for event in events if event["choices"]]
        ((call,),) = [each for each in calls if each]
        assert call.pop("id").startswith("call_")
        assert call == {"index": 0, "type": "function", "function": {"name": "now", "arguments": "{}"}}

    async def test_streamed_logprobs_come_though_text_is_held_back(self, clusters: ClusterFactory) -> None:
        token_ids = clusters.tokenizer.encode(NOW)
        target = FakeTarget(token_ids, eos_at=len(token_ids), tokens_per_step=3)
        body = {
            "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True, "logprobs": True,
        }  # fmt: skip
        async with clusters.open([target]) as cluster:
            events = events_of(await cluster.client.post("/v1/chat/completions", json=body))
        shown = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        assert sum(len(each["content"]) for each in shown) == len(token_ids)


class TestConversations:
    TEMPLATE = (
        "{% if tools %}[{% for tool in tools %}{{ tool.function.name }} {% endfor %}]{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})"
        "{% endfor %}{{ m.tool_call_id or '' }};{% endfor %}"
    )

    @pytest.mark.parametrize(("tool_choice", "has_tools"), [("auto", True), ("none", False)])
    async def test_the_template_sees_tools_calls_and_results(
        self, clusters: ClusterFactory, tool_choice: str, has_tools: bool
    ) -> None:
        messages = [
            {"role": "user", "content": "x"},
            {
                "role": "assistant", "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": "b"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
        ]  # fmt: skip
        target = clusters.target()
        async with clusters.open([target], settings={"chat_template": self.TEMPLATE}) as cluster:
            response = await cluster.client.post(
                "/v1/chat/completions",
                json={"messages": messages, "tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 3},
            )
        assert response.status_code == 200, response.text
        shown = clusters.tokenizer.decode(list(target.requests[0].token_ids))
        prefix = "[weather now ]" if has_tools else ""
        assert shown == prefix + 'user:x;assistant:(now {"a": "b"});tool:nooncall_1;'

    @pytest.mark.parametrize("has_marks", [False, True])
    async def test_marks_that_are_tokens_are_spoken_as_tokens(self, tmp_path: Path, has_marks: bool) -> None:
        clusters = ClusterFactory(model_dir(tmp_path, has_marks=has_marks))
        token_ids = clusters.tokenizer.encode(NOW)
        target = FakeTarget(token_ids, eos_at=len(token_ids))
        async with clusters.open([target]) as cluster:
            response = await cluster.client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
            )
        assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
        assert ("<[30" in target.requests[0].sampling.grammar.lark) == has_marks

    async def test_a_schema_that_makes_no_sense_is_refused_as_tools(self, clusters: ClusterFactory) -> None:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "sonnet"}, "strict": True}}
        async with clusters.open([clusters.target()]) as cluster:
            response = await cluster.client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
            )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
