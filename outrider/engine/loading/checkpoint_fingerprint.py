"""The identity of a checkpoint: one hash over its tensors and over the settings that affect their computation.

Folders with equal fingerprints hold the same model, however their files are split and wherever they are. Names, types
and shapes of all tensors are hashed. Their bytes are hashed whole up to WHOLE_BYTES for the checkpoint. Of a larger one
evenly spread windows of every tensor are hashed, so that the cost is bounded: NUM_WINDOWS reads of WINDOW_BYTES, or one
per tensor where there are more tensors.

A change of a whole tensor is detected: a fine-tune, a merged adapter, another revision, a retrained head, another
quantization. Sampling may miss a change to a few rows of a tensor of a large checkpoint, such as one token's embedding,
or one expert of many that share a tensor. The loader's probe (`outrider.engine.compiled.numerics`) hashes logits and
detects those changes that affect its few tokens. The fingerprint distinguishes honest models; it is no protection
against forgery.

Never imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from outrider.engine.loading.checkpoint_files import ADAPTER_FILES, Tensor, tensors_of, weight_files
from outrider.errors import ConfigurationError
from outrider.model_files import read_json

WHOLE_BYTES: Final = 64 << 20
"""Tensor bytes up to which a checkpoint is hashed whole."""
NUM_WINDOWS: Final = 4096
WINDOW_BYTES: Final = 4096
NUM_DIGITS: Final = 32

# The model's location, the writer, the training, and the type that --dtype replaces.
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"),
        *("initializer_range", "attention_dropout", "hidden_dropout"),
    }
)


def checkpoint_fingerprint(model_dir: Path) -> str:
    """Returns the fingerprint of a folder in Hugging Face format, as 32 hexadecimal characters.

    It covers what the loader reads: config.json without fields that have no effect, the end-of-sequence ids of
    generation_config.json, the safetensors files, an adapter beside them. The tokenizer has a fingerprint of its own.

    Raises ConfigurationError naming the file that is missing or damaged.
    """
    config = read_json(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    total = hashlib.sha256()
    total.update(_canonical(_effective(config)))
    total.update(_canonical({"eos_token_id": generation.get("eos_token_id")}))
    if (adapter_config := model_dir / ADAPTER_FILES[0]).is_file():
        total.update(_canonical(_effective(read_json(adapter_config))))
    tensors = [tensor for path in weight_files(model_dir, config) for tensor in tensors_of(path)]
    is_whole = sum(tensor.num_bytes for tensor in tensors) <= WHOLE_BYTES
    num_windows = max(NUM_WINDOWS // max(len(tensors), 1), 1)
    for line in sorted(_tensor_lines(tensors, None if is_whole else num_windows)):
        total.update(line)
    return total.hexdigest()[:NUM_DIGITS]


def _tensor_lines(tensors: list[Tensor], num_windows: int | None) -> Iterator[bytes]:
    """One line per tensor, independent of the file that the tensor is in. None: hash all bytes."""
    by_path: dict[Path, list[Tensor]] = {}
    for tensor in tensors:
        by_path.setdefault(tensor.path, []).append(tensor)
    for path, its_tensors in by_path.items():
        try:
            with path.open("rb") as file:
                for tensor in its_tensors:
                    digest = hashlib.sha256()
                    for offset, length in windows(tensor.num_bytes, num_windows):
                        digest.update(os.pread(file.fileno(), length, tensor.begin + offset))
                    yield _canonical([tensor.name, tensor.dtype, tensor.shape, digest.hexdigest()])
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error


def windows(num_bytes: int, num_windows: int | None) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of the parts of a tensor that are hashed, evenly spread; None: all of it."""
    if num_windows is None or num_bytes <= num_windows * WINDOW_BYTES:
        for offset in range(0, num_bytes, WHOLE_BYTES):
            yield offset, min(WHOLE_BYTES, num_bytes - offset)
        return
    gap = num_bytes - WINDOW_BYTES
    for number in range(num_windows):
        yield (number * gap // (num_windows - 1) if num_windows > 1 else gap // 2), WINDOW_BYTES


def _effective(config: Any) -> Any:
    """A configuration without fields that have no effect. `quantization_config` is kept verbatim."""
    if isinstance(config, dict):
        return {
            key: value if key == "quantization_config" else _effective(value)
            for key, value in config.items()
            if key not in _WITHOUT_EFFECT
        }
    return [_effective(each) for each in config] if isinstance(config, list) else config


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
