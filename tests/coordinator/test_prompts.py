"""Prompts over HTTP: what clients of every API send reaches the model as transformers would render it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.coordinator.tiny_model import write_model_dir

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Köln & <others>",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
HI = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"city": "Köln"}'
OPENING = "{% for m in messages %}[{{ m['role'] }}]"

# As DeepSeek V3.1's: arguments are text that is joined, and so is a content that is not null.
JOINS_TEXT = OPENING + (
    "{% if m['tool_calls'] is defined and m['tool_calls'] is not none %}{% for t in m['tool_calls'] %}"
    "{% if m['content'] is none %}{{ '<call>' + t['function']['name'] + '>' + t['function']['arguments'] }}"
    "{% else %}{{ m['content'] + '<call>' + t['function']['name'] + '>' + t['function']['arguments'] }}{% endif %}"
    "{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
# As Mistral's: calls and results have ids of nine characters.
NINE = OPENING + (
    "{% if m.tool_calls is defined %}{% for t in m.tool_calls %}{% if t.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_CALLS] [{{ t.function | tojson }}]{% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def clusters_of(folder: Path, **config: Any) -> ClusterFactory:
    return ClusterFactory(write_model_dir(folder / "model", **config))


def prompt_of(cluster: Cluster) -> str:
    request = cluster.targets[0].requests[-1]
    token_ids = list(request.token_ids[: request.num_prompt_tokens])
    return cluster.tokenizer.decode(token_ids, skip_special_tokens=False)


async def asked(clusters: ClusterFactory, path: str = "/v1/chat/completions", **body: Any) -> tuple[Any, str]:
    """Asks, and returns the answer and the prompt of the target. Fails if the request is refused."""
    async with clusters.open([clusters.target()]) as cluster:
        answer = await cluster.client.post(path, json={"max_tokens": 3, **body})
        assert answer.status_code == 200, answer.text
        return answer.json(), prompt_of(cluster)


async def test_a_template_may_say_how_json_is_written(tmp_path: Path) -> None:
    template = "{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}{% endfor %}{{ messages[0].content }}"
    _, prompt = await asked(clusters_of(tmp_path, chat_template=template), messages=HI, tools=TOOLS)
    assert prompt == json.dumps(TOOLS[0], ensure_ascii=False) + "hi"


@pytest.mark.parametrize("place", ["configuration", "files"])
async def test_tools_reach_a_model_with_a_template_for_them(tmp_path: Path, place: str) -> None:
    texts = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools[0].function.name }}<tool_call>"}
    if place == "configuration":
        named = [{"name": name, "template": text} for name, text in texts.items()]
        clusters = clusters_of(tmp_path, chat_template=named)
    else:
        folder = write_model_dir(tmp_path / "model")
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(texts["default"])
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
        clusters = ClusterFactory(folder)
    _, prompt = await asked(clusters, messages=HI, tools=TOOLS)
    assert prompt == "Tweather<tool_call>"
    _, prompt = await asked(clusters, messages=HI)
    assert prompt == "Dhi"


@pytest.mark.parametrize("content", [None, "", "I look. "])
async def test_the_second_turn_of_a_template_that_joins_arguments(tmp_path: Path, content: str | None) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *HI,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    _, prompt = await asked(clusters_of(tmp_path, chat_template=JOINS_TEXT), messages=messages, tools=TOOLS)
    assert prompt == f"[user]hi[assistant]{content or ''}<call>weather>{ARGUMENTS}[tool]sunny"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_servers_own_ids_are_taken_in_the_next_turn(tmp_path: Path, path: str) -> None:
    """The whole loop: a call is made, and its answer comes with the id that it was given."""
    clusters = clusters_of(tmp_path, chat_template=NINE)
    token_ids = clusters.tokenizer.encode('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]')
    target = FakeTarget(token_ids, eos_at=len(token_ids))
    async with clusters.open([target]) as cluster:
        if path == "/v1/chat/completions":
            answer = await cluster.client.post(path, json={"messages": HI, "tools": TOOLS, "tool_choice": "required"})
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            call_id = message["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
            body: dict[str, Any] = {"messages": [*HI, message, result], "tools": TOOLS}
        elif path == "/v1/messages":
            tool = {"name": "weather", "input_schema": WEATHER["parameters"]}
            first = {"model": "demo", "max_tokens": 99, "tools": [tool]}
            answer = await cluster.client.post(path, json={**first, "messages": HI, "tool_choice": {"type": "any"}})
            assert answer.status_code == 200, answer.text
            content = answer.json()["content"]
            call_id = content[-1]["id"]
            result = {"type": "tool_result", "tool_use_id": call_id, "content": "sunny"}
            turns = [*HI, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
            body = {**first, "messages": turns}
        else:
            tool = {"type": "function", **WEATHER}
            answer = await cluster.client.post(path, json={"input": "hi", "tools": [tool], "tool_choice": "required"})
            assert answer.status_code == 200, answer.text
            output = answer.json()["output"]
            call_id = output[-1]["call_id"]
            result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
            body = {"input": [{"role": "user", "content": "hi"}, *output, result], "tools": [tool]}
        assert re.fullmatch("[A-Za-z0-9]{9}", call_id)
        again = await cluster.client.post(path, json=body)
        assert again.status_code == 200, again.text
        assert prompt_of(cluster).endswith("[tool]sunny")


async def test_ids_are_the_apis_own_where_the_template_takes_them(tmp_path: Path) -> None:
    clusters = clusters_of(tmp_path, chat_template="{{ messages[0].content }}<tool_call>")
    token_ids = clusters.tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    async with clusters.open([FakeTarget(token_ids, eos_at=len(token_ids))]) as cluster:
        answer = await cluster.client.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS})
    call = answer.json()["choices"][0]["message"]["tool_calls"][0]
    assert re.fullmatch("call_[0-9a-f]{32}", call["id"])


async def test_what_the_template_refuses_is_refused_with_its_words(tmp_path: Path) -> None:
    clusters = clusters_of(tmp_path, chat_template=NINE)
    call = {"id": "call_of_another_server", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    async with clusters.open([clusters.target()]) as cluster:
        answer = await cluster.client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "Tool call IDs should be alphanumeric strings with length 9!" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


async def test_a_refusal_does_not_repeat_the_conversation(tmp_path: Path) -> None:
    clusters = clusters_of(tmp_path, chat_template="{{ raise_exception(messages[0].content) }}")
    async with clusters.open([clusters.target()]) as cluster:
        messages = [{"role": "user", "content": "x" * 100_000}]
        answer = await cluster.client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert len(answer.content) < 2000


async def test_parts_reach_a_template_that_reads_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m.content %}<{{ p.type }}>{{ p.text }}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    clusters = clusters_of(tmp_path, chat_template=template)
    _, prompt = await asked(clusters, messages=[{"role": "user", "content": parts}])
    assert prompt == "<text>a<text>b"
    _, prompt = await asked(clusters, messages=HI)
    assert prompt == "<text>hi"


async def test_a_template_cannot_be_replaced_by_its_variables(tmp_path: Path) -> None:
    clusters = clusters_of(tmp_path, chat_template="{{ messages[0].content }}")
    async with clusters.open([clusters.target()]) as cluster:
        kwargs = {"chat_template": "{{ cycler.__init__ }}"}
        answer = await cluster.client.post(
            "/v1/chat/completions", json={"messages": HI, "chat_template_kwargs": kwargs}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


async def test_tokens_that_stand_beside_the_tokenizer_are_tokens_in_prompts_and_grammars(tmp_path: Path) -> None:
    """Marks of calls that tokenizer_config.json alone names."""
    flags = dict.fromkeys(("special", "lstrip", "rstrip", "normalized", "single_word"), False)
    marks = {str(300 + at): {"content": mark, **flags} for at, mark in enumerate(("<tool_call>", "</tool_call>"))}
    template = "{{ messages[0].content }}<tool_call>"
    clusters = clusters_of(tmp_path, chat_template=template, added_tokens_decoder=marks)
    first = clusters.tokenizer.added_token_ids["<tool_call>"]
    token_ids = clusters.tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    assert first in token_ids
    target = FakeTarget(token_ids, eos_at=len(token_ids))
    async with clusters.open([target]) as cluster:
        answer = await cluster.client.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert list(target.requests[0].token_ids)[-1] == first
    assert f"<[{first}]>" in target.requests[0].sampling.grammar.lark
