"""A model with a handful of tokens, for tests that draw a great many. Which token it says next depends on the whole
context; most often it is the one after the last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

VOCAB_SIZE: Final = 24
HIDDEN_SIZE: Final = 64
NUM_LAYERS: Final = 2
MAX_LEN: Final = 128
SHARPNESS: Final = 5.0
"""Logit of the likeliest token at most; the others are around 0."""


def write_small_model(folder: Path) -> None:
    """Writes a checkpoint without a tokenizer; two calls write the same one."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE, "intermediate_size": 128, "num_hidden_layers": NUM_LAYERS, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_LEN, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(7)

    def noise(*shape: int, std: float) -> torch.Tensor:
        return std * torch.randn(*shape, generator=random)

    embedding = noise(VOCAB_SIZE, HIDDEN_SIZE, std=1.0)
    after = torch.arange(VOCAB_SIZE).roll(1)  # the row of token t points at what stands for t - 1
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": SHARPNESS / HIDDEN_SIZE * embedding[after] + noise(VOCAB_SIZE, HIDDEN_SIZE, std=0.08),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN_SIZE)
        for name, rows, columns in (
            ("self_attn.q_proj", 64, HIDDEN_SIZE), ("self_attn.k_proj", 32, HIDDEN_SIZE),
            ("self_attn.v_proj", 32, HIDDEN_SIZE), ("self_attn.o_proj", HIDDEN_SIZE, 64),
            ("mlp.gate_proj", 128, HIDDEN_SIZE), ("mlp.up_proj", 128, HIDDEN_SIZE),
            ("mlp.down_proj", HIDDEN_SIZE, 128),
        ):  # fmt: skip
            weights[f"{prefix}.{name}.weight"] = noise(rows, columns, std=0.09)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
