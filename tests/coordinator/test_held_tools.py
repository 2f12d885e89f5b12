"""Functions without `strict` never refuse a request: over every API, with what was dropped in the header."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.formats.answer_parts import ToolMode, ToolUse
from coordinator.intake import held_tools as module
from coordinator.intake.held_tools import CHECKS_MAX, COMPILE_S_MAX, Verdict, held_tools
from coordinator.intake.loosening.loosened_schema import Loosened, loosened, outline
from coordinator.intake.worker_threads import WorkerThreads
from outrider.errors import InvalidRequest
from tests.coordinator.conftest import ClusterFactory
from tests.schemas.tools import TOOLS

LABELS: dict[str, Any] = {
    "type": "object",
    "properties": {"labels": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["labels"],
}
DROPPED = "tools.label.properties.labels.uniqueItems"
REFUSED = InvalidRequest("tools", "too much")


def of_chat(tools: dict[str, Any], choice: Any, strict: bool | None) -> tuple[str, dict[str, Any]]:
    told = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in tools.items()
    ]
    named = choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": told, "tool_choice": named, "max_tokens": 4}
    return "/v1/chat/completions", body


def of_responses(tools: dict[str, Any], choice: Any, strict: bool | None) -> tuple[str, dict[str, Any]]:
    told = [
        {"type": "function", "name": name, "parameters": schema, "strict": strict} for name, schema in tools.items()
    ]
    named = choice if isinstance(choice, str) else {"type": "function", **choice}
    return "/v1/responses", {"input": "x", "tools": told, "tool_choice": named, "max_output_tokens": 4}


def of_messages(tools: dict[str, Any], choice: Any, strict: bool | None) -> tuple[str, dict[str, Any]]:
    told = [{"name": name, "input_schema": schema, "strict": strict} for name, schema in tools.items()]
    kinds = {"auto": {"type": "auto"}, "required": {"type": "any"}}
    named = kinds[choice] if isinstance(choice, str) else {"type": "tool", **choice}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": told, "tool_choice": named, "max_tokens": 4}
    return "/v1/messages", {"model": "demo", **body}


APIS = pytest.mark.parametrize("api", [of_chat, of_responses, of_messages])
Api = Callable[[dict[str, Any], Any, bool | None], tuple[str, dict[str, Any]]]


async def answered(clusters: ClusterFactory, call: tuple[str, dict[str, Any]]) -> tuple[Any, str]:
    """The answer, and the grammar that reached the target."""
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        response = await cluster.client.post(call[0], json=call[1])
    return response, target.requests[0].sampling.grammar.lark if target.requests else ""


@APIS
@pytest.mark.parametrize("choice", ["auto", "required", {"name": "label"}])
@pytest.mark.parametrize("strict", [None, False])
async def test_a_schema_that_is_not_held_is_loosened_and_the_header_says_so(
    clusters: ClusterFactory, api: Api, choice: Any, strict: bool | None
) -> None:
    response, grammar = await answered(clusters, api({"label": LABELS, "now": {"type": "object"}}, choice, strict))
    assert response.status_code == 200, response.text
    assert DROPPED in response.headers["x-outrider-ignored"].split(", ")
    assert '"labels"' in grammar
    assert "uniqueItems" not in grammar


@APIS
async def test_a_strict_one_is_refused_by_its_name(clusters: ClusterFactory, api: Api) -> None:
    response, _ = await answered(clusters, api({"label": LABELS}, "auto", True))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "uniqueItems" in message
    assert "strict: true on label" in message


async def test_only_the_strict_one_is_refused(clusters: ClusterFactory) -> None:
    path, body = of_chat({"label": LABELS, "other": LABELS}, "auto", None)
    body["tools"][1]["function"] |= {"strict": True}
    response, _ = await answered(clusters, (path, body))
    assert "strict: true on other" in response.json()["error"]["message"]
    body["tools"][1]["function"] |= {"parameters": {"type": "object"}}
    response, _ = await answered(clusters, (path, body))
    assert response.headers["x-outrider-ignored"] == DROPPED


@APIS
async def test_all_the_tools_of_servers_and_models_are_taken_together(clusters: ClusterFactory, api: Api) -> None:
    response, grammar = await answered(clusters, api(TOOLS, "auto", None))
    assert response.status_code == 200, response.text
    assert all(name in grammar for name in TOOLS)


async def test_a_tool_that_is_held_keeps_its_schema_beside_others(clusters: ClusterFactory) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]{3}$"}}}
    tools = TOOLS | {"mine": schema | {"additionalProperties": False}}
    _, grammar = await answered(clusters, of_chat(tools, "auto", None))
    assert json.dumps(tools["mine"]["properties"]) in grammar


def tagged(values: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": values}, "required": ["k"], "additionalProperties": False}


HELD_ALONE: dict[str, Any] = {  # but loosening would change them
    "deep": {"oneOf": [tagged(tagged({"const": each})) for each in ("a", "b")]},
    "many": {"oneOf": [tagged({"const": str(each)}) for each in range(70)]},
    "empty": {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 0},
}


@pytest.mark.parametrize("name", HELD_ALONE)
async def test_what_is_held_alone_stays_beside_what_is_not(clusters: ClusterFactory, name: str) -> None:
    schema = tagged(HELD_ALONE[name])
    assert loosened(schema).schema != schema
    response, grammar = await answered(clusters, of_chat({name: schema, "label": LABELS}, "auto", None))
    assert response.headers["x-outrider-ignored"] == DROPPED
    keyword = "minProperties" if name == "empty" else "oneOf"
    assert f'"{keyword}"' in grammar


@APIS
async def test_a_number_beyond_any_is_no_error_of_the_server(clusters: ClusterFactory, api: Api) -> None:
    path, body = api({"set": {"type": "object", "properties": {"a": {"maxLength": 12345}}}}, "auto", None)
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        text = json.dumps(body).replace("12345", "1e999")
        response = await cluster.client.post(path, content=text, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert response.headers["x-outrider-ignored"].endswith("tools.set.properties.a.maxLength")


async def test_the_elements_of_xml_keep_their_names(clusters: ClusterFactory) -> None:
    schema = {"type": "object", "properties": {"mode": {"enum": []}, "note": {"type": "string"}}, "required": ["mode"]}
    target = clusters.target()
    async with clusters.open([target], settings={"tool_call_parser": "qwen3_coder"}) as cluster:
        path, body = of_chat({"set": schema}, "required", None)
        response = await cluster.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "<parameter=mode>" in target.requests[0].sampling.grammar.lark


def use_of(num: int, strict: frozenset[str] = frozenset()) -> ToolUse:
    return ToolUse(tuple((f"f{index}", LABELS) for index in range(num)), ToolMode.AUTO, True, strict)


def held(
    use: ToolUse, is_refused: Callable[[ToolUse], bool], compile_s: float = 0.001
) -> tuple[ToolUse, tuple[str, ...], int]:
    """Loosens the functions; returns them, what was dropped, and the number of checks."""
    num_checks = 0

    async def check(use: ToolUse) -> Verdict:
        nonlocal num_checks
        num_checks += 1
        return Verdict(REFUSED if is_refused(use) else None, compile_s)

    async def run(work: Callable[[], None]) -> None:
        work()

    made, dropped = asyncio.run(held_tools(use, check, run))
    return made, dropped, num_checks


def test_one_that_is_beyond_a_bound_is_found_among_many() -> None:
    def is_refused(use: ToolUse) -> bool:
        return any(name == "f77" and schema != outline(LABELS) for name, schema in use.functions)

    made, dropped, num_checks = held(use_of(128), is_refused)
    schemas = dict(made.functions)
    assert schemas.pop("f77") == outline(LABELS)
    assert {json.dumps(schema) for schema in schemas.values()} == {json.dumps(LABELS)}
    assert dropped == ("tools.f77.schema",)
    assert num_checks <= CHECKS_MAX + 128 + 6


def test_the_effort_is_bounded() -> None:
    made, _, num_checks = held(use_of(128), lambda use: any(schema != outline(LABELS) for _, schema in use.functions))
    assert {json.dumps(schema) for _, schema in made.functions} == {json.dumps(outline(LABELS))}
    assert num_checks <= CHECKS_MAX + 128 + 6


def test_functions_that_are_too_many_together_lose_their_schemas() -> None:
    made, dropped, _ = held(use_of(3), lambda use: any(schema != {"type": "object"} for _, schema in use.functions))
    assert {json.dumps(schema) for _, schema in made.functions} == {'{"type": "object"}'}
    assert dropped == ("tools.f0.schema", "tools.f1.schema", "tools.f2.schema")


def test_nothing_is_loosened_where_nothing_can_be_held() -> None:
    with pytest.raises(InvalidRequest, match="too much"):
        held(use_of(3), lambda use: True)


def test_strict_ones_stay_as_they_are() -> None:
    made, dropped, _ = held(use_of(2, frozenset({"f0"})), lambda use: dict(use.functions).get("f1") == LABELS)
    assert dict(made.functions)["f0"] == LABELS
    assert dropped == ("tools.f1.properties.labels.uniqueItems",)


def is_labelled(use: ToolUse) -> bool:
    return any(schema == LABELS for _, schema in use.functions)


def test_functions_are_not_tried_alone_once_that_took_its_time() -> None:
    made, _, num_checks = held(use_of(128), is_labelled, compile_s=COMPILE_S_MAX / 4)
    assert {json.dumps(schema) for _, schema in made.functions} == {json.dumps(loosened(LABELS).schema)}
    assert num_checks == 5  # all, three alone, and all as they are loosened


def test_all_are_outlined_once_the_search_took_its_time() -> None:
    made, _, num_checks = held(
        use_of(128),
        lambda use: any(schema != outline(LABELS) for _, schema in use.functions),
        compile_s=COMPILE_S_MAX / 8,
    )
    assert {json.dumps(schema) for _, schema in made.functions} == {json.dumps(outline(LABELS))}
    assert num_checks == 8 + 2  # the loosened ones, and the outlines


@pytest.mark.parametrize("last", [loosened(LABELS).schema, outline(LABELS), {"type": "object"}])
async def test_nothing_is_loosened_on_the_thread_of_the_event_loop(monkeypatch: pytest.MonkeyPatch, last: Any) -> None:
    called: dict[str, set[int]] = {"loosened": set(), "outline": set()}  # threads

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Loosened:
            called[name].add(threading.get_ident())
            return function(*args, **options)

        return call

    async def check(use: ToolUse) -> Verdict:
        return Verdict(REFUSED if any(schema != last for _, schema in use.functions) else None, 0.001)

    monkeypatch.setattr(module, "loosened", watched("loosened", loosened))
    monkeypatch.setattr(module, "outline", watched("outline", outline))
    threads = WorkerThreads()
    try:
        made, _ = await held_tools(use_of(2), check, threads.of(None).run)
    finally:
        threads.close()
    assert dict(made.functions)["f1"] == last
    assert called["loosened"]
    assert threading.get_ident() not in called["loosened"] | called["outline"]
