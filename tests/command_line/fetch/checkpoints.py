"""Small checkpoints as files by name, for servers that pretend to be the Hub or a bucket."""

from __future__ import annotations

import json
import os
from typing import Any

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARD_BYTES = 3 << 20


def safetensors(name: str, num_bytes: int) -> bytes:
    """A file with one tensor of random bytes."""
    header: dict[str, Any] = {name: {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    encoded = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + os.urandom(num_bytes)


def small_model() -> dict[str, bytes]:
    """A model in one file, without what serving does not need."""
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b'{"model": {"vocab": {}}}',
        "model.safetensors": safetensors("weight", 1000),
    }


def sharded_model() -> dict[str, bytes]:
    """A model in two files, with everything beside it that such repositories have."""
    index = {"weight_map": {f"layer{number}": name for number, name in enumerate(SHARDS)}}
    shards = {name: safetensors(f"layer{number}", SHARD_BYTES) for number, name in enumerate(SHARDS)}
    return shards | {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": b'{"model": {"vocab": {}}}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        # What is not needed: the same weights again, pickles, code.
        "consolidated.safetensors": safetensors("all", 100),
        "model.fp16.safetensors": safetensors("half", 100),
        "original/consolidated.00.pth": b"pickle",
        "original/config.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "training_args.bin": b"pickle",
        "modeling_custom.py": b"import os",
        "README.md": b"# Model",
        ".gitattributes": b"",
    }


NEEDED = frozenset(
    {
        *SHARDS,
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("additional_chat_templates/tools.jinja", "model.safetensors.index.json"),
    }
)
"""The files of `sharded_model` that serving needs."""
