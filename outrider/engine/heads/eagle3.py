"""EAGLE-3 (Li et al., 2503.01840) and 3.1: one or more decoder layers over the target's hidden states.

A head is made for three (or other) layers of its target. A layer id `i` names the residual stream before layer `i`,
which is after `i` layers. The end of the stream (`i` = number of layers) is kept with the target's final norm only, and
heads are trained on states without it, so that id is refused. The target side joins these states and multiplies by the
head's `fc` (`Eagle3Projection`), so that one vector travels per token.

The first layer attends over `[input_layernorm(embedding), hidden_norm(feature)]`, twice as wide as the others. Its
residual is the feature, or with `norm_before_residual` the normalized one. The next row takes the sum of the residual
stream; EAGLE 3.1 normalizes it (`norm_output`), and normalizes each of the target's states before `fc` (`fc_norm`).
`norm_before_fc` is another form of the latter, one norm over all of them. A head may know fewer tokens than the target:
token `i` of the head is token `i + d2t[i]` of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.engine.heads.checkpoint import HeadFolder, TargetShape
from outrider.engine.heads.head import DraftHead, build_layers, put_weights
from outrider.engine.kv.kv_plan import ModelLoadError

FAMILIES: Final = ("llama", "qwen3")
TARGET_SIDE: Final = ("fc.", "fc_norm.", "input_norm.")
"""Beginnings of the names of tensors that the target runs."""
_VOCABULARY: Final[tuple[str, ...]] = ("d2t", "t2d")
_UNUSED: Final = ("rotary_emb", "verifier_norm", "verifier_lm_head", "mask_hidden")


@dataclass(frozen=True, slots=True)
class Eagle3Description:
    """The configuration of an EAGLE-3 head."""

    layer_config: Mapping[str, Any]  # of its decoder layers, as in transformers' configuration
    layer_ids: tuple[int, ...]  # of the target, ascending; the order in which `fc` takes their states
    hidden_size: int
    target_hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def feature_inputs(self) -> int:
        """Width of the target's joined states."""
        return len(self.layer_ids) * self.target_hidden_size


def describe(head: HeadFolder, target: TargetShape) -> Eagle3Description:
    """Reads an EAGLE-3 head's configuration and headers. Raises ModelLoadError where it does not fit the target."""
    config = head.config
    layers = config.get("transformer_layer_config", config)
    inner = config.get("eagle_config") or {}

    def flag(name: str) -> bool:
        return bool(inner.get(name, config.get(name, False)))

    if inner.get("use_aux_hidden_state", True) is False:
        raise ModelLoadError(f"{head.folder} takes no hidden states of several layers (use_aux_hidden_state is false)")
    family = layers.get("model_type", "llama")
    if family not in FAMILIES:
        raise ModelLoadError(f"{head.folder} has layers of the family {family}; EAGLE-3 heads have {FAMILIES}")
    vocab_size = int(layers.get("vocab_size") or 0)
    described = Eagle3Description(
        layer_config=layers,
        layer_ids=_layer_ids(head, target),
        hidden_size=int(layers.get("hidden_size") or 0),
        target_hidden_size=int(config.get("target_hidden_size") or layers.get("hidden_size") or 0),
        vocab_size=vocab_size,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
        norm_before_residual=flag("norm_before_residual"),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm") or flag("use_aux_norm"),
        norm_output=flag("norm_output"),
    )
    if described.target_hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"{head.folder} was made for a target with hidden states of {described.target_hidden_size}, and "
            f"{target.model} has {target.hidden_size}"
        )
    if vocab_size != target.vocab_size:
        raise ModelLoadError(
            f"{head.folder} was made for a vocabulary of {vocab_size} tokens, and {target.model} has "
            f"{target.vocab_size}"
        )
    if (width := (head.files.shape("fc.weight") or (0, described.feature_inputs))[1]) != described.feature_inputs:
        raise ModelLoadError(
            f"{head.folder}: fc takes {width} numbers, and {len(described.layer_ids)} layers of "
            f"{described.target_hidden_size} give {described.feature_inputs}"
        )
    return described


def _layer_ids(head: HeadFolder, target: TargetShape) -> tuple[int, ...]:
    inner = head.config.get("eagle_config") or {}
    given = head.config.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    depth = target.num_layers
    ids = [int(each) for each in given] if given else [2, depth // 2, depth - 3]
    if min(ids) < 0 or max(ids) >= depth or len(set(ids)) != len(ids):
        origin = "names" if given else "names none, which stands for"
        raise ModelLoadError(
            f"{head.folder} {origin} the layers {ids} of its target, and {target.model} has distinct layer ids from 0 "
            f"to {depth - 1}; a state is read before its layer, and the one after the last layer is not kept"
        )
    return tuple(sorted(ids))


class Eagle3Projection(nn.Module):
    """The part of a head that the target runs: from the states of several layers to one feature."""

    def __init__(self, described: Eagle3Description, epsilon: float, *, has_bias: bool = False) -> None:
        super().__init__()
        inputs, width = described.feature_inputs, described.target_hidden_size
        self.layer_ids = described.layer_ids
        self.fc: nn.Module = nn.Linear(inputs, described.hidden_size, bias=has_bias)
        self.input_norm = LlamaRMSNorm(inputs, epsilon) if described.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(LlamaRMSNorm(width, epsilon) for _ in described.layer_ids) if described.fc_norm else None
        )

    @torch.inference_mode()
    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Features from joined states, in the order of `layer_ids`.  # [num_rows, k * target_hidden] -> [.., hidden]"""
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)
        if self.fc_norm is not None:
            parts = hidden_states.chunk(len(self.fc_norm), dim=-1)
            hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        projected: torch.Tensor = self.fc(hidden_states)
        return projected


class Eagle3Head(DraftHead):
    """The part of a head that drafts."""

    def __init__(self, described: Eagle3Description, head: HeadFolder, target_ids: torch.Tensor | None) -> None:
        """target_ids: the target's ids of the head's tokens, None where they are the same.  # [draft_vocab_size]"""
        super().__init__()
        hf_config = layer_config(described, head)
        body, self.rotary_emb, self.layout = build_layers(hf_config, head.folder)
        self.config = body.config
        self.vocab_size, self.hidden_size = described.vocab_size, described.hidden_size
        self.feeds_normalized = described.norm_output
        self.norm_before_residual = described.norm_before_residual
        self.layers, self.norm = body.layers, body.norm
        first = self.layers[0]
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(described.vocab_size, described.hidden_size)
            self.lm_head: nn.Module = nn.Linear(described.hidden_size, described.draft_vocab_size, bias=False)
            first.hidden_norm = type(first.input_layernorm)(described.hidden_size, hf_config.rms_norm_eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                linear = getattr(first.self_attn, name)
                wide = nn.Linear(2 * linear.in_features, linear.out_features, bias=linear.bias is not None)
                setattr(first.self_attn, name, wide)
        self.target_ids = target_ids

    def forward(self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the rows' states before `norm`, `[1, num_rows, hidden_size]`."""
        rotary = self.rotary_emb(features, positions)
        first: Any = self.layers[0]
        embedded = first.input_layernorm(self.embed_tokens(token_ids))
        normed = first.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        attended, _ = first.self_attn(
            hidden_states=torch.cat([embedded, normed], dim=-1), position_embeddings=rotary, attention_mask=None
        )
        states = residual + attended
        states = states + first.mlp(first.post_attention_layernorm(states))
        for layer in list(self.layers)[1:]:
            states = layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return states

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary; -inf for tokens that the head does not know."""
        own: torch.Tensor = self.lm_head(normed).float()
        if self.target_ids is None:
            return own
        spread = own.new_full((own.shape[0], self.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.target_ids, own)


def layer_config(described: Eagle3Description, head: HeadFolder) -> Any:
    """transformers' configuration of the head's decoder layers. Raises ModelLoadError."""
    from transformers import AutoConfig

    values = {**described.layer_config}
    for name in ("architectures", "auto_map", "quantization_config", "transformers_version"):
        values.pop(name, None)
    try:
        return AutoConfig.for_model(values.pop("model_type", "llama"), **values)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(f"{head.folder} has a configuration that cannot be read: {error}") from error


def load_projection(head: HeadFolder, target: TargetShape, dtype: torch.dtype) -> Eagle3Projection:
    """The target's part of a head. Raises ModelLoadError."""
    described = describe(head, target)
    names = {name: stored for name, stored in _names(head).items() if name.startswith(TARGET_SIDE)}
    epsilon = layer_config(described, head).rms_norm_eps
    with torch.device("meta"):
        built = Eagle3Projection(described, epsilon, has_bias="fc.bias" in names)
    put_weights(built, head.files.read(names, head.config.get("quantization_config")), dtype, head.folder)
    return built


def load(head: HeadFolder, target: TargetShape, shared: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Eagle3Head:
    """The drafting part of a head. Raises ModelLoadError.

    shared: the target's `embed_tokens.weight` and `lm_head.weight`, as far as the folder lacks them.
    """
    described = describe(head, target)
    names = _names(head)
    own = {name: stored for name, stored in names.items() if not name.startswith(TARGET_SIDE)}
    maps: dict[str, str] = {name: own.pop(name) for name in _VOCABULARY if name in own}
    built = Eagle3Head(described, head, _target_ids(described, head, head.files.read(maps)))
    tensors = head.files.read(own, head.config.get("quantization_config"))
    put_weights(built, {**shared, **tensors}, dtype, head.folder)
    return built


def missing_shared(head: HeadFolder, described: Eagle3Description) -> list[str]:
    """Tensors that the head takes from its target, because its folder lacks them."""
    names = _names(head)
    needed = ["embed_tokens.weight"]
    if described.draft_vocab_size == described.vocab_size:
        needed.append("lm_head.weight")
    return [name for name in needed if name not in names]


def _names(head: HeadFolder) -> dict[str, str]:
    """Names of tensors in the files by the names that they have here. Quantized weights stand under their weight."""
    found: dict[str, str] = {}
    for stored in head.files.headers:
        name = stored.removeprefix("model.").replace("midlayer.", "layers.0.")
        if any(part in name for part in _UNUSED):
            continue
        layer, _, kind = name.rpartition(".")
        if name not in _VOCABULARY and kind not in ("weight", "bias"):
            name, stored = f"{layer}.weight", f"{stored.rpartition('.')[0]}.weight"
        found[name] = stored
    return found


def _target_ids(
    described: Eagle3Description, head: HeadFolder, maps: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    size = described.draft_vocab_size
    if "t2d" in maps and maps["t2d"].shape[0] != described.vocab_size:
        raise ModelLoadError(
            f"{head.folder}: t2d has {maps['t2d'].shape[0]} entries, and the vocabulary {described.vocab_size}"
        )
    offsets = maps.get("d2t")
    if offsets is None:
        if size == described.vocab_size:
            return None
        raise ModelLoadError(
            f"{head.folder} lacks the tensor d2t, which maps its {size} tokens to the target's {described.vocab_size}"
        )
    if offsets.shape != (size,):
        raise ModelLoadError(f"{head.folder}: d2t has {offsets.numel()} entries, and draft_vocab_size is {size}")
    ids = torch.arange(size) + offsets.long()
    if size and not (int(ids.min()) >= 0 and int(ids.max()) < described.vocab_size):
        raise ModelLoadError(
            f"{head.folder}: d2t maps to token ids from {int(ids.min())} to {int(ids.max())}, and the vocabulary has "
            f"{described.vocab_size}"
        )
    if ids.unique().shape[0] != size:
        raise ModelLoadError(f"{head.folder}: d2t maps two of its tokens to one of the target's")
    return ids
