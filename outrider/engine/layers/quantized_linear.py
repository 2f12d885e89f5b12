"""Linear layers whose weights are rounded to 8 bits, batch-invariant like all forms of `linear` (invariant I2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn import functional

INT8_WIDTH_MULTIPLE: Final = 32
INT8_LARGEST: Final = (127.0, 128.0)
FP8_LARGEST: Final = 448.0
FP8_ROWS: Final = 16
FP8_WEIGHTS_AT_ONCE: Final = 1 << 18
"""Weights converted to bfloat16 at a time, so that they stay in the cache."""
GRID_SAMPLE: Final = 64
"""Weights per output that are tested for lying on a grid."""


class Int8Linear(nn.Module):
    """Linear layer with weights rounded to 8 bits, one scale per output, computed in bfloat16.

    It halves the memory; torch's kernel sums every row by itself, so nothing depends on the batch. On a CPU it is about
    as fast as packed bfloat16 for one row and slower for several.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.scales = _scales(weight, "int8")
        rounded = _to_int8(weight.float() / self.scales.float().unsqueeze(1)).to(torch.int8)
        # The kernel reads whole groups of inputs without checking where they end.
        self.num_padding = -self.in_features % INT8_WIDTH_MULTIPLE
        self.weight = functional.pad(rounded, (0, self.num_padding))
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if self.num_padding:
            rows = functional.pad(rows, (0, self.num_padding))
        outputs = torch._weight_int8pack_mm(rows.contiguous(), self.weight, self.scales)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)


class Fp8Linear(nn.Module):
    """Linear layer with weights rounded to float8_e4m3fn, one scale per output, computed in bfloat16.

    It halves the memory. On a CPU they are converted to bfloat16 in every step, some outputs at a time, so one row
    takes several times as long as with packed bfloat16. Rows are computed in blocks of a fixed size, so that no kernel
    depends on their number. GPUs with fp8 products round the inputs too, row by row.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.scales = _scales(weight, "fp8")
        self.weight = _to_fp8(weight.float() / self.scales.float().unsqueeze(1)).to(torch.float8_e4m3fn)
        self.bias = linear.bias
        self._multiply = _multiply_fp8 if has_fp8_products(weight) else _multiply_widened

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        num_rows = rows.shape[0]
        if missing := -num_rows % FP8_ROWS:
            rows = functional.pad(rows, (0, 0, 0, missing))
        outputs = self._multiply(rows, self.weight, self.scales)[:num_rows]
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)


def has_fp8_products(weight: torch.Tensor) -> bool:
    """Whether the device of a weight multiplies its shape in fp8."""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < (8, 9):
        return False
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def _multiply_fp8(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies rows of inputs with weights of float8_e4m3fn and a scale per output.

    # [num_rows, in_features], [out_features, in_features], [out_features] -> [num_rows, out_features]
    """
    largest = rows.abs().amax(dim=1, keepdim=True).float()
    row_scales = (largest / FP8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return torch._scaled_mm(
        _to_fp8(rows.float() / row_scales).to(torch.float8_e4m3fn),
        weight.t(),
        scale_a=row_scales,
        scale_b=scales.float().unsqueeze(0),
        out_dtype=rows.dtype,
    )


def _multiply_widened(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Like `_multiply_fp8`, with unrounded inputs; rows are a multiple of FP8_ROWS."""
    outputs = rows.new_empty(rows.shape[0], weight.shape[0])
    num_outputs = max(FP8_WEIGHTS_AT_ONCE // weight.shape[1], 1)
    for first in range(0, weight.shape[0], num_outputs):
        part = slice(first, first + num_outputs)
        wide = _widened(weight[part])
        for begin in range(0, rows.shape[0], FP8_ROWS):
            some = slice(begin, begin + FP8_ROWS)
            outputs[some, part] = functional.linear(rows[some], wide)
    return outputs.mul_(scales)


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """Converts to bfloat16 with the same values, twenty times as fast as torch's own conversion on a CPU.

    Both types have the sign first, then the exponent, so the bits need only be shifted; the exponent biases differ by
    120.
    """
    bits = weight.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(4).bitwise_and_(-0x7810)  # keeps one of the bits that the sign was spread over
    return bits.view(torch.bfloat16).mul_(2.0**120)


def _to_int8(values: torch.Tensor) -> torch.Tensor:
    return values.round().clamp(-128, 127)


def _to_fp8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).float()


# The largest magnitudes that a weight may become, and the rounding of weights in units of their scale.
_ROUNDINGS: dict[str, tuple[tuple[float, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "int8": (INT8_LARGEST, _to_int8),
    "fp8": ((FP8_LARGEST,), _to_fp8),
}


def _scales(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """One scale per output, in the weights' own type.  # [out_features, in_features] -> [out_features]

    An output's largest weight becomes the largest value of the type. Weights of a checkpoint quantized to 8 bits
    already lie on a grid and keep it: its scale is the one that rounding leaves unchanged.
    """
    largest, rounding = _ROUNDINGS[quantization]
    maxima = weight.abs().amax(dim=1).float()
    smallest = torch.finfo(weight.dtype).tiny
    scales = (maxima / largest[0]).clamp_min(smallest).to(weight.dtype)
    sample = weight[:, :GRID_SAMPLE]
    is_found = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
    for each in largest:
        near = (maxima / each).clamp_min(smallest).to(weight.dtype)
        upper, lower = torch.nextafter(near, near * 2), torch.nextafter(near, near / 2)
        for scale in (near, upper, lower):  # the maximum was itself rounded
            step = scale.float().unsqueeze(1)
            fits = ((rounding(sample.float() / step) * step).to(weight.dtype) == sample).all(dim=1) & ~is_found
            scales, is_found = torch.where(fits, scale, scales), is_found | fits
    return scales


def rounded(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """The weights as `Int8Linear` or `Fp8Linear` stores them, in float32.  # [out_features, in_features]"""
    scales = _scales(weight, quantization).float().unsqueeze(1)
    return _ROUNDINGS[quantization][1](weight.float() / scales) * scales
