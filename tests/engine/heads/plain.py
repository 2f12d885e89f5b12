"""Heads written out as formulas, over whole sequences without a cache: an independent second implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import linear, silu

Tensors = Mapping[str, torch.Tensor]


def rms(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotated(states: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """# [num_heads, num_rows, head_dim]"""
    half = states.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cosines, sines = angles.cos().float(), angles.sin().float()
    one, other = states[..., :half], states[..., half:]
    return torch.cat([one * cosines - other * sines, other * cosines + one * sines], dim=-1)


def attention(
    config: Mapping[str, Any], weights: Tensors, states: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor
) -> torch.Tensor:
    """sees: [num_rows, num_rows], True where a row sees another."""
    num_heads, num_kv_heads, width = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def heads(name: str, count: int) -> torch.Tensor:
        found = linear(states, weights[f"self_attn.{name}_proj.weight"]).view(-1, count, width).transpose(0, 1)
        if f"self_attn.{name}_norm.weight" in weights:
            found = rms(found, weights[f"self_attn.{name}_norm.weight"], config["rms_norm_eps"])
        return found

    theta = config["rope_theta"]
    queries = rotated(heads("q", num_heads), positions, theta)
    keys = rotated(heads("k", num_kv_heads), positions, theta).repeat_interleave(num_heads // num_kv_heads, dim=0)
    values = heads("v", num_kv_heads).repeat_interleave(num_heads // num_kv_heads, dim=0)
    scores = (queries @ keys.transpose(1, 2) / width**0.5).masked_fill(~sees, float("-inf"))
    joined = (scores.softmax(-1) @ values).transpose(0, 1).reshape(states.shape[0], num_heads * width)
    return linear(joined, weights["self_attn.o_proj.weight"])


def mlp(weights: Tensors, states: torch.Tensor) -> torch.Tensor:
    inner = silu(linear(states, weights["mlp.gate_proj.weight"])) * linear(states, weights["mlp.up_proj.weight"])
    return linear(inner, weights["mlp.down_proj.weight"])


def below(tensors: Tensors, *prefixes: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(p): each for p in prefixes for name, each in tensors.items() if name.startswith(p)}


def eagle_project(config: Mapping[str, Any], tensors: Tensors, states: torch.Tensor) -> torch.Tensor:
    epsilon = config.get("transformer_layer_config", config)["rms_norm_eps"]
    if config.get("norm_before_fc"):
        states = rms(states, tensors["input_norm.weight"], epsilon)
    if config.get("fc_norm"):
        parts = states.chunk(3, dim=-1)
        states = torch.cat([rms(p, tensors[f"fc_norm.{i}.weight"], epsilon) for i, p in enumerate(parts)], dim=-1)
    return linear(states, tensors["fc.weight"])


def eagle_forward(
    config: Mapping[str, Any],
    tensors: Tensors,
    token_ids: Sequence[int],
    features: torch.Tensor,
    positions: torch.Tensor,
    sees: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over the head's own vocabulary, and the states that feed the next rows."""
    layers = config.get("transformer_layer_config", config)
    epsilon = layers["rms_norm_eps"]
    first = below(tensors, "midlayer.", "layers.0.")
    embedded = rms(tensors["embed_tokens.weight"][list(token_ids)], first["input_layernorm.weight"], epsilon)
    normed = rms(features, first["hidden_norm.weight"], epsilon)
    states = normed if config.get("norm_before_residual") else features
    states = states + attention(layers, first, torch.cat([embedded, normed], dim=-1), positions, sees)
    states = states + mlp(first, rms(states, first["post_attention_layernorm.weight"], epsilon))
    for index in range(1, layers["num_hidden_layers"]):
        each = below(tensors, f"layers.{index}.")
        normed = rms(states, each["input_layernorm.weight"], epsilon)
        states = states + attention(layers, each, normed, positions, sees)
        states = states + mlp(each, rms(states, each["post_attention_layernorm.weight"], epsilon))
    last = rms(states, tensors["norm.weight"], epsilon)
    return linear(last, tensors["lm_head.weight"]), last if config.get("norm_output") else states


def spread(tensors: Tensors, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits over the target's vocabulary."""
    if "d2t" not in tensors:
        return logits
    found = torch.full((logits.shape[0], vocab_size), float("-inf"))
    for draft_id, offset in enumerate(tensors["d2t"].tolist()):
        found[:, draft_id + offset] = logits[:, draft_id]
    return found


def medusa_logits(tensors: Tensors, states: torch.Tensor, num_heads: int, num_layers: int) -> torch.Tensor:
    """FasterDecoding's heads.  # [num_heads, num_rows, vocab_size]"""
    found = []
    for head in range(num_heads):
        rows = states
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            rows = rows + silu(linear(rows, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        found.append(linear(rows, tensors[f"{head}.{num_layers}.weight"]))
    return torch.stack(found)
