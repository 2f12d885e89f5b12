"""Reasoning over HTTP: models that reason before they answer, by the formats that their chat templates show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.answer.choice_writer import AnswerFormat, ChoiceWriter
from coordinator.formats.answer_parts import AnswerRules, ReasoningStart
from coordinator.formats.output_format import AnswerPlan, choose_format
from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.output.text_output import VisibleOutput
from outrider.text.detokenizer import IncrementalDetokenizer
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import PLAIN, FakeTarget, served_model
from tests.coordinator.test_answer_size import end as end_of_sequence
from tests.coordinator.test_http_api import events_of, openai_client
from tests.coordinator.tiny_model import write_model_dir

CONVERSATION = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}assistant: "
# The prompt opens the reasoning, or closes it at once.
THINKING = CONVERSATION + "<think>\n{% if not enable_thinking | default(true) %}\n</think>\n\n{% endif %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if false %}<|channel|>{% endif %}<|start|>assistant"
)
MESSAGES = [{"role": "user", "content": "x"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}


async def ask(
    clusters: ClusterFactory, text: str, template: str = CONVERSATION, *, settings: Any = None, **body: Any
) -> tuple[Any, FakeTarget]:
    """Asks a model that answers with `text`; returns the choice, or the deltas of a stream."""
    token_ids = clusters.tokenizer.encode(text)
    target = FakeTarget(token_ids, eos_at=len(token_ids), tokens_per_step=3)
    async with clusters.open([target], settings={"chat_template": template, **(settings or {})}) as cluster:
        response = await cluster.client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    if body.get("stream"):
        return [event["choices"][0]["delta"] for event in events_of(response)], target
    assert response.status_code == 200, response.text
    return response.json()["choices"][0], target


@pytest.mark.parametrize(
    ("template", "text"),
    [(CONVERSATION, "<think>\nLet me see.\n</think>\n\nYes."), (THINKING, "Let me see.\n</think>\n\nYes.")],
    ids=["the answer opens it", "the prompt opens it"],
)
class TestParts:
    async def test_an_answer_has_its_reasoning_under_both_names(
        self, clusters: ClusterFactory, template: str, text: str
    ) -> None:
        choice, target = await ask(clusters, text, template)
        assert choice["message"] == {
            "role": "assistant", "content": "Yes.", "refusal": None,
            "reasoning": "Let me see.", "reasoning_content": "Let me see.",
        }  # fmt: skip
        assert choice["finish_reason"] == "stop"
        assert not target.requests[0].sampling.HasField("grammar")

    async def test_a_stream_has_the_same_parts(self, clusters: ClusterFactory, template: str, text: str) -> None:
        deltas, _ = await ask(clusters, text, template, stream=True)
        for name, expected in (
            ("content", "Yes."),
            *dict.fromkeys(("reasoning", "reasoning_content"), "Let me see.").items(),
        ):
            assert "".join(delta.get(name, "") for delta in deltas) == expected
        assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
        kinds = [name for delta in deltas for name in delta if name in ("content", "reasoning") and delta[name]]
        assert kinds == sorted(kinds, reverse=True), "the reasoning comes first"

    async def test_a_client_may_leave_the_reasoning_out(
        self, clusters: ClusterFactory, template: str, text: str
    ) -> None:
        choice, _ = await ask(clusters, text, template, include_reasoning=False)
        assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
        deltas, _ = await ask(clusters, text, template, include_reasoning=False, stream=True)
        assert not any("reasoning" in name for delta in deltas for name in delta)

    async def test_calls_come_after_the_reasoning(self, clusters: ClusterFactory, template: str, text: str) -> None:
        choice, target = await ask(clusters, text.replace("Yes.", CALL), template, tools=TOOLS)
        assert choice["message"]["reasoning"] == "Let me see."
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert choice["finish_reason"] == "tool_calls"
        assert "</think>" in target.requests[0].sampling.grammar.lark

    async def test_a_format_begins_behind_the_reasoning(
        self, clusters: ClusterFactory, template: str, text: str
    ) -> None:
        choice, target = await ask(clusters, text.replace("Yes.", '{"a": 1}'), template, response_format=FORMAT)
        assert choice["message"]["reasoning"] == "Let me see."
        assert choice["message"]["content"] == '{"a": 1}'
        assert "</think>" in target.requests[0].sampling.grammar.lark

    async def test_reasoning_that_was_cut_off_leaves_no_content(
        self, clusters: ClusterFactory, template: str, text: str
    ) -> None:
        num_tokens = len(clusters.tokenizer.encode(text.partition(" see")[0]))
        choice, _ = await ask(clusters, text, template, max_tokens=num_tokens)
        assert choice["message"]["reasoning"] == "Let me"
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "length"

    async def test_an_operator_may_turn_it_off(self, clusters: ClusterFactory, template: str, text: str) -> None:
        choice, _ = await ask(clusters, text, template, settings={"reasoning_parser": "none"})
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}


async def test_a_prompt_that_closes_the_reasoning_leaves_only_content(clusters: ClusterFactory) -> None:
    choice, target = await ask(
        clusters, '{"a": 1}', THINKING,
        chat_template_kwargs={"enable_thinking": False}, response_format=FORMAT,
    )  # fmt: skip
    assert choice["message"] == {"role": "assistant", "content": '{"a": 1}', "refusal": None}
    assert target.requests[0].sampling.grammar.json_schema


async def test_the_openai_package_streams_reasoning(clusters: ClusterFactory) -> None:
    token_ids = clusters.tokenizer.encode("Let me see.\n</think>\n\nYes.")
    target = FakeTarget(token_ids, eos_at=len(token_ids), tokens_per_step=3)
    async with (
        clusters.open([target], settings={"chat_template": THINKING}) as cluster,
        openai_client(cluster) as client,
    ):
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me see."


async def test_a_completion_shows_the_text_as_it_is(clusters: ClusterFactory) -> None:
    text = "<think>a</think>b"
    token_ids = clusters.tokenizer.encode(text)
    target = FakeTarget(token_ids, eos_at=len(token_ids))
    async with clusters.open([target], settings={"chat_template": THINKING}) as cluster:
        response = await cluster.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 99})
    assert response.json()["choices"][0]["text"] == text


@pytest.mark.parametrize("name", ["response_format", "structured_outputs"])
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_tools_beside_a_format(clusters: ClusterFactory, tool_choice: str, name: str) -> None:
    """A call has the function's schema; an answer that is none has the format, unless a call is required."""
    wanted = FORMAT if name == "response_format" else {"regex": '\\{"a": [0-9]+\\}'}
    body = {"tools": TOOLS, "tool_choice": tool_choice, name: wanted}
    choice, target = await ask(clusters, '{"a": 1}', "{{ messages[0].content }}", **body)
    assert choice["message"] == {"role": "assistant", "content": '{"a": 1}', "refusal": None}
    grammar = target.requests[0].sampling.grammar.lark
    assert ("structure |" in grammar or "| structure" in grammar) == (tool_choice == "auto")
    choice, _ = await ask(clusters, CALL, "{{ messages[0].content }}", **body)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


NO_SCHEMA = {"type": "sonnet"}
NO_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": NO_SCHEMA}}
NO_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": NO_SCHEMA, "strict": True}}]


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"tools": TOOLS, "response_format": NO_FORMAT}, "response_format"),
        ({"tools": TOOLS, "structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs"),
        ({"tools": NO_TOOLS, "response_format": FORMAT}, "tools"),
    ],
)
async def test_what_does_not_compile_is_refused_by_its_own_name(
    clusters: ClusterFactory, body: dict[str, Any], parameter: str
) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        response = await cluster.client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == parameter


def harmony_model(directory: Path) -> Path:
    """A tokenizer with harmony's marks as special tokens."""
    write_model_dir(directory, eos_token="<|return|>")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace("<|end|>", "<|return|>"))
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
    tokenizer.add_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(path))
    return directory


async def test_the_channels_of_gpt_oss_are_parts_of_the_answer(tmp_path: Path) -> None:
    clusters = ClusterFactory(harmony_model(tmp_path))
    thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    choice, target = await ask(clusters, thought + "<|channel|>final<|message|>Yes.", HARMONY)
    assert choice["message"]["reasoning"] == "Let me see."
    assert choice["message"]["content"] == "Yes."
    assert not target.requests[0].sampling.HasField("grammar")
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    choice, target = await ask(clusters, thought + call, HARMONY, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert "<[30" in target.requests[0].sampling.grammar.lark, "marks are generated as tokens"


@pytest.mark.parametrize(("content", "thinking"), [("Yes.", "Let me see."), (None, "Let me see."), ("I look.", "")])
async def test_earlier_reasoning_has_the_name_that_gpt_oss_reads(
    clusters: ClusterFactory, content: str | None, thinking: str
) -> None:
    """Its template refuses a message of thoughts, content and calls."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning": "Let me see."}
    if content != "Yes.":
        message["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    template = (
        "{% set m = messages[0] %}{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('both') }}"
        "{% endif %}{{ m.reasoning_content }}|{{ m.thinking }}|"
    )
    async with clusters.open([clusters.target()], settings={"chat_template": template}) as cluster:
        answer = await cluster.client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    prompt = clusters.tokenizer.decode(list(cluster.targets[0].requests[0].token_ids))
    assert prompt == f"Let me see.|{thinking}|"


@pytest.mark.parametrize("name", ["mistral", "hermes"])
async def test_a_setting_names_the_format_of_calls(clusters: ClusterFactory, name: str) -> None:
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    choice, target = await ask(clusters, text, settings={"tool_call_parser": name}, tools=TOOLS)
    assert bool(choice["message"].get("tool_calls")) == (name == "mistral")
    assert json.dumps("[TOOL_CALLS]") in target.requests[0].sampling.grammar.lark or name == "hermes"


class TestUsage:
    @pytest.mark.parametrize("is_shown", [True, False])
    async def test_tokens_of_reasoning_are_counted(self, clusters: ClusterFactory, is_shown: bool) -> None:
        reasoning = clusters.tokenizer.encode("<think>\nLet me see.")
        token_ids = [*reasoning, *clusters.tokenizer.encode("\n</think>\n\nYes.")]
        target = FakeTarget(token_ids, eos_at=len(token_ids))
        body = {"messages": MESSAGES, "include_reasoning": is_shown}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        async with clusters.open([target], settings={"chat_template": CONVERSATION}) as cluster:
            whole = await cluster.client.post("/v1/chat/completions", json=body)
            streamed = await cluster.client.post("/v1/chat/completions", json=body | stream)
        expected = {"reasoning_tokens": len(reasoning)}
        assert whole.json()["usage"]["completion_tokens_details"] == expected
        assert events_of(streamed)[-1]["usage"]["completion_tokens_details"] == expected

    async def test_an_answer_without_reasoning_has_none(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.client.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}

    @given(data=st.data())
    def test_the_count_is_the_same_however_steps_are_joined(
        self, clusters: ClusterFactory, data: st.DataObject
    ) -> None:
        """Outputs that wait for their client are joined, and text waits where it may be a stop string."""
        token_ids = clusters.tokenizer.encode("<think>\nLet me see. \u2713\n</think>\n\nYes.")
        detokenizer = IncrementalDetokenizer(clusters.tokenizer)
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        plan = AnswerPlan(choose_format(CONVERSATION), AnswerRules(reasoning=ReasoningStart.POSSIBLE))
        num_reasoning = len(clusters.tokenizer.encode("<think>\nLet me see. \u2713"))
        request = GenerationInput(request_id="r1", text="hi")
        spec = GenerationSpec(
            request=request, model="demo", prompt_token_ids=(1,), max_tokens=99, sampling=request.sampling,
            deadline_s=1, served=served_model(), plan=plan,
        )  # fmt: skip
        writer = ChoiceWriter(spec, AnswerFormat(is_chat=True), clusters.tokenizer, lambda: "call_1")
        text, num_taken, num_shown = "".join(pieces), 0, 0
        while num_taken < len(pieces):
            step = pieces[num_taken : num_taken + data.draw(st.integers(1, len(pieces)))]
            num_taken += len(step)
            end = data.draw(st.integers(num_shown, len("".join(pieces[:num_taken]))))
            some = (1,) * len(step)
            writer.piece(VisibleOutput(text[num_shown:end], some, (PLAIN,) * len(step), tuple(step)))
            num_shown = end
        writer.piece(replace(end_of_sequence(), text=text[num_shown:]))
        assert writer.num_reasoning_tokens == num_reasoning
