"""Coding agents of today: each turn of a loop of tools as they send it is served, and what is left out is said.

Fixtures in `agents/` hold the fields that each agent sends, found in its public source or in published captures (named
there), with texts of our own. Turns grow the conversation; every turn is streamed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.coordinator.test_responses import prompt_of

AGENTS = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "agents").glob("*.json"))}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('System must be first.') }}{% endif %}"
    "{{ message.role }}: {{ message.reasoning_content or '' }}|{{ message.content }};"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }};{% endfor %}"
    "{% endfor %}"
)
"""As strict as those of Qwen 3.5 and later ones, which refuse a system message that is not the first."""


def called(answer: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls in a stream of any of the three APIs."""
    calls: list[tuple[str, str]] = []
    for line in answer.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        told = [
            call["function"] for choice in event.get("choices", ()) for call in choice["delta"].get("tool_calls", ())
        ]
        match event.get("type"):
            case "response.output_item.added":
                told = [{"name": event["item"].get("name")}]
            case "response.function_call_arguments.delta":
                told = [{"arguments": event["delta"]}]
            case "content_block_start":
                told = [{"name": event["content_block"].get("name")}]
            case "content_block_delta":
                told = [{"arguments": event["delta"].get("partial_json", "")}]
        for part in told:
            if part.get("name"):
                calls.append((part["name"], ""))
            if part.get("arguments"):
                calls[-1] = (calls[-1][0], calls[-1][1] + part["arguments"])
    return calls


def left_out_of(answer: httpx.Response) -> list[str]:
    said = answer.headers.get("x-outrider-ignored", "")
    return sorted(said.split(", ")) if said else []


@pytest.mark.parametrize("agent", AGENTS)
async def test_each_turn_is_served_and_what_is_left_out_is_said(clusters: ClusterFactory, agent: str) -> None:
    recorded: dict[str, Any] = AGENTS[agent]
    call = recorded["call"]
    says = [f"I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>", "It prints 1.", "Bye."]
    conversation: list[Any] = []
    for turn, text, ignored in zip(recorded["turns"], says, recorded["ignored"], strict=True):
        conversation += turn
        body = recorded["body"] | {recorded["grows"]: conversation}
        settings = {"chat_template": TEMPLATE}
        script = clusters.tokenizer.encode(text)
        target = FakeTarget(script, eos_at=len(script), tokens_per_step=4)
        async with clusters.open([target], settings=settings, max_model_len=8192) as cluster:
            answer = await cluster.client.post(recorded["path"], json=body, headers=recorded["headers"])
            prompt = prompt_of(cluster) if answer.is_success else ""
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert left_out_of(answer) == sorted(ignored)
        expected = [(call["name"], json.dumps(call["arguments"]))] if turn is recorded["turns"][0] else []
        assert called(answer.text) == expected
        assert json.dumps(call["name"]) in prompt, "the tools are in the prompt"
        for left_out in ("apply_patch", "mcp__docs", "image_generation", "web_search"):
            assert left_out not in prompt
    assert "print(1)" in prompt or "waited" in prompt, "so is what the tools gave"
    assert prompt.rstrip().endswith("Thank you.;")


@pytest.mark.parametrize("agent", [name for name, recorded in AGENTS.items() if "asides" in recorded])
async def test_what_it_asks_besides_is_served(clusters: ClusterFactory, agent: str) -> None:
    """Counts of tokens, titles, searches."""
    script = clusters.tokenizer.encode('{"title": "a"}')
    target = FakeTarget(script, eos_at=len(script), tokens_per_step=4)
    async with clusters.open([target], settings={"chat_template": TEMPLATE}, max_model_len=8192) as cluster:
        for aside in AGENTS[agent]["asides"]:
            answer = await cluster.client.post(aside["path"], json=aside["body"], headers=AGENTS[agent]["headers"])
            assert answer.status_code == 200, answer.text
            assert left_out_of(answer) == sorted(aside["ignored"])


async def test_system_messages_come_first_only_where_the_template_wants_them_so(clusters: ClusterFactory) -> None:
    """Codex tells more after its instructions. A chat is left as its client wrote it."""
    user, more = {"role": "user", "content": "Hi."}, {"role": "developer", "content": "Be short."}
    said = {"input": [user, more], "instructions": "Be kind."}
    script = clusters.tokenizer.encode("Hello.")
    lenient = "{% for message in messages %}{{ message.role }}: |{{ message.content }};{% endfor %}"
    for template, prompt in (
        (TEMPLATE, "system: |Be kind.\n\nBe short.;user: |Hi.;"),
        (lenient, "system: |Be kind.;user: |Hi.;system: |Be short.;"),
    ):
        target = FakeTarget(script, eos_at=len(script))
        async with clusters.open([target], settings={"chat_template": template}) as cluster:
            assert (await cluster.client.post("/v1/responses", json=said)).status_code == 200
            assert prompt_of(cluster) == prompt
            chat = await cluster.client.post("/v1/chat/completions", json={"messages": [user, more]})
            assert chat.status_code == (400 if template is TEMPLATE else 200)
