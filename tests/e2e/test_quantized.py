"""Drafts in low resolution, and drafts that are of no use, in the whole system: `outrider serve` and the public API."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from demo.corpus import held_out_prompts
from tests.e2e.system import System, eventually, needs_the_pair, running_system

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    needs_the_pair,
]

NUM_PROMPTS = 10


def accepted_and_verified(system: System) -> tuple[int, int]:
    """Hints, of some texts, which must be the ones that are said without them."""
    num_accepted = num_verified = 0
    for prompt in held_out_prompts(NUM_PROMPTS):
        plain = system.text(prompt, max_tokens=60, speculation={"enabled": False})
        hinted = system.complete(prompt, max_tokens=60, speculation={"always": True})
        assert hinted["choices"][0]["text"] == plain
        counts = hinted["metrics"]["speculative_decoding"]
        num_accepted += counts["num_accepted_draft_tokens"]
        num_verified += counts["num_draft_tokens"]
    print(f"accepted {num_accepted} of {num_verified} hints")
    return num_accepted, num_verified


def test_a_target_in_low_resolution_drafts_for_itself(tmp_path: Path) -> None:
    """On a CPU its draft is as slow as itself, so that few hints come in time; of these nearly all hold."""
    with running_system(tmp_path / "cache", "--self-draft", "--no-lookup") as system:
        num_accepted, num_verified = accepted_and_verified(system)
        assert num_accepted >= 0.5 * num_verified
        (ready,) = system.ready_lines("draft-0")
        assert (ready["model"], ready["dtype"]) == (DEMO_TARGET.name, "int8")
        said = eventually(lambda: system.command.stderr, lambda seen: "in a short probe" in seen, "the probe")
        assert f"The draft {DEMO_TARGET} (int8) " in said
        assert "warning" not in said


def test_a_draft_that_is_never_accepted_is_reported_loudly_and_changes_nothing(tmp_path: Path) -> None:
    """It has the right tokenizer and random weights: it loads like any other."""
    folder = tmp_path / "random"
    shutil.copytree(DEMO_DRAFT, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones_like(tensor)
        if tensor.dim() == 1
        else (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with running_system(tmp_path / "cache", "--draft", folder, "--no-lookup") as system:
        num_accepted, num_verified = accepted_and_verified(system)
        assert num_accepted <= 0.02 * num_verified
        said = eventually(lambda: system.command.stderr, lambda seen: "in a short probe" in seen, "the probe")
        assert f"warning The draft {folder} is of no use" in said

        def useless_drafts() -> list[str]:
            """On a busy machine few hints come in time, and a hundred take some requests."""
            system.complete("import ", max_tokens=200, ignore_eos=True, speculation={"always": True})
            return [each["worker_id"] for each in system.client.get("/health").json()["useless_drafts"]]

        (worker_id,) = eventually(useless_drafts, bool, "an alarm at /health", 120)
        assert worker_id.startswith("draft-0")
        assert "outrider_draft_acceptance_alarm{" in system.client.get("/metrics").text
