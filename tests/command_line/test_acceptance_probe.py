"""Tests of the probe at start that measures the draft's acceptance: its counts, its retries and its report."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from command_line.start.acceptance_probe import NUM_ROUNDS_MAX, NUM_STEPS_MIN, PROMPTS, ProbeResult, probe


def api(answer: Any, status: int = 200) -> tuple[httpx.AsyncClient, list[dict[str, Any]]]:
    """A client of a server that answers everything so, and what it is asked."""
    asked: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(status, json=answer)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server"), asked


def stats(num_spec_steps: int, num_draft_tokens: int, num_accepted: int) -> dict[str, Any]:
    counts = {
        "num_spec_steps": num_spec_steps,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_draft_tokens": num_accepted,
    }
    return {"metrics": {"speculative_decoding": counts}}


async def test_counts_of_all_texts_are_added_up_and_hints_are_always_on() -> None:
    client, asked = api(stats(10, 30, 7))
    assert await probe(client, "m") == ProbeResult(30, 90, 21)
    assert [each["prompt"] for each in asked] == list(PROMPTS)
    assert all(each["speculation"] == {"enabled": True, "always": True} for each in asked)


async def test_it_asks_for_more_where_hints_are_few_and_gives_up_some_time() -> None:
    client, asked = api(stats(1, 1, 0))
    assert await probe(client, "m") == ProbeResult(9, 9, 0)
    assert len(asked) == NUM_ROUNDS_MAX * len(PROMPTS)


@pytest.mark.parametrize("answer", [[], {"choices": []}, {"metrics": None}])
async def test_answers_that_say_nothing_of_hints_give_no_result(answer: Any) -> None:
    assert await probe(api(answer)[0], "m") is None


async def test_a_refusal_gives_no_result() -> None:
    assert await probe(api({}, 503)[0], "m") is None


@pytest.mark.parametrize(
    ("result", "is_useless", "said"),
    [
        (ProbeResult(60, 200, 0), True, "is of no use: it was accepted for 0 of 200 hints"),
        (ProbeResult(60, 200, 1), True, "1 of 200 hints"),
        (ProbeResult(60, 200, 9), False, "9 of 200 hints in a short probe, 0.1 tokens a step"),
        (ProbeResult(NUM_STEPS_MIN - 1, 9, 0), False, "0 of 9 hints in a short probe, which is too few"),
        (ProbeResult(), False, "0 of 0 hints in a short probe, which is too few"),
    ],
)
def test_the_report_is_loud_where_hardly_a_hint_holds(result: ProbeResult, is_useless: bool, said: str) -> None:
    assert result.is_useless is is_useless
    assert said in result.report("folder")
