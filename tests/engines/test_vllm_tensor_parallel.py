"""Two worker processes, each with half of the model: texts are those of the same two without hints.

The hints come from the scheduler's own process. The ranks spin while they wait for each other, which leaves a draft
worker on a machine of two cores too little to be in time.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.vllm_server import ROOT, VllmServer, hint_flags, needs_vllm, running, wait_ready

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(1800)]

FLAGS = ("--tensor-parallel-size", "2")
CORES = "0|1"
"""One for each rank."""
NUM_TOKENS = 80
HELD_OUT = (ROOT / "demo" / "held_out.txt").read_text()
PROMPTS = [HELD_OUT[start : start + 160] for start in range(0, 6 * 60, 60)]


def texts(server: VllmServer, **way: float) -> list[tuple[list[int], list[int]]]:
    """Prompts and what follows, as token ids."""

    def text(prompt: str) -> tuple[list[int], list[int]]:
        choice = server.completion(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **way)["choices"][0]
        return choice["prompt_token_ids"], choice["token_ids"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(text, PROMPTS))


def test_two_ranks_generate_what_they_generate_without_hints(tmp_path: Path) -> None:
    with running(tmp_path, "plain", *FLAGS, cores=CORES) as plain:
        wait_ready(plain)
        expected = texts(plain)
    known = tmp_path / "texts.json"
    known.write_text(json.dumps([prompt + text for prompt, text in expected]))
    flags = hint_flags([1], 0, "tests.engines.forced_hints.ForcedHints", may_pause=False)
    variables = {"FORCED_HINTS_TEXTS": str(known)}
    with running(tmp_path, "hinted", *flags, *FLAGS, cores=CORES, variables=variables) as hinted:
        wait_ready(hinted)
        assert texts(hinted) == expected
        before = hinted.num_accepted
        assert before > 0.5 * len(PROMPTS) * NUM_TOKENS
        for way in ({"temperature": 0.5}, {"temperature": 0.5, "top_k": 5}):
            assert all(len(text) == NUM_TOKENS for _, text in texts(hinted, **way))
        assert hinted.num_accepted > before, "both ranks verify hints of sampled requests"
