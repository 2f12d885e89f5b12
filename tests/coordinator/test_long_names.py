"""Names that clients choose may be megabytes: what repeats them in an answer is cut before it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.api.http.generation_calls import ignored_header
from coordinator.api.responses.response_body import ResponseBody
from coordinator.intake.loosening.loosened_schema import TOLD_CHARS_MAX, loosened
from tests.coordinator.conftest import ClusterFactory

HEADER = "X-Outrider-Ignored"
LONG = "x" * 1_000_000
HI = [{"role": "user", "content": "hi"}]


class Whole(str):
    """A name of which nobody looks at all characters."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the whole name is read")


@pytest.mark.parametrize(
    ("ignored", "told"),
    [
        ([], None),
        (["a", "b c"], "a, b c"),
        (["é,\n"], "???"),
        (["x" * 1000], "x" * 1000),
        (["x" * 1001], "x" * 995 + ", ..."),
        (["x" * 990, "y" * 8], "x" * 990 + ", " + "y" * 8),
        (["x" * 990, "y" * 9], "x" * 990 + ", yyy, ..."),
        (["x" * 999, "y"], "x" * 995 + ", ..."),
        (["x" * 994, "y" * 9], "x" * 994 + ", ..."),
        ([LONG, "y"], "x" * 995 + ", ..."),
    ],
)
def test_a_header_ends_with_dots_where_it_does_not_tell_all(ignored: list[str], told: str | None) -> None:
    assert ignored_header(list(map(Whole, ignored))) == ({} if told is None else {HEADER: told})


def test_names_behind_the_end_of_a_header_are_not_looked_at() -> None:
    def names() -> Iterator[str]:
        yield from ["x" * 600] * 2
        raise AssertionError("a name is read that is not told")

    assert ignored_header(names())[HEADER].endswith(", ...")


async def test_a_tool_that_is_left_out_may_have_any_name(clusters: ClusterFactory) -> None:
    tools = [{"type": "custom", "name": LONG}, {"type": "web_search"}]
    async with clusters.open([clusters.target(eos_at=2)]) as cluster:
        answer = await cluster.client.post("/v1/responses", json={"input": "hi", "tools": tools})
    assert answer.status_code == 200
    assert answer.headers[HEADER].startswith("tools[0] (custom xxx")
    assert answer.headers[HEADER].endswith("xxx, ...")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, LONG: 1}),
        ("/v1/chat/completions", {"messages": HI, "é" * 1_000_000: 1}),
        ("/v1/chat/completions", {"messages": HI, "structured_outputs": {LONG: 1}}),
        ("/v1/completions", {"prompt": "x", **{f"{LONG}{index}": 1 for index in range(2)}}),
        ("/v1/responses", {"input": "x", "text": {LONG: 1}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, LONG: 1}),
        ("/tokenize", {"prompt": "x", LONG: 1}),
    ],
)
async def test_an_error_names_a_long_parameter_in_short(
    clusters: ClusterFactory, path: str, body: dict[str, Any]
) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        answer = await cluster.client.post(path, json=body)
    assert answer.status_code == 400
    assert "unknown parameter" in answer.json()["error"]["message"]
    assert len(answer.content) < 10_000


def test_places_of_what_a_schema_lost_do_not_repeat_long_names_without_end() -> None:
    """Each place holds the names around it: a schema of 60 KB would lose 60 MB."""
    inner = {f"a{index}": {"uniqueItems": True} for index in range(1000)}
    schema = {"type": "object", "properties": {"x" * 30_000: {"type": "object", "properties": inner}}}
    made = loosened(schema)
    assert made.schema["properties"]["x" * 30_000]["properties"] == {name: {} for name in inner}
    assert sum(map(len, made.dropped)) <= 2 * TOLD_CHARS_MAX
    assert loosened(inner["a0"]).dropped == ("uniqueItems",)


def test_a_conversation_may_declare_any_number_of_tools_that_are_left_out() -> None:
    hosted = {"type": "additional_tools", "tools": [{"type": "custom", "name": LONG[:1000]}] * 100}
    body = ResponseBody.model_validate({"input": [hosted, hosted, *HI]})
    body.translate()
    assert len(body.ignored) == 200
    assert len(ignored_header(body.ignored)[HEADER]) == 1000
