"""Clients' predictions through the whole system: one that comes true saves steps, and a hostile one changes no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line.start.demo_prompts import DEMO_PROMPTS
from coordinator.intake.generation_request import PROMPT_BYTES_MAX
from tests.e2e.system import System, needs_the_pair, running_system

pytestmark = [pytest.mark.timeout(300), needs_the_pair, pytest.mark.slow, pytest.mark.thorough]

NUM_TOKENS = 200
JSON = {"content-type": "application/json"}


def hostile_predictions(answer: str) -> dict[str, str]:
    """Texts that are long, strange, or nearly right."""
    return {
        "as long as may be": "a" * PROMPT_BYTES_MAX,
        "as long as may be, in other letters": "\u6f22" * (PROMPT_BYTES_MAX // 3),
        "blanks": " " * 100_000,
        "nulls": "\0" * 100_000,
        "every character": "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)])),
        "joined signs": "\U0001f600\u200d" * 20_000,
        "other directions": "\u202e\u2066\ufffe\ufeff" * 20_000,
        "special tokens": "<|endoftext|><|im_end|></s>[INST]" * 2000,
        "the answer backwards": answer[::-1],
        "the answer, each letter twice": "".join(2 * letter for letter in answer),
        "the answer, every fifth letter wrong": "".join("~" if n % 5 == 4 else c for n, c in enumerate(answer)),
        "the answer's beginning, again and again": answer[:40] * 2000,
    }


def ask(system: System, **more: Any) -> dict[str, Any]:
    return system.complete(DEMO_PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True, **more)


def test_predictions_save_steps_or_do_no_harm(tmp_path: Path) -> None:
    with running_system(tmp_path / "cache", "--no-draft", "--no-lookup", "--hosting", "plain") as system:
        plain = ask(system)["choices"][0]["text"]
        right = ask(system, prediction={"type": "content", "content": plain})
        assert right["choices"][0]["text"] == plain
        assert right["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > NUM_TOKENS / 2
        assert right["metrics"]["speculative_decoding"]["num_steps"] < NUM_TOKENS / 4
        for name, text in hostile_predictions(plain).items():
            answer = ask(system, prediction={"type": "content", "content": text})
            assert answer["choices"][0]["text"] == plain, name
            details = answer["usage"]["completion_tokens_details"]
            assert details["rejected_prediction_tokens"] < NUM_TOKENS, f"{name}: it went on and on in vain"
        for text in ("a" * (PROMPT_BYTES_MAX + 1), "a\ud800b"):
            body = json.dumps({"prompt": "a", "prediction": {"type": "content", "content": text}})
            refused = system.client.post("/v1/completions", content=body, headers=JSON)
            assert refused.status_code == 400, refused.text
        assert ask(system)["choices"][0]["text"] == plain
