"""Tests of the chaos suite's requests: the same for a seed, the same over HTTP and gRPC, each with one correct
answer."""

from __future__ import annotations

import json
import random

from tests.e2e.chaos.cases import make_cases


def test_a_seed_makes_the_same_cases() -> None:
    assert make_cases(12, random.Random(5)) == make_cases(12, random.Random(5))
    assert make_cases(12, random.Random(5)) != make_cases(12, random.Random(6))


def test_every_case_has_one_right_answer() -> None:
    cases = make_cases(40, random.Random(1))
    assert all("seed" in case.sampling or not case.sampling.get("temperature") for case in cases)
    assert any(case.stop for case in cases)
    assert any("seed" in case.sampling for case in cases)
    assert any("repetition_penalty" in case.sampling for case in cases)
    assert any(case.n > 1 for case in cases)
    assert any(case.schema for case in cases)
    assert any(case.regex for case in cases)
    assert len({case.name for case in cases}) == len(cases)


def test_both_edges_are_asked_for_the_same() -> None:
    for case in make_cases(20, random.Random(2)):
        body, message = case.body("always"), case.message("always")
        assert (body["prompt"], body["max_tokens"]) == (message.prompt, message.sampling.max_tokens)
        assert abs(body["temperature"] - message.sampling.temperature) < 1e-6
        assert tuple(body.get("stop", ())) == tuple(message.stop)
        assert body.get("seed", 0) == message.sampling.seed
        assert body["speculation"] == {"enabled": True, "always": True}
        assert message.speculation.enabled
        assert message.speculation.always
        assert body.get("n", 1) == message.n
        asked = body.get("structured_outputs", {})
        assert asked.get("json", {}) == json.loads(message.sampling.grammar.json_schema or "{}")
        assert asked.get("regex", "") == message.sampling.grammar.regex
