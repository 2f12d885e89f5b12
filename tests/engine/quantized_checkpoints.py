"""Model folders with quantized weights, as others publish them, and the same weights written out plainly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import models

Tensors = dict[str, torch.Tensor]
Encoder = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
GROUP = 32


def compressed_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A scale per output, for a range from -128."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127.5).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127)
    tensors = {"weight": values.to(torch.int8), "weight_scale": scale}
    return tensors, values * scale.float()


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 40, which divide no layer here."""
    rows, columns = (-(-size // 40) for size in weight.shape)
    missing = (0, columns * 40 - weight.shape[1], 0, rows * 40 - weight.shape[0])
    blocks = torch.nn.functional.pad(weight, missing).view(rows, 40, columns, 40)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    spread = scale.repeat_interleave(40, 0).repeat_interleave(40, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * spread


def gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits, groups of GROUP inputs that do not follow each other."""
    num_outputs, num_inputs = weight.shape
    group_of = torch.arange(num_inputs, dtype=torch.int32) % (num_inputs // GROUP)
    order = group_of.argsort(stable=True)
    grouped = weight[:, order].view(num_outputs, -1, GROUP)
    lowest, highest = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    scales = ((highest - lowest) / 15).half().float()
    zeros = (-lowest / scales).round().clamp(1, 15)
    values = (weight / scales[:, group_of] + zeros[:, group_of]).round().clamp(0, 15)
    tensors = {
        "qweight": _packed(values).t().contiguous(),
        "qzeros": _packed((zeros - 1).t()),
        "scales": scales.t().half().contiguous(),
        "g_idx": group_of,
    }
    return tensors, (values - zeros[:, group_of]) * scales[:, group_of]


def torchao_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, written = compressed_int8(weight)
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"].float()}, written


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Eight values of four bits to a word, along the last axis."""
    words = (values.long().reshape(values.shape[0], -1, 8) << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


ENCODERS: dict[str, tuple[Encoder, dict[str, Any]]] = {
    "compressed-tensors": (
        compressed_int8,
        {"format": "int-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
    ),
    "fp8": (fp8_blocks, {"weight_block_size": [40, 40]}),
    "gptq": (gptq, {"bits": 4, "group_size": GROUP, "desc_act": True}),
    "torchao": (torchao_int8, {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}),
}


def write_pair(method: str, directory: Path, original: Path | None = None) -> tuple[Path, Path]:
    """A quantized checkpoint of a model, the tiny Llama if none is given, and the plain one that it stands for."""
    encode, described = ENCODERS[method]
    folders = directory / "quantized", directory / "plain"
    original = original or models.model_dir("llama")
    quantized: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        if "proj" not in name:
            quantized[name] = plain[name] = tensor
            continue
        tensors, plain[name] = encode(tensor)
        quantized |= {f"{name.removesuffix('weight')}{own}": each for own, each in tensors.items()}
    for folder, written in zip(folders, (quantized, plain), strict=True):
        shutil.copytree(original, folder)
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folders[0], {"quant_method": method, **described})
    return folders


def describe(folder: Path, quantization_config: dict[str, Any]) -> None:
    """Says in a model's config.json that its weights are quantized."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
