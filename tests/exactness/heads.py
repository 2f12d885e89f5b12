"""A random EAGLE-3 head for the tiny models of these tests: nearly always wrong, and fed with the target's features."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.loading import feature_source, load_head
from outrider.engine.model import Engine
from tests import models

WIDTH, INNER, NUM_HEADS, HEAD_DIM = 32, 64, 2, 16


def write_head(folder: Path, vocab_size: int, longest: int, target_width: int = WIDTH, seed: int = 9) -> Path:
    """A head in the original layout, for a target of two layers or more."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "target_hidden_size": target_width,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": longest,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "fc.weight": (WIDTH, 2 * target_width),
        "embed_tokens.weight": (vocab_size, WIDTH),
        "lm_head.weight": (vocab_size, WIDTH),
        "midlayer.self_attn.q_proj.weight": (NUM_HEADS * HEAD_DIM, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": (HEAD_DIM, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": (HEAD_DIM, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": (WIDTH, NUM_HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": (INNER, WIDTH),
        "midlayer.mlp.up_proj.weight": (INNER, WIDTH),
        "midlayer.mlp.down_proj.weight": (WIDTH, INNER),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(WIDTH) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.cache
def head_engine(target: Engine) -> HeadEngine:
    """The head of a target, which keeps its features from now on."""
    folder = write_head(models.root_dir() / f"head-{target.vocab_size}", target.vocab_size, target.max_model_len)
    target.tap(feature_source(folder, target.config.model, "float32", "cpu"))
    config = models.engine_config(
        folder, max_num_seqs=target.config.max_num_seqs, max_model_len=target.max_model_len, has_trees=True
    )
    return load_head(config, target.config.model)
