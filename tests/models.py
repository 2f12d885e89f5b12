"""Tiny random models with a tokenizer, written once per test process into a folder that goes away with it.

`model_dir(family)` is what a worker would be pointed at, `engine(family, dtype)` the loaded engine. Both are shared
by all tests of a process: free the sequences you make.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from torch import nn

from outrider.engine.layers import linear
from outrider.engine.layers.linear import LinearForm
from outrider.engine.loading.loading import load_model
from outrider.engine.model import Engine
from outrider.engine.options import Device, Dtype, EngineOptions
from tests.families import FAMILIES
from tests.families import MAX_MODEL_LEN as MAX_MODEL_LEN
from tests.families import VOCAB_SIZE as VOCAB_SIZE

SLIDING_WINDOW = 24

COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# A large spread of the random weights keeps greedy text from falling into one repeated token.
GATED = COMMON | {
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GATED | {"num_hidden_layers": 3}),
    "qwen3": ("Qwen3Config", GATED | {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", GATED | {"sliding_window": SLIDING_WINDOW}),
    "opt": (
        "OPTConfig",
        COMMON
        | {
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": MAX_MODEL_LEN,
            "init_std": 0.2,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
    "longrope": (  # its rotary frequencies depend on the longest position in the batch
        "Phi3Config",
        GATED
        | {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
CONFIGS |= {family.key: (family.config, family.values) for family in FAMILIES}

SUPPORTED = ("llama", "qwen3", "mistral", "opt")


@functools.cache
def root_dir() -> Path:
    """The folder of this process's models, which is removed when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="outrider-test-models-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer whose vocabulary fits every model here."""
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def f(x):\n    return x + 1\n", "import os, sys\n"] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def random_model(family: str, seed: int = 0) -> Any:
    """A float32 transformers model with random weights."""
    class_name, values = CONFIGS[family]
    config = getattr(transformers, class_name)(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        is_decoder = type(config) in transformers.AutoModelForCausalLM._model_mapping
        maker = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModelForSeq2SeqLM
        model = maker.from_config(config)
    return model.eval()


@functools.cache
def model_dir(family: str, seed: int = 0) -> Path:
    """A model folder; equal arguments give the same folder."""
    directory = root_dir() / f"{family}-{seed}"
    random_model(family, seed).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def copy_of(family: str, directory: Path) -> Path:
    """A model folder of your own, to be damaged."""
    shutil.copytree(model_dir(family), directory)
    return directory


def engine_config(directory: Path, dtype: str = "float32", **options: Any) -> EngineOptions:
    """Small blocks, so that sequences of some tokens cross their borders."""
    return EngineOptions(
        model=directory,
        dtype=Dtype(dtype),
        device=Device.CPU,
        **({"block_size": 8, "max_num_seqs": 16} | options),
    )


def load(options: EngineOptions) -> Engine:
    """`load_model`, which looks only once in a process for the form of linear layers of one shape: that takes longer
    than to load a tiny model."""
    with patch.object(linear, "choose_form", _choose_form_once):
        return load_model(options)


def _choose_form_once(layer: nn.Linear, quantization: str = "none") -> tuple[LinearForm, bool]:
    compiled = vars(linear)["products"]()  # which a test may take away
    key = (layer.weight.shape, layer.weight.dtype, layer.bias is None, quantization, compiled)
    if key not in _FORMS:
        _FORMS[key] = _choose_form(layer, quantization)
    return _FORMS[key]


_choose_form: Final = linear.choose_form
_FORMS: Final[dict[Hashable, tuple[LinearForm, bool]]] = {}


@functools.cache
def engine(family: str = "llama", dtype: str = "float32", seed: int = 0) -> Engine:
    """A loaded engine; equal arguments give the same one."""
    return load(engine_config(model_dir(family, seed), dtype))
