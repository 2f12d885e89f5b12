"""What serving a model takes of a device's memory, told by its configuration: nothing is loaded.

Everything is per rank: the weights as they lie in memory once they are loaded, the KV of a token as the model's
attention keeps it (`kv_layout`), what a step works with, and the process itself. A worker looks at its plan before it
loads, so that a model that cannot fit is refused with the numbers, and not by the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from outrider.engine.compiled_products import PRODUCT_BYTES, PRODUCTS_MAX
from outrider.engine.kernels import has_onednn_products, products
from outrider.engine.kv_layout import LayerLayout, UnsupportedModelError, bytes_per_token, layout_of_config
from outrider.engine.shards import cuts_layers, num_kv_heads_of, plan_name
from outrider.errors import ConfigurationError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
# Python, torch and their libraries: 270 MiB were seen on a CPU. A GPU's context and its libraries' workspaces take
# more; what exactly depends on the driver.
PROCESS_BYTES: Final = {"cpu": 320 * MIB, "cuda": 1024 * MIB}
LOGITS_COPIES: Final = 3
"""As the model said them, processed, and as probabilities; in float32."""
KEY_PROJECTIONS: Final = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
"""Where one of these is cut between the ranks by its outputs, heads are."""


class NoPlanError(ConfigurationError):
    """transformers does not know how to cut the model between ranks."""


@dataclass(frozen=True, slots=True)
class ServingShape:
    """How a model is to be served."""

    dtype: torch.dtype = torch.bfloat16  # of weights and KV
    quantization: str = "none"
    num_ranks: int = 1
    device_type: str = "cpu"
    max_model_len: int | None = None  # None: the model's own
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    num_logits: int = 256  # rows of a step that want them: sequences × (hints + 1)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one rank needs, bytes."""

    weights: int
    weights_read: int  # of them in every step: all but an embedding that is no output layer too
    kv_per_token: int
    step: int  # activations and logits of the largest one
    process: int  # what oneDNN compiles while it serves included
    max_model_len: int

    @property
    def fixed(self) -> int:
        """Before the first token is kept."""
        return self.weights + self.step + self.process

    def num_tokens(self, memory: int) -> int:
        """That can be kept in so many bytes, all sequences together."""
        return max(memory - self.fixed, 0) // self.kv_per_token

    def num_sequences(self, memory: int, length: int) -> int:
        """Of so many tokens each."""
        return self.num_tokens(memory) // length


def plan_memory(model_dir: Path, shape: ServingShape) -> ModelMemory:
    """Raises ConfigurationError, naming what is missing or cannot be served."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (
        model_dir / "config.json"
    ).is_file():  # transformers would look for a model of that name on the net
        raise ConfigurationError(
            f"cannot read {model_dir / 'config.json'}: name a folder in Hugging Face format"
        )
    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        layers = layout_of_config(hf_config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        plan: Mapping[str, str] = (model.tp_plan or {}) if shape.num_ranks > 1 else {}
        if shape.num_ranks > 1 and not cuts_layers(plan):
            raise NoPlanError(
                f"transformers has no plan to cut {type(model).__name__} between ranks; serve it on one"
            )
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
    is_shared = (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight and not _is_copied(shape)
    )
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
    """Whether an output layer that is the embedding's too is packed for itself (`linear`)."""
    return shape.device_type == "cpu" and shape.dtype == torch.bfloat16


def _products_bytes(shape: ServingShape) -> int:
    """For products that oneDNN compiles, once as many as are kept have been needed (`compiled_products`).

    Where products are our own (`kernels`) or torch's, oneDNN has next to none to compile; in float32 neither.
    """
    is_bfloat16 = shape.device_type == "cpu" and shape.dtype == torch.bfloat16
    is_compiled = is_bfloat16 and products() is None and has_onednn_products()
    return PRODUCTS_MAX * PRODUCT_BYTES if is_compiled else 0


def _parameter_bytes(
    parameter: torch.Tensor, module: nn.Module, *, is_output: bool, shape: ServingShape
) -> int:
    is_linear = parameter.ndim >= 2 and not isinstance(module, nn.Embedding)
    if shape.quantization == "none" or is_output or not is_linear:
        return parameter.numel() * shape.dtype.itemsize
    num_scales = parameter.numel() // parameter.shape[-1]
    return parameter.numel() + num_scales * shape.dtype.itemsize


def _num_parts(style: str | None, name: str, module_name: str, num_kv_heads: int, num_ranks: int) -> float:
    """Into how many a parameter is cut."""
    if style is None or style == "replicate" or (style.startswith("rowwise") and name == "bias"):
        return 1
    if module_name.endswith((".k_proj", ".v_proj")):
        return min(num_ranks, num_kv_heads)  # ranks beyond that share heads
    return num_ranks


def _kv_bytes(layers: Sequence[LayerLayout], plan: Mapping[str, str], shape: ServingShape) -> int:
    whole = bytes_per_token(layers, shape.dtype)
    is_cut = any(
        name.rpartition(".")[2] in KEY_PROJECTIONS and style == "colwise" for name, style in plan.items()
    )
    if not is_cut:
        return whole
    return sum(
        bytes_per_token([layer], shape.dtype)
        // layer.num_kv_heads
        * max(layer.num_kv_heads // shape.num_ranks, 1)
        for layer in layers
    )


def _step_bytes(text_config: Any, layers: Sequence[LayerLayout], shape: ServingShape) -> int:
    width: int = text_config.hidden_size
    inner: int = getattr(text_config, "intermediate_size", None) or 4 * width
    # The residual, its norm, what is added; gate and up, and their product; queries, keys, values and what is attended.
    attended = 4 * width + max(layer.num_entries for layer in layers)
    numbers = shape.max_num_batched_tokens * (3 * width + 3 * inner // shape.num_ranks + attended)
    logits = min(shape.num_logits, shape.max_num_batched_tokens) * text_config.vocab_size
    return numbers * shape.dtype.itemsize + LOGITS_COPIES * 4 * int(logits)


def check_memory(
    model_dir: Path,
    needs: ModelMemory,
    free: int,
    *,
    max_num_seqs: int,
    kv_cache_bytes: int,
    num_ranks_here: int = 1,
) -> None:
    """Refuses with the numbers what cannot fit: the model, a step's work, and the KV that will be set aside.

    free: bytes of the device, or of the machine, that all ranks on it may take. kv_cache_bytes: of each rank, at the
    most. Raises ConfigurationError.
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
        "--max-num-seqs, quantize the model (--quantization), or cut it between more ranks; `outrider plan` tells "
        "what fits"
    )


def in_words(num_bytes: float) -> str:
    """Such as 15.0 GiB or 130 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if abs(num_bytes) >= unit:
            scaled = num_bytes / unit
            return f"{scaled:.0f} {name}" if scaled >= 100 else f"{scaled:.1f} {name}"
    return f"{num_bytes:.0f} B"
