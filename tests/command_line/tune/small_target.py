"""A tiny target that the tiny heads of `tests.exactness` fit, with a tokenizer."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
import transformers

from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.loading import load_head
from outrider.engine.model import Engine
from tests import models
from tests.exactness.heads import WIDTH, write_head
from tests.exactness.local_heads import write_medusa


@functools.cache
def target_dir(seed: int = 0, mask_token: int | None = None) -> Path:
    """A model folder. mask_token: that its configuration names, None for none."""
    folder = models.root_dir() / f"small-target-{seed}-{mask_token}"
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**(models.GATED | sizes | {"num_hidden_layers": 3}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    models.write_tokenizer(folder)
    if mask_token is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": mask_token}))
    return folder


@functools.cache
def eagle3_dir() -> Path:
    return write_head(models.root_dir() / "small-eagle3", models.VOCAB_SIZE, models.MAX_MODEL_LEN)


@functools.cache
def medusa_dir() -> Path:
    return write_medusa(models.root_dir() / "small-medusa", models.VOCAB_SIZE)


@functools.cache
def target_engine() -> Engine:
    return models.load(models.engine_config(target_dir()))


@functools.cache
def eagle3_engine() -> HeadEngine:
    return load_head(models.engine_config(eagle3_dir()), target_dir())
