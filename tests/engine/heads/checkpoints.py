"""Tiny heads in every published format, with weights and inputs that are the same wherever they are made.

The reference scripts beside this module read the same folders in environments of their own, so it imports nothing of
ours, and its numbers come from `RandomState`, whose stream is frozen.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN: Final = 32
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
INNER: Final = 48
VOCAB: Final = 64
DRAFT_VOCAB: Final = 24
TARGET_LAYERS: Final = 7
LENGTH: Final = 9  # tokens of the sequence that is run; the first has no row in the references
NUM_EXPERTS: Final = 4

LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
QWEN3: Final = LLAMA | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "num_hidden_layers": 2}


def numbers(name: str, *shape: int, spread: float = 1.0) -> torch.Tensor:
    """Normal numbers that depend on the name alone."""
    state = np.random.RandomState(zlib.crc32(name.encode()))
    return torch.from_numpy((spread * state.standard_normal(shape)).astype(np.float32))


def token_ids(length: int = LENGTH) -> list[int]:
    return [int(each) for each in np.random.RandomState(7).randint(0, VOCAB, length)]


def linear(name: str, out: int, inputs: int) -> torch.Tensor:
    return numbers(name, out, inputs, spread=1.5 / inputs**0.5)


def norm(name: str, width: int, center: float = 1.0) -> torch.Tensor:
    return center + numbers(name, width, spread=0.3)


@dataclass(frozen=True)
class Case:
    """A head in one format: how its folder is written and what it takes for every token."""

    name: str
    layout: str  # for the table
    config: Mapping[str, Any]
    tensors: Callable[[], dict[str, torch.Tensor]]
    target_hidden: int = HIDDEN
    num_states: int = 3  # of the target, which a row's feature is made of

    def write(self, folder: Path) -> Path:
        """Writes the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(self.config)))
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def states(self, length: int = LENGTH) -> torch.Tensor:
        """The target's joined states of every token.  # [length, num_states * target_hidden]"""
        return numbers(f"{self.name}/states", length, self.num_states * self.target_hidden, spread=2.0)


def target_config() -> dict[str, Any]:
    """A target for all heads but MTP: only its shape matters, and the two tensors that heads may share."""
    return {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": TARGET_LAYERS, "eos_token_id": 5}


def write_target(folder: Path, target_hidden: int = HIDDEN) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(target_config() | {"hidden_size": target_hidden}))
    save_file(shared(target_hidden), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shared(width: int = HIDDEN) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": numbers("target/embed", VOCAB, width),
        "lm_head.weight": linear("target/output", VOCAB, width),
    }


def vocabulary(name: str) -> dict[str, torch.Tensor]:
    """`d2t` as an offset and `t2d` as a mask."""
    chosen = np.sort(np.random.RandomState(zlib.crc32(name.encode())).permutation(VOCAB)[:DRAFT_VOCAB])
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[torch.from_numpy(chosen)] = True
    return {"d2t": torch.from_numpy(chosen - np.arange(DRAFT_VOCAB)), "t2d": known}


def decoder(name: str, prefix: str, width: int, *, with_norms: bool = False) -> dict[str, torch.Tensor]:
    """A Llama layer; `width` of what its attention takes."""
    found = {
        "self_attn.q_proj.weight": linear(f"{name}/q", HEADS * HEAD_DIM, width),
        "self_attn.k_proj.weight": linear(f"{name}/k", KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj.weight": linear(f"{name}/v", KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj.weight": linear(f"{name}/o", HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": linear(f"{name}/gate", INNER, HIDDEN),
        "mlp.up_proj.weight": linear(f"{name}/up", INNER, HIDDEN),
        "mlp.down_proj.weight": linear(f"{name}/down", HIDDEN, INNER),
        "input_layernorm.weight": norm(f"{name}/in", HIDDEN),
        "post_attention_layernorm.weight": norm(f"{name}/post", HIDDEN),
    }
    if with_norms:
        found["self_attn.q_norm.weight"] = norm(f"{name}/qn", HEAD_DIM)
        found["self_attn.k_norm.weight"] = norm(f"{name}/kn", HEAD_DIM)
    return {prefix + key: each for key, each in found.items()}


def eagle_tensors(
    name: str,
    *,
    layer: str = "layers.0.",
    family: str = "llama",
    num_layers: int = 1,
    states_width: int = 3 * HIDDEN,
    draft_vocab: int = DRAFT_VOCAB,
    embeds: bool = True,
    outputs: bool = True,
) -> dict[str, torch.Tensor]:
    """Everything of an EAGLE-3 head but its optional norms."""
    found = {
        "fc.weight": linear(f"{name}/fc", HIDDEN, states_width),
        f"{layer}hidden_norm.weight": norm(f"{name}/hidden", HIDDEN),
        "norm.weight": norm(f"{name}/norm", HIDDEN),
    }
    for index in range(num_layers):
        prefix = layer if index == 0 else f"layers.{index}."
        width = 2 * HIDDEN if index == 0 else HIDDEN
        found |= decoder(f"{name}/{index}", prefix, width, with_norms=family == "qwen3")
    if embeds:
        found["embed_tokens.weight"] = numbers(f"{name}/embed", VOCAB, HIDDEN)
    if outputs:
        found["lm_head.weight"] = linear(f"{name}/lm_head", draft_vocab, HIDDEN)
    if draft_vocab != VOCAB:
        found |= vocabulary(name)
    return found


def speculators_config(layers: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "transformer_layer_config": dict(layers),
        "draft_vocab_size": DRAFT_VOCAB,
        **values,
    }


def _per_state_norms(name: str) -> dict[str, torch.Tensor]:
    return {f"fc_norm.{index}.weight": norm(f"{name}/fc_norm/{index}", HIDDEN) for index in range(3)}


EAGLE3_CASES: Final = (
    Case(
        "original",
        "EAGLE-3, original: `midlayer.*`, `d2t`, the target's embedding",
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB},
        lambda: eagle_tensors("original", layer="midlayer.", embeds=False),
    ),
    Case(
        "original-wide",
        "EAGLE-3, original: `norm_before_fc`, wider target, layer ids given",
        LLAMA
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCAB,
            "target_hidden_size": 40,
            "norm_before_fc": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 1, 6], "use_aux_hidden_state": True},
        },
        lambda: {
            **eagle_tensors("original-wide", layer="midlayer.", states_width=120, draft_vocab=VOCAB),
            "input_norm.weight": norm("original-wide/input", 120),
        },
        target_hidden=40,
    ),
    Case(
        "speculators-llama",
        "EAGLE-3, speculators: Llama, `norm_before_residual`",
        speculators_config(LLAMA, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
        lambda: eagle_tensors("speculators-llama"),
    ),
    Case(
        "speculators-qwen3",
        "EAGLE-3.1, speculators: two Qwen3 layers, `fc_norm`, `norm_output`",
        speculators_config(
            QWEN3,
            fc_norm=True,
            norm_output=True,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[2, 3, 4],
        ),
        lambda: {
            **eagle_tensors("speculators-qwen3", family="qwen3", num_layers=2),
            **_per_state_norms("speculators-qwen3"),
        },
    ),
)


def medusa_tensors(name: str, num_heads: int = 3, num_layers: int = 2) -> dict[str, torch.Tensor]:
    """FasterDecoding's names."""
    found: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = linear(f"{name}/{head}/{layer}", HIDDEN, HIDDEN)
            found[f"{head}.{layer}.linear.bias"] = numbers(f"{name}/{head}/{layer}/bias", HIDDEN, spread=0.2)
        found[f"{head}.{num_layers}.weight"] = linear(f"{name}/{head}/out", VOCAB, HIDDEN)
    return found


def _vllm_medusa() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for head in range(2):
        found[f"blocks.{head}.layers.0.weight"] = linear(f"medusa-vllm/{head}", HIDDEN, HIDDEN)
    found["lm_head.weight"] = linear("medusa-vllm/out", DRAFT_VOCAB, HIDDEN)
    found["token_map"] = torch.nonzero(vocabulary("medusa-vllm")["t2d"]).flatten()
    return found


MEDUSA_CASES: Final = (
    Case(
        "medusa",
        "Medusa: `{head}.{layer}.linear.weight`, biases",
        {"medusa_num_heads": 3, "medusa_num_layers": 2, "vocab_size": VOCAB, "hidden_size": HIDDEN,
         "model_type": "medusa", "medusa_fc_bias": True},
        lambda: medusa_tensors("medusa"),
        num_states=1,
    ),
    Case(
        "medusa-prefixed",
        "Medusa: below `medusa_heads.`",
        {"medusa_num_heads": 2, "medusa_num_layers": 1, "vocab_size": VOCAB, "hidden_size": HIDDEN,
         "model_type": "medusa", "medusa_fc_bias": True},
        lambda: {f"medusa_heads.{key}": each for key, each in medusa_tensors("medusa-prefixed", 2, 1).items()},
        num_states=1,
    ),
    Case(
        "medusa-vllm",
        "Medusa, vLLM: `blocks.*`, one output layer, `token_map`",
        {"num_heads": 2, "num_hidden_layers": 1, "vocab_size": VOCAB, "hidden_size": HIDDEN, "model_type": "medusa",
         "truncated_vocab_size": DRAFT_VOCAB, "original_lm_head": True},
        _vllm_medusa,
        num_states=1,
    ),
)  # fmt: skip
