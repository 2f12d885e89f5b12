"""Layers for multi-token prediction (MTP), which the target's own checkpoint holds and transformers skips.

The row of token `i + 1` takes the target's last hidden state of position `i`, after the final norm, and the target's
embedding of the token: `eh_proj([enorm(embedding), hnorm(state)])`, one decoder layer of the target's family, a norm,
the output layer. The next row takes the normalized state, which is what the target gives too.

DeepSeek-V3 (2412.19437) and GLM-4.5 store such a layer as number `num_hidden_layers`, with `enorm`, `hnorm`, `eh_proj`,
`shared_head.norm` and copies of embedding and output layer; Qwen3-Next as `mtp.*`, and shares both with the target.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from outrider.engine.heads.checkpoint import HeadFolder, TargetShape
from outrider.engine.heads.head import DraftHead, build_layers, put_weights
from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.layers.kv_layout import LayerLayout

_NEXTN_FAMILIES: Final = ("deepseek_v3", "glm4_moe")
_QWEN_FAMILIES: Final = ("qwen3_next",)
FAMILIES: Final = (*_NEXTN_FAMILIES, *_QWEN_FAMILIES)
_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True, slots=True)
class MtpDescription:
    """The MTP layer of a checkpoint."""

    hf_config: Any  # transformers' configuration of its one decoder layer
    hidden_size: int
    vocab_size: int
    names: Mapping[str, str]  # of tensors in the files, by their names here; experts one by one


def describe(head: HeadFolder, target: TargetShape) -> MtpDescription:
    """Reads a checkpoint's configuration and headers. Raises ModelLoadError where it has no MTP layer that fits."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(head.folder, local_files_only=True).get_text_config()
    if config.model_type not in FAMILIES:
        raise ModelLoadError(
            f"{head.folder} has MTP layers of the family {config.model_type}; can be read: {', '.join(FAMILIES)}"
        )
    if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ModelLoadError(
            f"{head.folder} has hidden states of {config.hidden_size} and {config.vocab_size} tokens, and "
            f"{target.model} {target.hidden_size} and {target.vocab_size}"
        )
    num_layers = int(head.config.get("num_nextn_predict_layers") or 1)
    if num_layers != 1:
        raise ModelLoadError(f"{head.folder} has {num_layers} MTP layers; one can be run")
    is_nextn = config.model_type in _NEXTN_FAMILIES
    names = _names(head, _nextn_name(config.num_hidden_layers) if is_nextn else _qwen_name)
    if not names:
        where = f"model.layers.{config.num_hidden_layers}.*" if is_nextn else "mtp.*"
        raise ModelLoadError(f"{head.folder} lacks the tensors of its MTP layer ({where}); they may have been left out")
    return MtpDescription(_of_one_layer(config), config.hidden_size, config.vocab_size, names)


class MtpHead(DraftHead):
    """An MTP layer."""

    feeds_normalized = True

    def __init__(self, described: MtpDescription, head: HeadFolder) -> None:
        super().__init__()
        body, self.rotary_emb, self.layout = build_layers(described.hf_config, head.folder, _layout(described))
        self.config = body.config
        self.vocab_size, self.hidden_size = described.vocab_size, described.hidden_size
        self.layer, self.norm = body.layers[0], body.norm
        width, epsilon = described.hidden_size, self.config.rms_norm_eps
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(described.vocab_size, width)
            self.lm_head: nn.Module = nn.Linear(width, described.vocab_size, bias=False)
            self.enorm, self.hnorm = type(body.norm)(width, epsilon), type(body.norm)(width, epsilon)
            self.eh_proj: nn.Module = nn.Linear(2 * width, width, bias=False)

    def forward(self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the rows' states before `norm`, `[1, num_rows, hidden_size]`."""
        joined = torch.cat([self.enorm(self.embed_tokens(token_ids)), self.hnorm(features)], dim=-1)
        states: torch.Tensor = self.layer(
            self.eh_proj(joined),
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary_emb(features, positions),
        )
        return states

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(normed).float()
        return found


def load(head: HeadFolder, target: TargetShape, shared: Mapping[str, torch.Tensor], dtype: torch.dtype) -> MtpHead:
    """The MTP layer of a checkpoint. Raises ModelLoadError.

    shared: the target's `embed_tokens.weight` and `lm_head.weight`, as far as the layer has no copies.
    """
    described = describe(head, target)
    built = MtpHead(described, head)
    tensors = head.files.read(described.names, head.config.get("quantization_config"))
    put_weights(built, {**shared, **_joined_experts(tensors)}, dtype, head.folder)
    return built


def missing_shared(described: MtpDescription) -> list[str]:
    """Tensors that the layer takes from the target's own."""
    return [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in described.names]


def _layout(described: MtpDescription) -> tuple[LayerLayout, ...] | None:
    """The KV layout where a decoder of the family cannot be watched, because most of its layers keep another state."""
    config = described.hf_config
    if config.model_type not in _QWEN_FAMILIES:
        return None
    return (LayerLayout(config.num_key_value_heads, config.head_dim, config.head_dim, None),)


def _of_one_layer(config: Any) -> Any:
    """The configuration of a decoder whose only layer is of the kind that MTP has: full attention, with experts."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    config.quantization_config = None
    return config


def _names(head: HeadFolder, rename: Callable[[str], str | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    for stored in head.files.headers:
        name = rename(stored)
        if name is None or "rotary_emb" in name:
            continue
        layer, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias", "e_score_correction_bias"):  # a part of a quantized weight
            name, stored = f"{layer}.weight", f"{stored.rpartition('.')[0]}.weight"
        found[name] = stored
    return found


def _nextn_name(layer: int) -> Callable[[str], str | None]:
    prefix = f"model.layers.{layer}."
    renamed = {"shared_head.norm.weight": "norm.weight", "shared_head.head.weight": "lm_head.weight"}
    own = ("enorm.", "hnorm.", "eh_proj.", "embed_tokens.")

    def rename(stored: str) -> str | None:
        if not stored.startswith(prefix):
            return None
        name = stored.removeprefix(prefix)
        return renamed.get(name, name if name.startswith(own) else f"layer.{name}")

    return rename


def _qwen_name(stored: str) -> str | None:
    if not stored.startswith("mtp."):
        return None
    name = stored.removeprefix("mtp.")
    for published, here in (
        ("layers.0.", "layer."),
        ("fc.", "eh_proj."),
        ("pre_fc_norm_embedding.", "enorm."),
        ("pre_fc_norm_hidden.", "hnorm."),
    ):
        if name.startswith(published):
            return here + name.removeprefix(published)
    return name


def _joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Joins the experts' weights, one by one in files, to transformers' `gate_up_proj` and `down_proj`."""
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if matched := _EXPERT.fullmatch(name):
            parts.setdefault(matched[1], {})[int(matched[2]), matched[3]] = tensor
        else:
            found[name] = tensor
    for prefix, each in parts.items():
        numbers = sorted({number for number, _ in each})
        if any((number, kind) not in each for number in numbers for kind in ("gate_proj", "up_proj", "down_proj")):
            continue  # what is missing is named with the joined tensor
        joined = [torch.cat([each[number, "gate_proj"], each[number, "up_proj"]]) for number in numbers]
        found[f"{prefix}.gate_up_proj"] = torch.stack(joined)
        found[f"{prefix}.down_proj"] = torch.stack([each[number, "down_proj"] for number in numbers])
    return found
