"""Two worker processes, each with half of the model: texts are those of the same two without hints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.local.free_ports import free_ports
from tests.engines.vllm_server import (
    ROOT,
    VllmServer,
    hint_flags,
    needs_vllm,
    running,
    start_draft_worker,
    wait_ready,
)

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(1800)]

FLAGS = ("--tensor-parallel-size", "2")
CORES = "0|1"
"""One for each rank."""
NUM_TOKENS = 80
HELD_OUT = (ROOT / "demo" / "held_out.txt").read_text()
PROMPTS = [HELD_OUT[start : start + 160] for start in range(0, 6 * 60, 60)]


def texts(server: VllmServer) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: server.tokens(prompt, max_tokens=NUM_TOKENS, ignore_eos=True), PROMPTS))


def test_two_ranks_generate_what_they_generate_without_hints(tmp_path: Path) -> None:
    draft_port, hints_port = free_ports(2)
    with running(tmp_path, "plain", *FLAGS, cores=CORES) as plain:
        wait_ready(plain)
        expected = texts(plain)
    flags = hint_flags([draft_port], hints_port, may_pause=False)
    with running(tmp_path, "hinted", *flags, *FLAGS, cores=CORES, hints_port=hints_port) as hinted:
        draft = start_draft_worker(draft_port, tmp_path)
        try:
            wait_ready(hinted)
            assert [texts(hinted) for _ in range(2)] == [expected] * 2
            assert hinted.num_accepted > NUM_TOKENS
            before = hinted.num_accepted
            ways = [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}]
            for way in ways:
                assert len(hinted.tokens(PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True, **way)) == NUM_TOKENS
            assert hinted.num_accepted > before, "both ranks verify hints of sampled requests"
        finally:
            draft.stop()
