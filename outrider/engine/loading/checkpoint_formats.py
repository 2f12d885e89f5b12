"""Formats of checkpoints with quantized weights: which can be read, and how.

Every weight becomes a plain matrix in the model's own type, so that the batch-invariant forms of `linear` compute it.
Only weights are read: a checkpoint that would quantize activations too (W8A8) is computed with unquantized activations,
which is slightly more exact. `--quantization` then stores in 8 bits what fits, without loss where it fitted before.

The formats are those of compressed-tensors (int-, float-, naive- and pack-quantized), DeepSeek's blocks of fp8, GPTQ
(Frantar et al., 2210.17323), AWQ (Lin et al., 2306.00978) and torchao's plain ones. Their packages are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

Tensors = Mapping[str, torch.Tensor]

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of outputs 0 to 7 in a word
_PACKED_BITS: Final = (2, 4, 8)
_EIGHT_BITS: Final = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_COMPRESSED_FORMATS: Final = (
    "dense",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
)
_WAY_OUT: Final = (
    "serve the model as it was before it was quantized with --quantization int8 or fp8, or a copy in one of the "
    "formats that can be read: compressed-tensors, fp8, GPTQ, AWQ, torchao's int8 and float8"
)


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """The storage format of the linear layers' weights in a checkpoint."""

    name: str  # shown to the operator
    tensor_names: tuple[str, ...]  # of one weight, after the layer's name
    read: Callable[[Tensors], torch.Tensor]  # float32 [out_features, in_features], or unchanged if not quantized


def checkpoint_format(described: Mapping[str, Any]) -> CheckpointFormat:
    """Returns the format for the `quantization_config` of a model's config.json. Raises ValueError naming what cannot
    be read."""
    method = str(described.get("quant_method", "")).lower()
    if described.get("load_in_8bit") or described.get("load_in_4bit"):
        method = "bitsandbytes"
    reader = _METHODS.get(method)
    if reader is None:
        raise ValueError(f"its weights are quantized by {method or 'an unnamed method'}; {_WAY_OUT}")
    return reader(described)


def _compressed_tensors(described: Mapping[str, Any]) -> CheckpointFormat:
    groups = dict(described.get("config_groups") or {})
    formats = {str(group.get("format") or described.get("format") or "dense") for group in groups.values()}
    if unknown := sorted(formats - set(_COMPRESSED_FORMATS)):
        raise ValueError(f"its weights are {', '.join(unknown)} (compressed-tensors); {_WAY_OUT}")
    if (described.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError(f"its weights are sparse as well as quantized (compressed-tensors); {_WAY_OUT}")
    if (described.get("transform_config") or {}).get("config_groups"):
        raise ValueError(f"its layers are rotated (compressed-tensors transforms); {_WAY_OUT}")
    blocks = {
        tuple(weights["block_structure"])
        for group in groups.values()
        if (weights := group.get("weights") or {}).get("block_structure")
    }
    if len(blocks) > 1:
        raise ValueError(f"its weights are in blocks of different shapes (compressed-tensors); {_WAY_OUT}")
    block = next(iter(blocks), None)

    def read(tensors: Tensors) -> torch.Tensor:
        if "weight_packed" in tensors:
            return _read_packed(tensors)
        return _read_scaled(tensors["weight"], tensors.get("weight_scale"), tensors.get("weight_zero_point"), block)

    names = ("weight", "weight_scale", "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx")
    return CheckpointFormat(f"compressed-tensors, {', '.join(sorted(formats))}", names, read)


def _read_packed(tensors: Tensors) -> torch.Tensor:
    """Reads words along the inputs, lowest bits first; values are stored with an offset that makes them positive."""
    out_features, in_features = (int(size) for size in tensors["weight_shape"].tolist())
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    num_bits = packed.shape[1] * 32 // in_features
    offset = 1 << (num_bits - 1)
    values = unpack(packed, num_bits)[:, :in_features] - offset
    zero_point = tensors.get("weight_zero_point")
    if zero_point is not None:  # packed along the outputs
        zero_point = unpack(zero_point.t().contiguous(), num_bits).t()[:out_features] - offset
    group_of = tensors.get("weight_g_idx")
    if group_of is not None and int(group_of.min()) >= 0:  # the inputs' groups are not contiguous
        columns = group_of.long()
        scale, zero_point = scale[:, columns], None if zero_point is None else zero_point[:, columns]
    return _read_scaled(values, scale, zero_point, None)


def _blocks_of_fp8(described: Mapping[str, Any]) -> CheckpointFormat:
    size = described.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))

    def read(tensors: Tensors) -> torch.Tensor:
        return _read_scaled(tensors["weight"], tensors.get("weight_scale_inv"), None, block)

    return CheckpointFormat("fp8", ("weight", "weight_scale_inv", "activation_scale"), read)


def _gptq(described: Mapping[str, Any]) -> CheckpointFormat:
    num_bits = _packed_bits(described, "GPTQ")
    checkpoint = described.get("checkpoint_format") or "gptq"
    if checkpoint not in ("gptq", "gptq_v2"):
        raise ValueError(f"its weights are in GPTQ's {checkpoint} layout; {_WAY_OUT}")
    zero_offset = int(checkpoint == "gptq")  # the first version stored zero points one too low

    def read(tensors: Tensors) -> torch.Tensor:
        if "weight" in tensors:
            return tensors["weight"]
        scales = tensors["scales"].float()  # [num_groups, out_features]
        values = unpack(tensors["qweight"].t().contiguous(), num_bits)  # [out_features, in_features]
        zeros = (unpack(tensors["qzeros"], num_bits)[:, : scales.shape[1]] + zero_offset) % (1 << num_bits)
        group_of = tensors.get("g_idx")
        columns = (
            torch.arange(values.shape[1], device=values.device) * scales.shape[0] // values.shape[1]
            if group_of is None
            else group_of.long()
        )
        return (values - zeros.t()[:, columns]) * scales.t()[:, columns]

    return CheckpointFormat(f"GPTQ, {num_bits} bits", ("weight", "qweight", "qzeros", "scales", "g_idx"), read)


def _awq(described: Mapping[str, Any]) -> CheckpointFormat:
    num_bits = _packed_bits(described, "AWQ")
    layout = str(described.get("version") or described.get("format") or "gemm").lower()
    if layout != "gemm" or num_bits != 4:
        raise ValueError(f"its weights are in AWQ's {layout} layout with {num_bits} bits; {_WAY_OUT}")

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        values = unpack(packed, num_bits)
        return values.view(values.shape[0], -1, 8)[:, :, _AWQ_ORDER].reshape(values.shape)

    def read(tensors: Tensors) -> torch.Tensor:
        if "weight" in tensors:
            return tensors["weight"]
        values, zeros = (
            in_order(tensors["qweight"]),
            in_order(tensors["qzeros"]),
        )  # [in_features, out_features]
        per_group = values.shape[0] // zeros.shape[0]
        scales = tensors["scales"].float().repeat_interleave(per_group, dim=0)
        return ((values - zeros.repeat_interleave(per_group, dim=0)) * scales).t()

    return CheckpointFormat("AWQ, 4 bits", ("weight", "qweight", "qzeros", "scales"), read)


def _torchao(described: Mapping[str, Any]) -> CheckpointFormat:
    """Reads tensor subclasses flattened into safetensors: one value per element, and their scales."""

    def read(tensors: Tensors) -> torch.Tensor:
        if "weight" in tensors:
            return tensors["weight"]
        values, scale = tensors["_weight_qdata"], tensors["_weight_scale"]
        if values.dtype not in _EIGHT_BITS or scale.shape[0] not in (1, values.shape[0]):
            raise ValueError(f"its weights are in a layout made for one of torchao's kernels; {_WAY_OUT}")
        if "_weight_act_pre_scale" in tensors:
            raise ValueError(f"its activations are scaled before each layer (torchao); {_WAY_OUT}")
        return _read_scaled(values, scale, tensors.get("_weight_zero_point"), None)

    names = ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale")
    return CheckpointFormat("torchao", ("weight", *names), read)


_METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], CheckpointFormat]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _blocks_of_fp8,
    "gptq": _gptq,
    "awq": _awq,
    "torchao": _torchao,
}


def _packed_bits(described: Mapping[str, Any], name: str) -> int:
    num_bits = int(described.get("bits") or described.get("w_bit") or 4)
    if num_bits not in _PACKED_BITS:
        raise ValueError(f"its weights have {num_bits} bits ({name}); {_WAY_OUT}")
    return num_bits


def unpack(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Unpacks unsigned values from words, those in the lowest bits first.

    # int32 [num_rows, num_words] -> int32 [num_rows, num_words * 32 / num_bits]
    """
    if words.dtype != torch.int32 or num_bits not in _PACKED_BITS:
        raise ValueError(f"{num_bits} bits packed into {words.dtype} cannot be read")
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)
    return values.flatten(1)


def _read_scaled(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    block: tuple[int, ...] | None,
) -> torch.Tensor:
    """Computes (values - zero_point) * scale, with a scale for the whole matrix, per output, per group of inputs or per
    block. Values of 16 bits or more are not quantized."""
    if values.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return values
    if scale is None:
        raise ValueError("the scales of its quantized weights are missing")
    matrix = values.float()
    if zero_point is not None:
        matrix = matrix - _spread(zero_point.float(), matrix.shape, block)
    return matrix * _spread(scale.float(), matrix.shape, block)


def _spread(grid: torch.Tensor, shape: torch.Size, block: tuple[int, ...] | None) -> torch.Tensor:
    """Repeats a grid over the matrix that it divides.  # [rows, columns] -> broadcastable to `shape`"""
    if grid.numel() == 1:
        return grid.reshape(1, 1)
    if grid.dim() == 1:
        grid = grid.unsqueeze(1)
    for axis in (0, 1):
        length, count = shape[axis], grid.shape[axis]
        if count in (1, length):
            continue
        # Blocks need not divide the matrix; the last one is then smaller, which the grid alone does not show.
        size = -(-length // count) if block is None else block[axis]
        if (block is None and length % count) or -(-length // size) != count:
            raise ValueError(f"its scales {tuple(grid.shape)} do not divide its weights {tuple(shape)}")
        grid = grid.repeat_interleave(size, dim=axis).narrow(axis, 0, length)
    return grid
