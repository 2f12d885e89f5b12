"""The head, and how its rows are run over whole sequences for training and measurement.

It has one layer of its target's shape, `norm_before_residual`, and takes embedding and output layer from the target.
The row of a token takes a feature of the token before it. The first token has none before it, so it has no row. Rows
with the target's feature stand at depth 0. A chain begins behind one of them, its *base*, and feeds on itself: its row
at depth k stands k tokens behind the base and takes the output of the row at depth k - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

LAYER_IDS = (2, 4, 6)
"""The target's layers whose input the head reads."""


class Attention(nn.Module):
    """The projections of the head's attention, over embedding and feature side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        inputs, dim = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)


class Layer(nn.Module):
    """The head's one decoder layer, under its published names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)


@dataclass(frozen=True)
class Seen:
    """Keys and values that rows see.

    given: those of rows with the target's feature, [batch, kv_heads, length, head_dim] each
    own: those of a chain's rows so far, one entry for each depth, [batch, kv_heads, num_chains, head_dim] each
    """

    given: tuple[torch.Tensor, torch.Tensor]
    own: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


class Head(nn.Module):
    """An EAGLE-3 head with one layer and `norm_before_residual`, without embedding and output layer."""

    def __init__(self, config: LlamaConfig, layer_ids: tuple[int, ...] = LAYER_IDS) -> None:
        """config: of the target, whose shape the head's layer has."""
        super().__init__()
        self.config = config
        self.layer_ids = layer_ids
        self.fc = nn.Linear(len(layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def rows(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
        seen: Seen | None,
    ) -> tuple[torch.Tensor, Seen]:
        """Runs rows of one depth, and returns their states before `norm` and what the rows behind them see.

        embedded, features: [batch, num_rows, hidden_size]. rotary: of their positions
        visible: bool [num_rows, length], the rows with the target's feature that each row sees
        seen: None at depth 0, where the rows are those with the target's feature
        """
        layer: Any = self.midlayer
        residual = layer.hidden_norm(features)
        joined = torch.cat([layer.input_layernorm(embedded), residual], dim=-1)
        query, key, value = (
            projection(joined).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        seen = Seen((key, value)) if seen is None else replace(seen, own=(*seen.own, (key, value)))
        states = residual + layer.self_attn.o_proj(attend(query, seen, visible))
        return states + layer.mlp(layer.post_attention_layernorm(states)), seen


def attend(query: torch.Tensor, seen: Seen, visible: torch.Tensor) -> torch.Tensor:
    """Attention of a row over the visible rows with the target's feature and those of its own chain.

    query: [batch, heads, num_rows, head_dim]. visible: bool [num_rows, length].  # -> [batch, num_rows, heads * dim]
    """
    keys, values = seen.given
    length, scale = keys.shape[2], query.shape[-1] ** -0.5
    grouped = query.unflatten(1, (keys.shape[1], -1))  # [batch, kv_heads, group, num_rows, head_dim]
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    own = [(grouped * key[:, :, None]).float().sum(-1, keepdim=True) * scale for key, _ in seen.own]
    shares = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
    mixed = shares[..., :length] @ values[:, :, None]
    for index, (_, value) in enumerate(seen.own):
        mixed = mixed + shares[..., length + index, None] * value[:, :, None]
    return mixed.flatten(1, 2).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Depth:
    """Rows of one depth. states: [batch, num_rows, hidden_size], before `norm`. positions: int64 [num_rows]."""

    states: torch.Tensor
    positions: torch.Tensor


def unroll(
    head: Head, target: LlamaForCausalLM, token_ids: torch.Tensor, hidden: torch.Tensor, chains: list[torch.Tensor]
) -> list[Depth]:
    """Runs sequences [batch, length] with the target's features, then its chains, depth by depth.

    hidden: [batch, length, len(layer_ids) * hidden_size], the target's states at every token
    chains: bases from depth 1 on, ascending, each depth's among those of the depth before it; none is the first token
    """
    length = token_ids.shape[1]
    embedded = target.model.embed_tokens(token_ids)

    def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = target.model.rotary_emb(embedded, positions[None])
        return cosines, sines

    positions = torch.arange(1, length)
    states, seen = head.rows(
        embedded[:, 1:],
        head.fc(hidden[:, :-1]),
        rotary(positions),
        torch.ones(length - 1, length - 1, dtype=torch.bool).tril(),
        None,
    )
    depths = [Depth(states, positions)]
    bases = positions
    for depth, kept in enumerate(chains, start=1):
        chosen = torch.searchsorted(bases, kept)
        bases, positions = kept, kept + depth
        own = tuple((key[:, :, chosen], value[:, :, chosen]) for key, value in seen.own)
        states, seen = head.rows(
            embedded[:, positions],
            states[:, chosen],
            rotary(positions),
            torch.arange(1, length) <= bases[:, None],
            Seen(seen.given, own),
        )
        depths.append(Depth(states, positions))
    return depths


@torch.no_grad()
def hidden_states(target: LlamaForCausalLM, token_ids: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    """The states that enter the layers, side by side.  # -> [batch, length, len(layer_ids) * hidden_size]"""
    body = target.model
    states = body.embed_tokens(token_ids)
    positions = torch.arange(token_ids.shape[1])[None]
    rotary = body.rotary_emb(states, positions)
    found = {0: states}
    # Layers behind the last one that is read cost a third of the pass, so they are left out.
    for index, layer in enumerate(body.layers[: max(layer_ids)], start=1):
        states = layer(states, position_ids=positions, position_embeddings=rotary)
        found[index] = states
    return torch.cat([found[each] for each in layer_ids], dim=-1)


def logits_of(head: Head, target: LlamaForCausalLM, states: torch.Tensor) -> torch.Tensor:
    """Logits of rows, through the head's norm and the target's output layer."""
    logits: torch.Tensor = target.lm_head(head.norm(states))
    return logits
