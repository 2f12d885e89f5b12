"""Stores the logits of the speculators package: `python -m tests.engine.heads.reference_speculators`.

It runs in an environment of its own, which has speculators. Three rounds are run as in training: the first takes the
target's states, each later one the output of the one before, at tokens that are given.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.engine.heads import stored
from tests.engine.heads.checkpoints import EAGLE3_CASES, Case, shared, token_ids

NUM_ROUNDS = 3


@torch.inference_mode()
def logits_of(case: Case, folder: Path) -> torch.Tensor:
    """Row `t` of round `k` is that of token `1 + t + k`.  # [NUM_ROUNDS, length - 1, draft_vocab_size]"""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = Eagle3SpeculatorConfig(**json.loads((case.write(folder) / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = Eagle3DraftModel(config).eval()
    tensors = {"embed_tokens.weight": shared()["model.embed_tokens.weight"], **case.tensors()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith("verifier_") for name in missing), missing
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
    tokens = torch.tensor([token_ids()[1:]])
    model(case.states()[None, :-1], tokens, torch.zeros_like(tokens), ttt_steps=NUM_ROUNDS)
    return torch.stack(found)


def main() -> None:
    """Runs every case in speculators' layout."""
    cases = [case for case in EAGLE3_CASES if "speculators_model_type" in case.config]
    with tempfile.TemporaryDirectory() as folder:
        found = {case.name: logits_of(case, Path(folder) / case.name) for case in cases}
    stored.store("speculators", f"speculators {version('speculators')}", found)
    sys.stdout.write(f"{', '.join(found)}\n")


if __name__ == "__main__":
    main()
