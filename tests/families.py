"""The decoder families that Outrider is tried with: tiny random configurations of each, and who is served by it.

Pure data. Widths are multiples of what a processor computes at once, windows and chunks shorter than the texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

VOCAB_SIZE: Final = 288
MAX_MODEL_LEN: Final = 512
WINDOW: Final = 24


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of transformers."""

    model_type: str
    examples: str  # models that people serve
    config: str  # class of the configuration, in transformers
    values: dict[str, Any]
    refused: str | None = None  # what the refusal says, where `load_model` refuses it
    variant: str | None = None  # why rows depend on the batch composition, where they do

    @property
    def is_green(self) -> bool:
        return self.refused is None and self.variant is None

    @property
    def key(self) -> str:
        """Under which `models.model_dir` knows it."""
        return f"family-{self.model_type}"


BASE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GATED = BASE | {
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # a large spread keeps greedy text from falling into one repeated token
}
HEADS_16 = {"head_dim": 16}
HEADS_32 = {"head_dim": 32}
ONE_LAYER_SLIDES = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Queries are scaled from token 32 on, not from 16,384 on.
SCALED_FAR = {
    "rope_parameters": PLAIN_ROPE["rope_parameters"]
    | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}
}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_MODEL_LEN,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}

BY_ITSELF: Final = "compute their attention without the paged cache"
NOT_KEYS: Final = "whose state is not keys and values"

FAMILIES: Final = (
    Family("llama", "Llama 2, Llama 3, SmolLM 2, Yi", "LlamaConfig", GATED | {"num_hidden_layers": 3}),
    Family(
        "llama4_text",
        "Llama 4 Scout, Maverick (text; up to 8,191 tokens)",
        "Llama4TextConfig",
        GATED
        | EXPERTS
        | HEADS_16
        | {
            "intermediate_size_mlp": 128,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    Family("qwen2", "Qwen2, Qwen2.5, QwQ", "Qwen2Config", GATED),
    Family(
        "qwen2_moe",
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        "Qwen2MoeConfig",
        GATED | EXPERTS | {"shared_expert_intermediate_size": 64},
    ),
    Family("qwen3", "Qwen3", "Qwen3Config", GATED | HEADS_32 | {"tie_word_embeddings": True}),
    Family("qwen3_moe", "Qwen3-30B-A3B, Qwen3-Coder", "Qwen3MoeConfig", GATED | EXPERTS | HEADS_32),
    Family("mistral", "Mistral 7B, Mistral Nemo", "MistralConfig", GATED | {"sliding_window": WINDOW}),
    Family("mixtral", "Mixtral 8x7B, 8x22B", "MixtralConfig", GATED | EXPERTS),
    Family("ministral", "Ministral 8B", "MinistralConfig", GATED | ONE_LAYER_SLIDES | HEADS_16),
    Family("ministral3", "Ministral 3 (text)", "Ministral3Config", GATED | HEADS_16 | SCALED_FAR),
    Family("gemma", "Gemma 2B, 7B", "GemmaConfig", GATED | HEADS_32),
    Family(
        "gemma2",
        "Gemma 2",
        "Gemma2Config",
        GATED | HEADS_32 | ONE_LAYER_SLIDES | {"query_pre_attn_scalar": 24},
    ),
    Family(
        "gemma3_text",
        "Gemma 3 270M, 1B",
        "Gemma3TextConfig",
        GATED | HEADS_32 | ONE_LAYER_SLIDES | {"query_pre_attn_scalar": 24},
    ),
    Family(
        "gemma3",
        "Gemma 3 4B, 12B, 27B (text alone)",
        "Gemma3Config",
        {
            "text_config": GATED | HEADS_32 | ONE_LAYER_SLIDES | {"query_pre_attn_scalar": 24},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_index": 280,
            "boi_token_index": 281,
            "eoi_token_index": 282,
        },
    ),
    Family(
        "gemma4_text",
        "Gemma 4 (text)",
        "Gemma4TextConfig",
        GATED
        | HEADS_16
        | ONE_LAYER_SLIDES
        | {
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
        },
    ),
    Family(
        "vaultgemma",
        "VaultGemma",
        "VaultGemmaConfig",
        GATED | HEADS_32 | ONE_LAYER_SLIDES | {"query_pre_attn_scalar": 24},
    ),
    Family("phi", "Phi-1.5, Phi-2", "PhiConfig", GATED),
    Family("phi3", "Phi-3, Phi-4", "Phi3Config", GATED),
    Family("phimoe", "Phi-3.5-MoE", "PhimoeConfig", GATED | EXPERTS),
    Family("olmo", "OLMo", "OlmoConfig", GATED),
    Family("olmo2", "OLMo 2", "Olmo2Config", GATED),
    Family("olmo3", "OLMo 3", "Olmo3Config", GATED | ONE_LAYER_SLIDES),
    Family("olmoe", "OLMoE", "OlmoeConfig", GATED | EXPERTS),
    Family("flex_olmo", "FlexOlmo", "FlexOlmoConfig", GATED | EXPERTS),
    Family("gpt2", "GPT-2, DialoGPT", "GPT2Config", GPT),
    Family("gpt_bigcode", "StarCoder, SantaCoder", "GPTBigCodeConfig", GPT),
    Family("gpt_neox", "Pythia, GPT-NeoX", "GPTNeoXConfig", GATED),
    Family(
        "gpt_oss",
        "gpt-oss 20B, 120B",
        "GptOssConfig",
        GATED | EXPERTS | ONE_LAYER_SLIDES | HEADS_16 | PLAIN_ROPE,
    ),
    Family(
        "opt",
        "OPT",
        "OPTConfig",
        BASE
        | {
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": MAX_MODEL_LEN,
            "init_std": 0.2,
        },
    ),
    Family("biogpt", "BioGPT", "BioGptConfig", GATED),
    Family("starcoder2", "StarCoder2", "Starcoder2Config", GATED | {"sliding_window": WINDOW}),
    Family("stablelm", "StableLM 2, StableLM 3B", "StableLmConfig", GATED),
    Family("persimmon", "Persimmon", "PersimmonConfig", GATED),
    Family("glm", "GLM-4 9B (first edition)", "GlmConfig", GATED | HEADS_16),
    Family("glm4", "GLM-4-0414, GLM-Z1", "Glm4Config", GATED | HEADS_16),
    Family("glm4_moe", "GLM-4.5, GLM-4.6", "Glm4MoeConfig", GATED | EXPERTS | SHARED | HEADS_16),
    Family("cohere", "Command R, Command R+", "CohereConfig", GATED),
    Family("cohere2", "Command R7B, Command A", "Cohere2Config", GATED | ONE_LAYER_SLIDES | HEADS_16),
    Family("granite", "Granite 3", "GraniteConfig", GATED),
    Family("granitemoe", "Granite 3 MoE", "GraniteMoeConfig", GATED | EXPERTS),
    Family(
        "granitemoeshared",
        "Granite MoE with shared experts",
        "GraniteMoeSharedConfig",
        GATED | EXPERTS | {"shared_intermediate_size": 64},
    ),
    Family("smollm3", "SmolLM3", "SmolLM3Config", GATED | {"no_rope_layers": [1, 0]}),
    Family("deepseek_v2", "DeepSeek-V2, V2-Lite", "DeepseekV2Config", GATED | EXPERTS | SHARED | LATENT),
    Family(
        "deepseek_v3",
        "DeepSeek-V3, R1",
        "DeepseekV3Config",
        GATED | EXPERTS | SHARED | LATENT | {"n_group": 2, "topk_group": 1},
    ),
    Family("dots1", "dots.llm1", "Dots1Config", GATED | EXPERTS | SHARED | HEADS_16),
    Family("minicpm3", "MiniCPM3", "MiniCPM3Config", GATED | LATENT),
    Family("youtu", "Youtu-LLM", "YoutuConfig", GATED | LATENT),
    Family("minimax_m2", "MiniMax-M2", "MiniMaxM2Config", GATED | EXPERTS | HEADS_16),
    Family(
        "mimo_v2_flash",
        "MiMo-V2-Flash",
        "MiMoV2FlashConfig",
        GATED
        | EXPERTS
        | {
            "head_dim": 24,
            "v_head_dim": 16,
            "swa_head_dim": 24,
            "swa_v_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "sliding_window": WINDOW,
        },
    ),
    Family("nemotron", "Nemotron-4, Minitron", "NemotronConfig", GATED),
    Family("exaone4", "EXAONE 4", "Exaone4Config", GATED | ONE_LAYER_SLIDES),
    Family("seed_oss", "Seed-OSS", "SeedOssConfig", GATED | HEADS_16),
    Family("ernie4_5", "ERNIE 4.5 0.3B", "Ernie4_5Config", GATED | HEADS_16),
    Family(
        "ernie4_5_moe",
        "ERNIE 4.5 21B-A3B, 300B-A47B",
        "Ernie4_5_MoeConfig",
        GATED | EXPERTS | {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    Family("hunyuan_v1_dense", "Hunyuan 0.5B to 7B", "HunYuanDenseV1Config", GATED | HEADS_16),
    Family("hunyuan_v1_moe", "Hunyuan-A13B", "HunYuanMoEV1Config", GATED | EXPERTS | HEADS_16 | {"moe_topk": 2}),
    Family("helium", "Helium 1", "HeliumConfig", GATED | HEADS_16),
    Family("bitnet", "BitNet b1.58 (unpacked weights)", "BitNetConfig", GATED),
    Family("apertus", "Apertus", "ApertusConfig", GATED),
    Family("arcee", "AFM 4.5B", "ArceeConfig", GATED),
    Family("afmoe", "Trinity", "AfmoeConfig", GATED | EXPERTS | HEADS_16),
    Family(
        "cwm",
        "CWM 32B",
        "CwmConfig",
        GATED | ONE_LAYER_SLIDES | HEADS_16 | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    Family("hyperclovax", "HyperCLOVA X SEED", "HyperCLOVAXConfig", GATED),
    Family("jais2", "Jais 2", "Jais2Config", GATED),
    Family("nanochat", "nanochat", "NanoChatConfig", GATED),
    Family("solar_open", "Solar Open", "SolarOpenConfig", GATED | EXPERTS | HEADS_16 | {"n_shared_experts": 1}),
    Family("diffllama", "DiffLlama", "DiffLlamaConfig", GATED),
    Family(
        "jetmoe",
        "JetMoE",
        "JetMoeConfig",
        BASE | EXPERTS | {"num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 128},
        variant="its experts cannot be replaced, and multiply as many rows at once as chose them",
    ),
    Family("gptj", "GPT-J", "GPTJConfig", GPT | {"rotary_dim": 8}, refused=BY_ITSELF),
    Family(
        "gpt_neo",
        "GPT-Neo",
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        refused=BY_ITSELF,
    ),
    Family("falcon", "Falcon 7B, 40B", "FalconConfig", BASE, refused=BY_ITSELF),
    Family(
        "bloom",
        "BLOOM",
        "BloomConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        refused=BY_ITSELF,
    ),
    Family(
        "mpt",
        "MPT",
        "MptConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4},
        refused=BY_ITSELF,
    ),
    Family("codegen", "CodeGen", "CodeGenConfig", GPT | {"rotary_dim": 8}, refused=BY_ITSELF),
    Family("doge", "Doge", "DogeConfig", GATED, refused="changes its attention mask by itself"),
    Family(
        "mamba",
        "Mamba",
        "MambaConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2},
        refused=NOT_KEYS,
    ),
    Family("jamba", "Jamba", "JambaConfig", GATED | EXPERTS, refused=NOT_KEYS),
    Family("lfm2", "LFM2", "Lfm2Config", GATED | {"layer_types": ["conv", "full_attention"]}, refused=NOT_KEYS),
    Family("minimax", "MiniMax-01, M1", "MiniMaxConfig", GATED | EXPERTS, refused=NOT_KEYS),
    Family("qwen3_next", "Qwen3-Next", "Qwen3NextConfig", GATED | EXPERTS, refused=NOT_KEYS),
    Family(
        "t5",
        "T5, FLAN-T5",
        "T5Config",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128},
        refused="encoder and a decoder",
    ),
)
GREEN: Final = tuple(family for family in FAMILIES if family.is_green)
REFUSED: Final = tuple(family for family in FAMILIES if family.refused)
