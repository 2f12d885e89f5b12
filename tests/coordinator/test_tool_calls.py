"""Calls of functions: the grammar permits well-formed ones only, and the parser finds them however they arrive."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tool_calls import ToolCallParser, ToolMode, ToolUse, tool_grammar
from outrider.grammar import GrammarCompiler
from outrider.sampling_params import GrammarKind, GrammarSpec
from outrider.tokenizer import Tokenizer
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
WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "}\\n</tool_call>", "days": 2}}\n</tool_call>'
)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def parsed(pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """Content, calls as (name, arguments), and how many were complete."""
    parser = ToolCallParser(["weather", "now"])
    news = [*map(parser.push, pieces), parser.finish()]
    calls: list[tuple[str, str]] = []
    for delta in itertools.chain(*(each.calls for each in news)):
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return "".join(each.content for each in news), calls, parser.num_complete_calls


WEATHER_CALL = ("weather", '{"city": "}\\n</tool_call>", "days": 2}')


@pytest.mark.parametrize(
    ("text", "content", "calls", "num_complete"),
    [
        ("just text < with <tool", "just text < with <tool", [], 0),
        ("text \n", "text \n", [], 0),
        (WEATHER, "", [WEATHER_CALL], 1),
        ("Let me see.\n" + WEATHER, "Let me see.", [WEATHER_CALL], 1),
        (f"{WEATHER}\n{NOW}", "", [WEATHER_CALL, ("now", "{}")], 2),
        (f"{NOW}\n\n", "", [("now", "{}")], 1),
        (WEATHER[:-5], "", [(WEATHER_CALL[0], WEATHER_CALL[1] + "}\n</tool_")], 0),
        (
            WEATHER[:60],
            "",
            [("weather", WEATHER[len('<tool_call>\n{"name": "weather", "arguments": ') : 60])],
            0,
        ),
        ('a <tool_call>\n{"name": "other', 'a <tool_call>\n{"name": "other', [], 0),
        ("a <tool_call> is a mark " + NOW, "a <tool_call> is a mark", [("now", "{}")], 1),
        ("<tool_call><tool_call>\n", "<tool_call><tool_call>\n", [], 0),
    ],
)
def test_every_cut_gives_the_same(
    text: str, content: str, calls: list[tuple[str, str]], num_complete: int
) -> None:
    expected = (content, calls, num_complete)
    assert parsed([text]) == expected
    assert parsed(list(text)) == expected
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert parsed([text[:first], text[first:second], text[second:]]) == expected


@given(
    parts=st.lists(
        st.sampled_from([NOW, WEATHER, "text", " ", "\n", "<tool_call>", "</tool_call>", "<to", "}"]),
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_the_outcome_does_not_depend_on_the_pieces(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    assert parsed(pieces) == parsed([text]) == parsed(list(text))


def test_arguments_come_while_the_call_goes_on() -> None:
    parser = ToolCallParser(["now"])
    parser.push('<tool_call>\n{"name": "now", "arguments": ')
    (delta,) = parser.push('{"a": 1').calls
    assert delta.arguments == '{"a": 1'


def model_dir(directory: Path, *, has_marks: bool) -> Path:
    """A tokenizer that has the marks of a call as tokens, or has not."""
    write_model_dir(directory)
    if has_marks:
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_tokens(
            [tokenizers.AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")]
        )
        tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("mode", ToolMode)
def test_the_grammar_permits_well_formed_calls_only(
    tmp_path: Path, mode: ToolMode, is_parallel: bool, has_marks: bool
) -> None:
    tokenizer = Tokenizer(model_dir(tmp_path, has_marks=has_marks))
    compiler = GrammarCompiler(
        tmp_path / "tokenizer.json", vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )
    use = ToolUse((("weather", PARAMETERS), ("now", None)), mode, is_parallel)
    grammar = GrammarSpec(GrammarKind.LARK, tool_grammar(use, tokenizer.added_token_ids))
    state = compiler.compile(grammar)

    def is_whole(text: str) -> bool:
        token_ids = [*tokenizer.encode(text), 0]
        return state.num_valid(token_ids) == len(token_ids)

    # The tokenizer would take the mark within the city for a token, which no model means there.
    weather = WEATHER.replace("}\\n</tool_call>", "Rome")
    is_auto = mode is ToolMode.AUTO
    assert is_whole(weather)
    assert is_whole(NOW)
    assert is_whole("Just text.\n") == is_auto
    assert is_whole("Let me see.\n" + NOW) == is_auto
    assert is_whole(f"{NOW}\n{weather}") == is_parallel
    for wrong in (
        NOW.replace("now", "then"),
        NOW.replace("{}", '{"x": 1}'),
        weather.replace('"city"', '"town"'),
        weather.replace("2}", '"2"}'),
        NOW.replace("\n</tool_call>", ""),
        NOW + " and so on",
        NOW + NOW,
    ):
        assert not is_whole(wrong), wrong


class TestOverHttp:
    async def ask(
        self, clusters: ClusterFactory, says: str, **body: Any
    ) -> tuple[dict[str, Any], FakeTarget]:
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
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "No need."}
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
        _, target = await self.ask(clusters, NOW, tool_choice=choice)
        assert "weather" not in target.requests[0].sampling.grammar.lark

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
        deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
        for index, (name, arguments) in enumerate([WEATHER_CALL, ("now", "{}")]):
            first, *others = [delta for delta in deltas if delta.index == index]
            assert first.id is not None
            assert first.id.startswith("call_")
            assert first.function is not None
            assert first.function.name == name
            assert all(delta.id is None for delta in others)
            pieces = [delta.function.arguments or "" for delta in others if delta.function]
            assert "".join(pieces) == arguments

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
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "sonnet"}}}
        async with clusters.open([clusters.target()]) as cluster:
            response = await cluster.client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
            )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
