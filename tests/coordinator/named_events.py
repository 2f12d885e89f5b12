"""Events with names, as the Responses API and Anthropic's API stream them, and their golden traces."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.golden import check_trace

TRACES = Path(__file__).parent / "traces"
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO_CALLS = f"Let me see.\n{CALL}\n{CALL}"
# As different as what a response repeats of its request and of the time.
_CHANGING = {"created_at": 0, "metrics": {}}
_DRAWN = re.compile(r"\b(call|toolu)_[0-9a-f]{32}\b")


@asynccontextmanager
async def answering(clusters: ClusterFactory, text: str, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster whose target generates a text and ends."""
    script = clusters.tokenizer.encode(text)
    target = FakeTarget(script, **({"eos_at": len(script), "tokens_per_step": 6} | options))
    async with clusters.open([target]) as cluster:
        yield cluster


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events' data. Each event's name is its type."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def steady(value: Any) -> Any:
    """A value without what differs from run to run."""
    if isinstance(value, dict):
        return {name: _CHANGING.get(name, steady(each)) for name, each in value.items()}
    if isinstance(value, list):
        return [steady(each) for each in value]
    return _DRAWN.sub(r"\1_DRAWN", value) if isinstance(value, str) else value


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with deltas of one part as one, for how a text is cut depends on the time. Without their numbers."""
    found: list[dict[str, Any]] = []
    for event in ({name: value for name, value in each.items() if name != "sequence_number"} for each in events):
        last = found[-1] if found else {}
        if "delta" in event and event["type"] != "message_delta" and _part(event) == _part(last):
            last["delta"] = _sum(last["delta"], event["delta"])
        else:
            found.append(event)
    return found


def _part(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "delta"}


def _sum(first: Any, second: Any) -> Any:
    """The sum of two deltas: a text, or the type of a text and the text."""
    if isinstance(first, str):
        return first + second
    return {name: value if name == "type" else value + second[name] for name, value in first.items()}


def check_events(name: str, events: list[dict[str, Any]]) -> None:
    """Compares the events of a stream with a golden trace."""
    lines = [json.dumps(steady(event), ensure_ascii=False, separators=(",", ":")) for event in joined(events)]
    check_trace(TRACES / f"{name}.txt", "\n".join([*lines, ""]))
