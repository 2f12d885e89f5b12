"""A LoRA adapter with random weights, for the demo target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from tests.engines.vllm_server import TARGET

RANK: Final = 8
STD: Final = 0.05
"""Large enough to change most texts, small enough that they stay texts."""


def write_small_adapter(folder: Path) -> None:
    """Writes an adapter of the query and value projections; two calls write the same one."""
    shape = json.loads((TARGET / "config.json").read_text())
    random = torch.Generator().manual_seed(3)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, num_heads in (("q_proj", shape["num_attention_heads"]), ("v_proj", shape["num_key_value_heads"])):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = STD * torch.randn(RANK, shape["hidden_size"], generator=random)
            rows = num_heads * shape["head_dim"]
            weights[f"{prefix}.lora_B.weight"] = STD * torch.randn(rows, RANK, generator=random)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(TARGET), "r": RANK,
        "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
