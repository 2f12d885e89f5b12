"""Shapes of the two models, and replacement of a model folder that others read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo import vocabulary

MAX_POSITIONS = 1024
HEAD_DIM = 64


def _config(*, width: int, layers: int, heads: int, kv_heads: int, mlp: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary.VOCAB_SIZE,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        intermediate_size=mlp,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=vocabulary.BOS_TOKEN_ID,
        eos_token_id=vocabulary.EOS_TOKEN_ID,
        pad_token_id=vocabulary.PAD_TOKEN_ID,
    )


def target_config() -> LlamaConfig:
    """Configuration of the target: 14.2 M parameters."""
    return _config(width=384, layers=8, heads=6, kv_heads=2, mlp=1024)


def draft_config() -> LlamaConfig:
    """Configuration of the draft: 3.5 M parameters. A forward costs host time per layer, so it is wide and shallow."""
    return _config(width=320, layers=2, heads=5, kv_heads=1, mlp=896)


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialized model in float32; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


@torch.no_grad()
def project_embeddings(source: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
    """Start a narrower model with the source's embeddings along their principal directions."""
    embeddings = source.get_input_embeddings().weight.float().cpu()  # [vocab, source width]
    _, _, directions = torch.linalg.svd(embeddings, full_matrices=False)
    model.get_input_embeddings().weight.copy_(embeddings @ directions[: model.config.hidden_size].T)


def publish(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bfloat16 with its tokenizer; each file is replaced in one rename.

    A folder cannot be renamed over another, but shapes and tokenizer do not change between two publications
    of one run, so a reader sees a valid pair of files whenever it looks.
    """
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        bos_token_id=vocabulary.BOS_TOKEN_ID,
        eos_token_id=vocabulary.EOS_TOKEN_ID,
        pad_token_id=vocabulary.PAD_TOKEN_ID,
        do_sample=False,
    )
    copy.save_pretrained(staging)
    vocabulary.save_tokenizer(tokenizer, staging)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(staging.iterdir()):
        file.chmod(0o644)
        os.replace(file, folder / file.name)
    staging.rmdir()
