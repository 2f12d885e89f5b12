"""SGLang's worker with hints on two ranks, with overlap, which no server on CPUs has; with a real draft worker."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.local.free_ports import free_ports
from tests.engines.sglang_rank import NUM_STEPS, PROMPTS, WIDTH
from tests.engines.sglang_server import PYTHON, environment, needs_sglang
from tests.engines.vllm_server import DRAFT, ROOT, start_draft_worker

pytestmark = [needs_sglang, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def draft_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    (port,) = free_ports(1)
    draft = start_draft_worker(port, tmp_path_factory.mktemp("draft"))
    yield port
    draft.stop()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Texts that the draft model itself generates after each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    num_tokens = NUM_STEPS * WIDTH + 2
    found = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ranks_verify_the_same_hints_of_the_first(
    tmp_path: Path, draft_port: int, texts: list[list[int]], num_ranks: int
) -> None:
    (group_port,) = free_ports(1)
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(texts))
    ranks = [
        subprocess.Popen(
            [PYTHON, "-m", "tests.engines.sglang_rank", *map(str, (rank, num_ranks, group_port, draft_port, file))],
            cwd=ROOT, env={**os.environ, **environment(tmp_path)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        said = [json.loads(each.communicate(timeout=300.0)[0].strip().splitlines()[-1]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert all(each == said[0] for each in said)
    _, num_accepted, is_right = said[0]
    assert is_right, "each row begins with the last token, which is not in output_ids yet"
    assert num_accepted > NUM_STEPS / 3, "hints follow the tokens that are not in output_ids yet"
