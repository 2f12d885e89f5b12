"""A draft worker of short context beside a real target: hints up to its limit, none after, and the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from command_line.start.demo_prompts import DEMO_PROMPTS
from outrider.local.redis_server import EmbeddedRedis
from outrider.text.tokenizer import Tokenizer
from tests.e2e.system import Command, System, eventually, needs_the_pair, running_system, text_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow, needs_the_pair]

PROMPT = DEMO_PROMPTS[0]
NUM_HINTED, NUM_TOKENS = 48, 120
"""Tokens of the answer that the draft worker can follow, and all of them."""


def test_a_long_answer_has_hints_up_to_the_drafts_limit(tmp_path: Path) -> None:
    limit = len(Tokenizer(DEMO_TARGET).encode(PROMPT)) + NUM_HINTED
    redis = EmbeddedRedis(tmp_path / "redis")
    (tmp_path / "redis").mkdir()
    common = ("--redis-url", redis.start())
    try:
        with running_system(tmp_path / "system", "--no-draft", "--no-lookup", "--hosting", "plain", *common) as system:
            draft = Command.start(
                tmp_path / "draft",
                *("draft-worker", "--model", DEMO_DRAFT, "--target-tokenizer", DEMO_TARGET, "--worker-id", "short"),
                *("--max-model-len", limit, *common),
            )
            try:
                eventually(lambda: system.client.get("/health").json()["num_draft_workers"], bool, "a draft", 120)
                hinted = eventually(lambda: hinted_tokens(system), any, "hints are accepted", 120)
            finally:
                draft.stop()
            assert not any(hinted[NUM_HINTED:])
            assert not system.own_metric("outrider_draft_attach_failures_total")
    finally:
        redis.stop()


def hinted_tokens(system: System) -> list[bool]:
    """Whether each token of an answer beyond the draft worker's limit was hinted. Its text is that without hints."""
    asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    plain = system.text(PROMPT, **asked, speculation={"enabled": False})
    with system.stream(
        "/v1/completions", {"prompt": PROMPT, "speculation": {"always": True, "detail": True}} | asked
    ) as events:
        seen = list(events)
    assert text_of(seen) == plain
    details = [event.get("outrider") or {} for event in seen]
    origins = [origin for detail in details for origin in detail.get("origins", [])]
    assert len(origins) == NUM_TOKENS
    return [origin == "accepted" for origin in origins]
