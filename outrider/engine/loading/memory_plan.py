"""Memory that serving a model takes on a device, computed from its configuration without loading it.

Everything is per rank: the loaded weights, the KV of a token (`kv_layout`), the working memory of a step, and the
process itself. A worker checks its plan before it loads, so that a model that cannot fit is refused with the numbers,
and not killed by the kernel.
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
from outrider.engine.layers.kv_layout import (
    LayerLayout,
    UnsupportedModelError,
    bytes_per_token,
    layout_of_config,
)
from outrider.engine.layers.shards import num_kv_heads_of, plan_name, shards_layers
from outrider.errors import ConfigurationError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
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
    max_model_len: int | None = None  # None: the model's own


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory that one rank needs, bytes."""

    weights: int
    weights_read: int  # read in every step: all but an embedding that is not also the output layer
    kv_per_token: int
    step: int  # activations and logits of the largest step
    process: int  # including what oneDNN compiles while serving
    max_model_len: int

    @property
    def fixed(self) -> int:
        """Bytes before the first KV entry."""
        return self.weights + self.step + self.process

    def num_tokens(self, memory: int) -> int:
        """Tokens whose KV fits into so many bytes, over all sequences."""
        return max(memory - self.fixed, 0) // self.kv_per_token

    def num_sequences(self, memory: int, length: int) -> int:
        """Sequences of this length whose KV fits into so many bytes."""
        return self.num_tokens(memory) // length


def plan_memory(model_dir: Path, shape: ServingShape) -> ModelMemory:
    """Plans the memory of a model. Raises ConfigurationError, naming what is missing or cannot be served."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (model_dir / "config.json").is_file():  # transformers would otherwise look for the name online
        raise ConfigurationError(f"cannot read {model_dir / 'config.json'}: name a folder in Hugging Face format")
    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        layers = layout_of_config(hf_config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        plan: Mapping[str, str] = (model.tp_plan or {}) if shape.num_ranks > 1 else {}
        if shape.num_ranks > 1 and not shards_layers(plan):
            raise NoPlanError(f"transformers has no plan to shard {type(model).__name__}; serve it on one rank")
    except UnsupportedModelError as error:
        raise ConfigurationError(f"the engine cannot run {model_dir}: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"cannot read {model_dir / 'config.json'}: {error}") from error
    text_config = hf_config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None) or 1 << 20
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
        max_model_len=shape.max_model_len or longest,
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


def check_memory(
    model_dir: Path,
    needs: ModelMemory,
    free: int,
    *,
    max_num_seqs: int,
    kv_cache_bytes: int,
    num_ranks_here: int = 1,
) -> None:
    """Refuses with the numbers what cannot fit: the model, a step's work, and the reserved KV.

    free: bytes of the device, or of the machine, for all ranks on it. kv_cache_bytes: upper bound per rank. Raises
    ConfigurationError.
    """
    kv = min(kv_cache_bytes, needs.kv_per_token * needs.max_model_len * max_num_seqs)
    missing = num_ranks_here * (needs.fixed + kv) - free
    if missing <= 0:
        return
    ranks = f" of each of {num_ranks_here} ranks" if num_ranks_here > 1 else ""
    raise ConfigurationError(
        f"{model_dir} does not fit: {in_words(free)} are free, and {in_words(missing)} are missing for the weights "
        f"({in_words(needs.weights)}), a step's work ({in_words(needs.step)}), the process "
        f"({in_words(needs.process)}) and KV ({in_words(kv)}){ranks}. Lower --kv-cache-gib, --max-model-len or "
        "--max-num-seqs, quantize the model (--quantization), or shard it over more ranks; `outrider plan` shows "
        "what fits"
    )


def in_words(num_bytes: float) -> str:
    """Formats a size, such as 15.0 GiB or 130 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if abs(num_bytes) >= unit:
            scaled = num_bytes / unit
            return f"{scaled:.0f} {name}" if scaled >= 100 else f"{scaled:.1f} {name}"
    return f"{num_bytes:.0f} B"
