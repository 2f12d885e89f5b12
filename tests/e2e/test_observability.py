"""One request seen from outside: its trace across three processes, and its line in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.collector import CollectedSpan, collecting
from tests.e2e.secured import SecuredOptions, SecuredSystem

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

PARENT_ID = "b7ad6b7169203331"
PROMPT = "def xylophone(path):\n"


@pytest.mark.timeout(300)  # it starts a whole system
async def test_a_request_is_one_trace_and_one_line(tmp_path: Path) -> None:
    async with collecting() as collector:
        options = SecuredOptions(otlp_endpoint=collector.endpoint, log_format="json")
        async with SecuredSystem(options, tmp_path / "logs") as system, system.http(system.key) as client:
            told, trace_id, request_id = await asked_with_hints(client)
            spans = await collector.trace(trace_id, is_whole)
    by_service = {span.service: span for span in spans}
    request, target, draft = (by_service[f"outrider-{each}"] for each in ("coordinator", "target", "draft"))
    assert request.parent_id == PARENT_ID
    assert target.parent_id == draft.parent_id == request.span_id
    assert (request.name, target.name, draft.name) == ("generate", "target.generate", "draft.attach")
    assert request.attributes["outrider.request_id"] == request_id
    assert request.attributes["gen_ai.usage.output_tokens"] == told["usage"]["completion_tokens"]
    assert request.attributes["outrider.tenant"] == "search"
    assert [name for name, _ in request.events][:2] == ["placed", "first token"]
    assert request.start_ns <= target.start_ns <= request.end_ns

    steps = [attributes for name, attributes in target.events if name == "step"]
    statistics = told["metrics"]["speculative_decoding"]
    assert sum(step["accepted_draft_tokens"] for step in steps) == statistics["num_accepted_draft_tokens"] > 0
    assert sum(step["tokens"] for step in steps) == told["usage"]["completion_tokens"]
    assert num_sent_nodes(spans) > 0
    for span in spans:
        assert "xylophone" not in str(span)

    lines = request_lines(tmp_path / "logs" / "coordinator-0.log")
    (line,) = [each for each in lines if each["request_id"] == request_id]
    assert line["trace_id"] == request.trace_id
    assert (line["status"], line["tenant"]) == ("OK", "search")
    assert line["num_output_tokens"] == told["usage"]["completion_tokens"]
    assert line["num_accepted_draft_tokens"] == statistics["num_accepted_draft_tokens"]


def num_sent_nodes(spans: list[CollectedSpan]) -> int:
    """By all attachments: a request may have had more than one."""
    return sum(span.attributes["outrider.num_sent_nodes"] for span in spans if span.name == "draft.attach")


def is_whole(spans: list[CollectedSpan]) -> bool:
    return len({span.service for span in spans}) == 3 and num_sent_nodes(spans) > 0


async def asked_with_hints(client: httpx.AsyncClient) -> tuple[dict[str, Any], str, str]:
    """The answer to a request of which hints were accepted, its trace and its id.

    A request may be over before its draft worker has said a word.
    """
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "speculation": {"always": True}}
    for number in range(1, 31):
        trace_id, request_id = f"{number:032x}", f"request-{number}"
        headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01", "X-Request-Id": request_id}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        if told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]:
            return told, trace_id, request_id
    raise AssertionError(f"no hint was ever accepted: {told['metrics']}")


def request_lines(path: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"time"')]
    return [line for line in lines if line["logger"] == "coordinator.requests"]


def test_a_collected_span_is_compared_by_what_it_holds() -> None:
    """So that `str` in the test above sees all of it."""
    span = CollectedSpan("s", "n", "t", "i", "p", {"a": "xylophone"}, [("e", {"b": 1})], 0, 1)
    assert "xylophone" in str(span)
