"""Tests of structured output: the parameters of OpenAI and vLLM for it, and the grammar that reaches the target."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from coordinator.api.schema.structured_output import ResponseFormat, StructuredOutputs
from coordinator.api.schema.tool_schema import Tool, read_tool_use
from outrider.errors import InvalidRequest
from outrider.grammar import GrammarCompiler, GrammarState
from outrider.grammar.compile_queue import MAX_RUNNING
from outrider.grammar.tokenizer import load_tokenizer
from outrider.sampling_params import GrammarKind, GrammarSpec
from protos.outrider.v1 import common_pb2, generation_pb2
from tests import grammars
from tests.coordinator.conftest import ClusterFactory

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"städte": {"type": "array"}}}
CLOSED = SCHEMA | {"additionalProperties": False}


async def grammar_of(clusters: ClusterFactory, **body: Any) -> GrammarSpec | None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        response = await cluster.complete(**body)
        assert response.status_code == 200, response.text
    sampling = target.requests[0].sampling
    return GrammarSpec.from_proto(sampling.grammar) if sampling.HasField("grammar") else None


@pytest.mark.parametrize(
    ("body", "kind", "text", "any_whitespace"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, {"type": "object"}, False),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            GrammarKind.JSON_SCHEMA, CLOSED, False,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, CLOSED, False),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA, CLOSED, False),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            GrammarKind.JSON_SCHEMA, {"type": "object"}, True,
        ),
        ({"structured_outputs": {"regex": "[a-z]+", "structural_tag": None}}, GrammarKind.REGEX, "[a-z]+", False),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"', False),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarKind.LARK, 'start: "yes" | "no"', False),
    ],
)  # fmt: skip
async def test_every_way_of_asking_becomes_a_grammar(
    clusters: ClusterFactory, body: dict[str, Any], kind: GrammarKind, text: Any, any_whitespace: bool
) -> None:
    grammar = await grammar_of(clusters, **body)
    assert grammar is not None
    assert (grammar.kind, grammar.any_whitespace) == (kind, any_whitespace)
    assert (json.loads(grammar.text) if kind is GrammarKind.JSON_SCHEMA else grammar.text) == text


async def test_the_first_grammar_finds_the_vocabulary_loaded(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []

    def load(path: Path) -> tuple[LLTokenizer, int]:
        loaded.append(path)
        return load_tokenizer(path)

    monkeypatch.setattr("outrider.grammar.tokenizer.load_tokenizer", load)
    async with clusters.open([clusters.target()]) as cluster:
        (model,) = cluster.service.environment.models.current().models
        model.grammars.load()
        assert loaded == [clusters.model_dir / "tokenizer.json"]
        answer = await cluster.complete(structured_outputs={"regex": "[ab]{3}x"})
    assert answer.status_code == 200
    assert len(loaded) == 1


async def test_any_text_needs_no_grammar(clusters: ClusterFactory) -> None:
    assert await grammar_of(clusters, response_format={"type": "text"}) is None


def test_choices_are_taken_literally(clusters: ClusterFactory) -> None:
    choices = ['a"b\\c\n', "/x/", "{}|%", "日本 😀"]
    tokenizer = clusters.tokenizer
    compiler = GrammarCompiler(
        clusters.model_dir / "tokenizer.json",
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    state = grammars.compiled(compiler, StructuredOutputs(choice=choices).to_grammar())
    for choice in choices:
        token_ids = tokenizer.encode(choice)
        assert state.num_valid(token_ids) == len(token_ids)
        assert state.num_valid(tokenizer.encode(choice + "x")) < len(tokenizer.encode(choice + "x"))


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "sonnet"}},
                }
            },
            "response_format",
        ),
    ],
)
async def test_a_grammar_that_does_not_compile_is_refused_before_any_work(
    clusters: ClusterFactory, body: dict[str, Any], parameter: str
) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        for _ in range(2):
            response = await cluster.complete(**body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == parameter
            assert parameter in response.json()["error"]["message"]
    assert target.requests == []


async def test_a_grammar_over_grpc_is_named_as_its_field(clusters: ClusterFactory) -> None:
    from coordinator.api.grpc import grpc_api

    sampling = common_pb2.SamplingParams(max_tokens=3, grammar=common_pb2.Grammar(regex="("))
    async with clusters.open([clusters.target()]) as cluster:
        with pytest.raises(InvalidRequest) as caught:
            await anext(
                grpc_api.generate(cluster.service, generation_pb2.GenerationRequest(prompt="x", sampling=sampling))
            )
    assert caught.value.parameter == "grammar"


async def test_what_was_found_good_or_bad_is_not_compiled_again(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    build = GrammarCompiler._build

    def counted(self: GrammarCompiler, spec: GrammarSpec) -> GrammarState:
        compiled.append(spec.text)
        return build(self, spec)

    monkeypatch.setattr(GrammarCompiler, "_build", counted)
    async with clusters.open([clusters.target()]) as cluster:
        for regex in ("a", "a", "b", "(", "("):
            await cluster.complete(structured_outputs={"regex": regex})
        together = [cluster.complete(structured_outputs={"regex": "c"}, n=8, temperature=1) for _ in range(4)]
        assert {response.status_code for response in await asyncio.gather(*together)} == {200}
    assert compiled == ["a", "b", "(", "c"]


async def test_a_bad_grammar_whose_python_hash_is_that_of_a_good_one_is_refused(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarSpec, "__hash__", lambda self: 7)
    async with clusters.open([clusters.target()]) as cluster:
        good = await cluster.complete(structured_outputs={"regex": "a"})
        bad = await cluster.complete(structured_outputs={"regex": "("})
    assert (good.status_code, bad.status_code) == (200, 400)


async def test_slow_grammars_delay_no_prompt_and_a_client_that_leaves_gives_up_its_place(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), []

    def build(self: GrammarCompiler, spec: GrammarSpec) -> None:
        begun.append(spec.text)
        assert gate.wait(60)

    monkeypatch.setattr(GrammarCompiler, "_build", build)
    target = clusters.target()
    try:
        async with clusters.open([target]) as cluster:
            slow = [
                asyncio.create_task(cluster.complete(structured_outputs={"regex": f"slow{index}"}))
                for index in range(40)  # more than the threads that a loop has
            ]
            async with asyncio.timeout(20):
                response = await cluster.complete(prompt="word " * 3000, max_tokens=1)
            assert response.status_code in (200, 400)  # it may be longer than the context
            for task in slow[MAX_RUNNING:]:
                task.cancel()
            await asyncio.gather(*slow[MAX_RUNNING:], return_exceptions=True)
            gate.set()
            assert {task.status_code for task in await asyncio.gather(*slow[:MAX_RUNNING])} == {200}
            assert (await cluster.complete(structured_outputs={"regex": "next"})).status_code == 200
        assert len(begun) == MAX_RUNNING + 1
    finally:
        gate.set()


@pytest.mark.parametrize("place", ["tools", "response_format", "structured_outputs"])
def test_a_schema_of_megabytes_is_refused_without_being_written_out(place: str) -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(270_000)}}
    function = {"name": "f", "parameters": schema}
    asked: dict[str, Callable[[], object]] = {
        "tools": lambda: read_tool_use(
            [Tool.model_validate({"type": "function", "function": function})], "auto", is_parallel=True
        ),
        "response_format": lambda: ResponseFormat.model_validate(
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        ).to_grammar(),
        "structured_outputs": lambda: StructuredOutputs.model_validate({"json": schema}).to_grammar(),
    }
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="longer than 262144 bytes") as caught:
        asked[place]()
    assert caught.value.parameter == place
    assert time.thread_time() - began_s < 0.1  # 0.4 s where it was written out first


async def test_a_schema_of_ten_thousand_properties_is_refused_with_its_number(
    clusters: ClusterFactory,
) -> None:
    schema = {"type": "object", "properties": {f"p{index}": {} for index in range(10_000)}}
    async with clusters.open([clusters.target()]) as cluster:
        response = await cluster.complete(structured_outputs={"json": schema})
    assert response.status_code == 400
    assert "10000 properties; permitted: 2000" in response.json()["error"]["message"]
