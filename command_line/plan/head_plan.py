"""Memory of draft heads, by their configuration and the headers of their files."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

from outrider.engine.heads.kind import HeadKind
from outrider.engine.kv.kv_plan import Load, ModelLoadError, ModelMemory
from outrider.engine.options import EngineOptions, Quantization

STEP_TOKENS: Final = 512
"""Rows of the largest step, as for a model."""


def head_load(options: EngineOptions, target_dir: Path, num_workers: int, device_type: str) -> Load:
    """The draft workers that run the EAGLE-3 head in `options.model`. Raises ConfigurationError."""
    from outrider.engine.heads import eagle3
    from outrider.engine.heads.checkpoint import open_head, target_shape
    from outrider.engine.loading.memory_plan import PROCESS_BYTES
    from outrider.engine.model import DTYPES

    head, target = open_head(options.model), target_shape(target_dir)
    if head.kind is not HeadKind.EAGLE3:
        raise ModelLoadError(
            f"{options.model} has a head of the kind {head.kind}, which runs beside the target's model"
        )
    described, item = eagle3.describe(head, target), DTYPES[options.dtype].itemsize
    width, layers = described.hidden_size, described.layer_config
    own = [each for name, each in head.files.headers.items() if not name.startswith(eagle3.TARGET_SIDE)]
    linear_item = item if options.quantization is Quantization.NONE else 1
    is_linear = [len(each.shape) == 2 and "embed_tokens" not in each.name for each in own]
    weights = sum(
        prod(each.shape) * (linear_item if is_it else item) for each, is_it in zip(own, is_linear, strict=True)
    )
    embedding = described.vocab_size * width * item
    missing = eagle3.missing_shared(head, described)
    weights += sum(embedding if "embed" in name else described.draft_vocab_size * width * item for name in missing)
    num_heads = int(layers["num_attention_heads"])
    head_dim = int(layers.get("head_dim") or width // num_heads)
    num_kv = int(layers.get("num_key_value_heads") or num_heads) * int(layers.get("num_hidden_layers") or 1)
    inner = 4 * int(layers.get("intermediate_size") or 4 * width) + 8 * width
    needs = ModelMemory(
        weights=weights,
        weights_read=weights - embedding,
        kv_per_token=(2 * num_kv * head_dim + width) * item,
        step=STEP_TOKENS * (inner * item + 8 * described.vocab_size),
        process=PROCESS_BYTES[device_type],
        longest=target.longest,
    )
    return Load(needs, options, num_workers)


def with_head(target: Load, head: Path, *, is_local: bool) -> Load:
    """A target that keeps features for a head, and runs it where it `is_local`. Raises ConfigurationError."""
    from outrider.engine.heads.loading import head_memory

    options, needs = target.options, target.needs
    memory = head_memory(head, options.model, options.dtype, is_local=is_local)
    needs = replace(
        needs,
        weights=needs.weights + memory.fixed,
        weights_read=needs.weights_read + memory.fixed,
        kv_per_token=needs.kv_per_token + memory.per_token,
    )
    return replace(target, needs=needs)
