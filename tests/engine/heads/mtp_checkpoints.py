"""Tiny checkpoints with an MTP layer, named as the families publish theirs; of the target's layers there are none."""

from __future__ import annotations

from typing import Any, Final

import torch

from tests.engine.heads.checkpoints import HIDDEN, NUM_EXPERTS, VOCAB, Case, linear, norm, numbers, shared

LAYERS: Final = 4  # of the target
MOE_INNER: Final = 16

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": MOE_INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "eos_token_id": 3,
}
DEEPSEEK: Final = _COMMON | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000.0,
}
GLM: Final = _COMMON | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "rope_theta": 1000000.0,
}
QWEN: Final = _COMMON | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "num_experts": NUM_EXPERTS,
    "shared_expert_intermediate_size": MOE_INNER,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
}


def _gated(name: str, prefix: str, inner: int = MOE_INNER) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}gate_proj.weight": linear(f"{name}/gate", inner, HIDDEN),
        f"{prefix}up_proj.weight": linear(f"{name}/up", inner, HIDDEN),
        f"{prefix}down_proj.weight": linear(f"{name}/down", HIDDEN, inner),
    }


def _experts(name: str, prefix: str, shared_name: str) -> dict[str, torch.Tensor]:
    found = {f"{prefix}mlp.gate.weight": numbers(f"{name}/router", NUM_EXPERTS, HIDDEN, spread=0.5)}
    for expert in range(NUM_EXPERTS):
        found |= _gated(f"{name}/{expert}", f"{prefix}mlp.experts.{expert}.")
    return found | _gated(f"{name}/shared", f"{prefix}mlp.{shared_name}.")


def _norms(name: str, prefix: str, center: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}input_layernorm.weight": norm(f"{name}/in", HIDDEN, center),
        f"{prefix}post_attention_layernorm.weight": norm(f"{name}/post", HIDDEN, center),
    }


def _nextn(name: str, prefix: str) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}enorm.weight": norm(f"{name}/enorm", HIDDEN),
        f"{prefix}hnorm.weight": norm(f"{name}/hnorm", HIDDEN),
        f"{prefix}eh_proj.weight": linear(f"{name}/eh", HIDDEN, 2 * HIDDEN),
        f"{prefix}embed_tokens.weight": shared()["model.embed_tokens.weight"],
        f"{prefix}shared_head.norm.weight": norm(f"{name}/norm", HIDDEN),
        f"{prefix}shared_head.head.weight": shared()["lm_head.weight"],
        f"{prefix}mlp.gate.e_score_correction_bias": numbers(f"{name}/bias", NUM_EXPERTS, spread=0.1),
    }


def _deepseek() -> dict[str, torch.Tensor]:
    prefix, attention = f"model.layers.{LAYERS}.", f"model.layers.{LAYERS}.self_attn."
    return {
        **shared(),
        **_nextn("deepseek", prefix),
        **_norms("deepseek", prefix),
        **_experts("deepseek", prefix, "shared_experts"),
        f"{attention}q_a_proj.weight": linear("deepseek/qa", 16, HIDDEN),
        f"{attention}q_a_layernorm.weight": norm("deepseek/qan", 16),
        f"{attention}q_b_proj.weight": linear("deepseek/qb", 4 * 16, 16),
        f"{attention}kv_a_proj_with_mqa.weight": linear("deepseek/kva", 16, HIDDEN),
        f"{attention}kv_a_layernorm.weight": norm("deepseek/kvan", 8),
        f"{attention}kv_b_proj.weight": linear("deepseek/kvb", 4 * 16, 8),
        f"{attention}o_proj.weight": linear("deepseek/o", HIDDEN, 32),
    }


def _grouped(name: str, prefix: str, query_rows: int, center: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}self_attn.q_proj.weight": linear(f"{name}/q", query_rows, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": linear(f"{name}/k", 32, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": linear(f"{name}/v", 32, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": linear(f"{name}/o", HIDDEN, 64),
        f"{prefix}self_attn.q_norm.weight": norm(f"{name}/qn", 16, center),
        f"{prefix}self_attn.k_norm.weight": norm(f"{name}/kn", 16, center),
    }


def _glm() -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{LAYERS}."
    return {
        **shared(),
        **_nextn("glm", prefix),
        **_norms("glm", prefix),
        **_experts("glm", prefix, "shared_experts"),
        **_grouped("glm", prefix, 64),
    }


def _qwen() -> dict[str, torch.Tensor]:
    """Its norms multiply by one plus their weights, and half of `q_proj` gates the attention's output."""
    prefix = "mtp.layers.0."
    return {
        **shared(),
        **_norms("qwen", prefix, center=0.0),
        **_experts("qwen", prefix, "shared_expert"),
        **_grouped("qwen", prefix, 128, center=0.0),
        f"{prefix}mlp.shared_expert_gate.weight": linear("qwen/shared_gate", 1, HIDDEN),
        "mtp.fc.weight": linear("qwen/fc", HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": norm("qwen/norm", HIDDEN, 0.0),
        "mtp.pre_fc_norm_embedding.weight": norm("qwen/enorm", HIDDEN, 0.0),
        "mtp.pre_fc_norm_hidden.weight": norm("qwen/hnorm", HIDDEN, 0.0),
    }


MTP_CASES: Final = (
    Case("mtp-deepseek", "MTP, DeepSeek-V3", DEEPSEEK, _deepseek, num_states=1),
    Case("mtp-glm", "MTP, GLM-4.5", GLM, _glm, num_states=1),
    Case("mtp-qwen", "MTP, Qwen3-Next", QWEN, _qwen, num_states=1),
)
