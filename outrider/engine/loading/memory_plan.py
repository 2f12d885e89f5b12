"""Memory that serving a model takes on a device, computed from its configuration without loading it.

Everything is per rank: the loaded weights, the KV of a token (`kv_layout`), the working memory of a step, and the
process itself. What a worker makes of it, `kv_plan` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from outrider.engine.compiled.kernels import has_onednn_products, products
from outrider.engine.compiled.products import PRODUCT_BYTES, PRODUCTS_MAX
from outrider.engine.kv.kv_plan import MIB, ModelMemory
from outrider.engine.layers.kv_layout import (
    LayerLayout,
    UnsupportedModelError,
    bytes_per_token,
    empty_model,
    find_layout,
)
from outrider.engine.layers.shards import num_kv_heads_of, plan_name, refuse_uneven_heads, shards_layers
from outrider.engine.loading.early_exit import exit_early
from outrider.engine.model import DTYPES, own_limit
from outrider.engine.options import EngineOptions
from outrider.errors import ConfigurationError

# Python, torch and their libraries: 270 MiB were seen on a CPU. A GPU's context and its libraries' workspaces take
# more; the exact amount depends on the driver.
PROCESS_BYTES: Final = {"cpu": 320 * MIB, "cuda": 1024 * MIB}
LOGITS_COPIES: Final = 3
"""The model's logits, the processed ones, and probabilities; in float32."""
STEP_TOKENS: Final = 512
STEP_LOGITS: Final = 256
"""Rows of the largest step that is planned for, and those of them with logits: sequences × (hints + 1)."""
KEY_PROJECTIONS: Final = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
"""Projections whose sharded outputs mean that heads are sharded."""


class NoPlanError(ConfigurationError):
    """transformers has no plan to shard the model."""


@dataclass(frozen=True, slots=True)
class ServingShape:
    """The settings of serving that determine memory."""

    dtype: torch.dtype = torch.bfloat16  # of weights and KV
    quantization: str = "none"
    num_ranks: int = 1
    device_type: str = "cpu"
    early_exit_layer: int | None = None

    @classmethod
    def of(cls, options: EngineOptions, num_ranks: int, device_type: str) -> ServingShape:
        return cls(DTYPES[options.dtype], options.quantization, num_ranks, device_type, options.early_exit_layer)


def plan_memory(model_dir: Path, shape: ServingShape) -> ModelMemory:
    """Plans the memory of a model. Raises ConfigurationError, naming what is missing or cannot be served."""
    from transformers import AutoConfig

    if not (model_dir / "config.json").is_file():  # transformers would otherwise look for the name online
        raise ConfigurationError(f"cannot read {model_dir / 'config.json'}: name a folder in Hugging Face format")
    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        exit_early(hf_config, shape.early_exit_layer)
        model = empty_model(hf_config)
        layers = find_layout(model)
        plan: Mapping[str, str] = (model.tp_plan or {}) if shape.num_ranks > 1 else {}
        if shape.num_ranks > 1 and not shards_layers(plan):
            raise NoPlanError(f"transformers has no plan to shard {type(model).__name__}; serve it on one rank")
    except UnsupportedModelError as error:
        raise ConfigurationError(f"the engine cannot run {model_dir}: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"cannot read {model_dir / 'config.json'}: {error}") from error
    text_config = hf_config.get_text_config()
    if shape.num_ranks > 1:
        refuse_uneven_heads(text_config, shape.num_ranks)
    weights = _weight_bytes(model, plan, shape)
    embedding = _parameter_bytes(
        model.get_input_embeddings().weight, model.get_input_embeddings(), shape=shape, is_output=False
    )
    is_shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight and not _is_copied(shape)
    return ModelMemory(
        weights=weights,
        weights_read=weights - (0 if is_shared else embedding),
        kv_per_token=_kv_bytes(layers, plan, shape),
        step=_step_bytes(text_config, layers, shape),
        process=PROCESS_BYTES[shape.device_type] + _products_bytes(shape),
        longest=own_limit(text_config),
    )


def loaded_memory(model: Any, layers: Sequence[LayerLayout], shape: ServingShape) -> ModelMemory:
    """Memory that a loaded model needs beside the weights and the process, which are there already."""
    text_config = model.config.get_text_config()
    return ModelMemory(
        weights=0,
        weights_read=0,
        kv_per_token=bytes_per_token(layers, shape.dtype),
        step=_step_bytes(text_config, layers, shape),
        process=0,
        longest=own_limit(text_config),
    )


def _weight_bytes(model: Any, plan: Mapping[str, str], shape: ServingShape) -> int:
    output = model.get_output_embeddings()
    num_kv_heads = num_kv_heads_of(model.config.get_text_config())
    seen: set[int] = set()
    total = 0.0
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_tied = id(parameter) in seen
            if is_tied and not _is_copied(shape):
                continue
            seen.add(id(parameter))
            num_bytes = _parameter_bytes(parameter, module, is_output=module is output, shape=shape)
            style = plan.get(plan_name(f"{module_name}.{name}")) or plan.get(plan_name(module_name))
            total += num_bytes / _num_parts(style, name, module_name, num_kv_heads, shape.num_ranks)
    return round(total)


def _is_copied(shape: ServingShape) -> bool:
    """Whether an output layer that shares the embedding's weights is packed separately (`linear`)."""
    return shape.device_type == "cpu" and shape.dtype == torch.bfloat16


def _products_bytes(shape: ServingShape) -> int:
    """Memory of the oneDNN products once their cache is full (`products`).

    Where products are our own (`kernels`) or torch's, or in float32, oneDNN compiles next to none.
    """
    is_bfloat16 = shape.device_type == "cpu" and shape.dtype == torch.bfloat16
    is_compiled = is_bfloat16 and products() is None and has_onednn_products()
    return PRODUCTS_MAX * PRODUCT_BYTES if is_compiled else 0


def _parameter_bytes(parameter: torch.Tensor, module: nn.Module, *, is_output: bool, shape: ServingShape) -> int:
    is_linear = parameter.ndim >= 2 and not isinstance(module, nn.Embedding)
    if shape.quantization == "none" or is_output or not is_linear:
        return parameter.numel() * shape.dtype.itemsize
    num_scales = parameter.numel() // parameter.shape[-1]
    return parameter.numel() + num_scales * shape.dtype.itemsize


def _num_parts(style: str | None, name: str, module_name: str, num_kv_heads: int, num_ranks: int) -> float:
    """The number of ranks that a parameter is sharded over."""
    if style is None or style == "replicate" or (style.startswith("rowwise") and name == "bias"):
        return 1
    if module_name.endswith((".k_proj", ".v_proj")):
        return min(num_ranks, num_kv_heads)  # ranks beyond that share heads
    return num_ranks


def _kv_bytes(layers: Sequence[LayerLayout], plan: Mapping[str, str], shape: ServingShape) -> int:
    whole = bytes_per_token(layers, shape.dtype)
    is_cut = any(name.rpartition(".")[2] in KEY_PROJECTIONS and style == "colwise" for name, style in plan.items())
    if not is_cut:
        return whole
    return sum(
        bytes_per_token([layer], shape.dtype) // layer.num_kv_heads * max(layer.num_kv_heads // shape.num_ranks, 1)
        for layer in layers
    )


def _step_bytes(text_config: Any, layers: Sequence[LayerLayout], shape: ServingShape) -> int:
    width: int = text_config.hidden_size
    inner: int = getattr(text_config, "intermediate_size", None) or 4 * width
    # The residual, its norm, the addend; gate and up, and their product; queries, keys, values and attention's output.
    attended = 4 * width + max(layer.num_entries for layer in layers)
    numbers = STEP_TOKENS * (3 * width + 3 * inner // shape.num_ranks + attended)
    return numbers * shape.dtype.itemsize + LOGITS_COPIES * 4 * STEP_LOGITS * int(text_config.vocab_size)
