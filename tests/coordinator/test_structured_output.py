"""What the output may look like: OpenAI's and vLLM's words for it, and the grammar that reaches the target."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.structured_output import StructuredOutputs
from outrider.grammar import GrammarCompiler
from outrider.sampling_params import GrammarKind, GrammarSpec
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import ClusterFactory

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"städte": {"type": "array"}}}


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
            GrammarKind.JSON_SCHEMA, SCHEMA, False,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA, False),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA, SCHEMA, False),
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
    state = compiler.compile(StructuredOutputs(choice=choices).to_grammar())
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
    from coordinator import grpc_api
    from outrider.errors import InvalidRequest

    sampling = common_pb2.SamplingParams(top_p=1, max_tokens=3, grammar=common_pb2.Grammar(regex="("))
    async with clusters.open([clusters.target()]) as cluster:
        with pytest.raises(InvalidRequest) as caught:
            await anext(
                grpc_api.generate(
                    cluster.service, generation_pb2.GenerationRequest(prompt="x", sampling=sampling)
                )
            )
    assert caught.value.parameter == "grammar"


async def test_what_was_found_good_is_not_compiled_again(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(GrammarCompiler, "check", lambda self, spec: checked.append(spec))
    async with clusters.open([clusters.target()]) as cluster:
        for regex in ("a", "a", "b"):
            await cluster.complete(structured_outputs={"regex": regex})
    assert [spec.text for spec in checked] == ["a", "b"]
