"""Linear layers whose every output row has the same bits in any batch (invariant I2).

A plain matrix product chooses its kernel, and with it the order of its sums, by the number of rows. Each form below
avoids that for some shapes on some processors; none does for all. So the engine measures at load: for each weight
shape, `choose_form` takes the fastest form whose rows agree bit for bit with a single row on this machine.

Observed (AMX and Zen 5 cores, torch 2.13): bfloat16 weights packed once by oneDNN for one row agree while the input is
at most 1024 wide, are at least as fast as a plain product (twice as fast at one row on Zen 5), and disagree for wider
inputs, which are therefore split. float32 agrees when rows are padded to a multiple of 8 or 16, on AMX cores only in
blocks of 16 rows where inputs are 1024 wide or more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from outrider.engine.compiled.kernels import GROUP, Matrix, Products, has_onednn_products, products
from outrider.engine.layers.plain_linear import linear_of
from outrider.engine.layers.quantized_linear import Fp8Linear, Int8Linear, rounded
from outrider.engine.layers.shards import GatheredLinear, SummedLinear

MAX_ROWS_TRIED = 512
ROW_COUNTS_TRIED = (
    *(2, 3, 4, 6, 7, 8, 9, 13, 16, 17, 31, 33, 48, 64, 65, 96, 129, 192, 257, 384),
    MAX_ROWS_TRIED,
)
MAX_PACKED_WIDTH = 1024
"""Wider inputs were seen to be summed in an order that depends on the number of rows."""
BLOCK_ROWS_TRIED = (16, 32, 64, 128, 256)
COST_OF_PADDING_MAX = 1.05
NUM_TIMINGS = 5
WEIGHTS_DRAWN_AT_ONCE = 1 << 20
CACHE_BYTES = 256 << 20
NARROW_MULTIPLE = 8
"""A step's rows are a multiple of 8, so that many outputs fill whole vectors."""


class CompiledLinear(nn.Module):
    """Linear layer with bfloat16 weights in the order in which our own product reads them (`decode.cpp`).

    It takes inputs of any width, and multiplies with `found`, by default this processor's products. On Zen 5 a step of
    the grown demo target takes, with oneDNN's products instead, 1.3 times as long for one row, 1.8 for 8, 1.4 for 32
    and 1.1 for 512 (`python -m benchmarks step_cost --grown`).
    """

    def __init__(self, linear: nn.Linear, found: Products | None = None) -> None:
        super().__init__()
        found = found or products()
        assert found is not None
        self._multiply = found.multiply
        num_outputs, num_inputs = linear.weight.shape
        num_groups = -(-num_outputs // GROUP)
        padded = functional.pad(linear.weight.detach(), (0, 0, 0, num_groups * GROUP - num_outputs))
        # [num_groups, num_inputs / 2, GROUP, 2]
        self.weight = padded.view(num_groups, GROUP, num_inputs // 2, 2).transpose(1, 2).contiguous()
        self.bias = linear.bias
        bias_at = None if linear.bias is None else linear.bias.data_ptr()
        self.matrix = Matrix(self.weight.data_ptr(), bias_at, num_inputs, num_outputs, found.instructions)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.new_empty(*inputs.shape[:-1], self.matrix.num_outputs)
        self.multiply(inputs.contiguous(), outputs)
        return outputs

    def multiply(self, inputs: torch.Tensor, outputs: torch.Tensor, num_threads: int | None = None) -> None:
        """Fills `outputs`; both contiguous and bfloat16. # [num_rows, in_features], [num_rows, out_features]"""
        num_rows = inputs.numel() // self.matrix.num_inputs
        self._multiply(
            *(ctypes.addressof(self.matrix), inputs.data_ptr(), outputs.data_ptr()),
            *(num_rows, num_threads or torch.get_num_threads()),
        )


class PackedLinear(nn.Module):
    """Linear layer with weights packed by oneDNN for one row; inputs wider than `max_width` are split and partial
    products added."""

    def __init__(self, linear: nn.Linear, max_width: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        num_parts = -(-linear.in_features // max_width)
        self.width = -(-linear.in_features // num_parts)  # parts of equal size, except perhaps the last
        pack = torch.ops.mkldnn._reorder_linear_weight
        weight = linear.weight.detach()
        self.parts = [pack(part.contiguous(), 1) for part in weight.split(self.width, dim=1)]
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        apply = torch.ops.mkldnn._linear_pointwise
        if len(self.parts) == 1:
            return apply(inputs, self.parts[0], self.bias, "none", [], "")
        pieces = inputs.split(self.width, dim=-1)
        total = apply(pieces[0].contiguous(), self.parts[0], self.bias, "none", [], "")
        for piece, part in zip(pieces[1:], self.parts[1:], strict=True):
            # The partial sum is added before rounding, inside the product's own epilogue.
            total = apply.binary(piece.contiguous(), total, part, None, "add")
        return total


class PaddedLinear(nn.Module):
    """Plain product over rows padded to a multiple of `multiple`.

    In blocks so many rows are multiplied at a time, so that the kernel never depends on the number of rows.
    """

    def __init__(self, linear: nn.Linear, multiple: int, *, in_blocks: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.multiple, self.in_blocks = (
            linear.weight,
            linear.bias,
            multiple,
            in_blocks,
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        num_rows = rows.shape[0]
        if missing := -num_rows % self.multiple:
            rows = functional.pad(rows, (0, 0, 0, missing))
        blocks = rows.split(self.multiple) if self.in_blocks else (rows,)
        parts = [functional.linear(block, self.weight, self.bias) for block in blocks]
        outputs = (parts[0] if len(parts) == 1 else torch.cat(parts))[:num_rows]
        return outputs.view(*inputs.shape[:-1], self.out_features)


class NarrowOutput(nn.Module):
    """Linear layer with very few outputs, such as the gate of a shared expert.

    Element-wise functions of them, such as a sigmoid, are vectorized but for a remainder at the end, which may round
    differently; where it begins would depend on the number of rows. A view with gaps is never vectorized.
    """

    def __init__(self, linear: nn.Module, num_outputs: int) -> None:
        super().__init__()
        self.linear, self.num_outputs = linear, num_outputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs)
        return functional.pad(outputs, (0, NARROW_MULTIPLE))[..., : self.num_outputs]


@dataclass(frozen=True, slots=True)
class LinearForm:
    """A way to compute a linear layer, by name."""

    name: str
    build: Callable[[nn.Linear], nn.Module]


COMPILED_FORMS = (LinearForm("compiled", CompiledLinear),)
PACKED_FORMS = (
    LinearForm("packed", lambda linear: PackedLinear(linear, MAX_PACKED_WIDTH)),
    LinearForm("packed, cut at 512", lambda linear: PackedLinear(linear, 512)),
    LinearForm("packed, cut at 256", lambda linear: PackedLinear(linear, 256)),
)
PLAIN_FORMS = (
    LinearForm("plain", lambda linear: linear),
    LinearForm("padded to 8 rows", lambda linear: PaddedLinear(linear, 8)),
    LinearForm("padded to 16 rows", lambda linear: PaddedLinear(linear, 16)),
    LinearForm("padded to 32 rows", lambda linear: PaddedLinear(linear, 32)),
    LinearForm("blocks of 16 rows", lambda linear: PaddedLinear(linear, 16, in_blocks=True)),
)


INT8_FORMS = (LinearForm("int8", Int8Linear),)
FP8_FORMS = (LinearForm("fp8", Fp8Linear),)
QUANTIZED_FORMS = {"int8": INT8_FORMS, "fp8": FP8_FORMS}


def forms_for(weight: torch.Tensor, quantization: str = "none") -> Sequence[LinearForm]:
    """The forms to try for a weight, fastest first."""
    if quantization in QUANTIZED_FORMS:
        return QUANTIZED_FORMS[quantization]
    if weight.device.type == "cuda":
        num_rows = _rows_at_no_cost(weight)
        name = f"blocks of {num_rows} rows"
        return (LinearForm(name, lambda linear: PaddedLinear(linear, num_rows, in_blocks=True)),)
    forms: list[LinearForm] = []
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        if products() is not None and weight.shape[1] % 2 == 0:
            forms += COMPILED_FORMS
        if has_onednn_products():
            forms += PACKED_FORMS
    return (*forms, *PLAIN_FORMS)


@torch.inference_mode()
def _rows_at_no_cost(weight: torch.Tensor) -> int:
    """The largest of BLOCK_ROWS_TRIED that a GPU multiplies in about the time of the smallest.

    Reading the weights takes most of the time, so padding rows are free up to some number, and blocks of prompts should
    be that large.
    """
    num_copies = -(-CACHE_BYTES // (weight.numel() * weight.element_size()))
    copies = [torch.randn_like(weight) for _ in range(num_copies)]  # more than the device's cache holds
    best_ms: dict[int, float] = {}
    for num_rows in BLOCK_ROWS_TRIED:
        inputs = weight.new_zeros(num_rows, weight.shape[1])
        times = []
        for _ in range(NUM_TIMINGS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for copy in copies:
                functional.linear(inputs, copy)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        best_ms[num_rows] = min(times)
    limit = COST_OF_PADDING_MAX * best_ms[BLOCK_ROWS_TRIED[0]]
    return max(num_rows for num_rows in BLOCK_ROWS_TRIED if best_ms[num_rows] <= limit)


@torch.inference_mode()
def is_batch_invariant(form: LinearForm, linear: nn.Linear, row_counts: Sequence[int] = ROW_COUNTS_TRIED) -> bool:
    """Whether every output row of a layer like `linear` in this form has the bits it has alone, in any batch.

    Random inputs alone would not show it: rounding to bfloat16 hides most differences. So a second pair of weights and
    inputs cancels to zero in exact arithmetic, and what remains shows the order of the sums.
    """
    generator = torch.Generator().manual_seed(0)
    return all(
        _rows_agree(form.build(probe), inputs, row_counts)
        for probe, inputs in _probes(linear, max(row_counts), generator)
    )


def _probes(linear: nn.Linear, num_rows: int, generator: torch.Generator) -> Iterator[tuple[nn.Linear, torch.Tensor]]:
    """Layers of the same shape and type, with inputs [num_rows, in_features]: random ones, and ones that cancel."""
    out_features, width, dtype = linear.out_features, linear.in_features, linear.weight.dtype
    device = linear.weight.device
    yield linear, torch.randn(num_rows, width, generator=generator).to(device, dtype)
    half = width // 2
    order = torch.randperm(2 * half, generator=generator)
    # In parts: several copies of an output layer in float32 would need more memory than the rest of the model.
    weight = torch.zeros(out_features, width, dtype=dtype, device=device)
    for part in weight.split(max(WEIGHTS_DRAWN_AT_ONCE // width, 1)):
        a = torch.randn(part.shape[0], half, generator=generator)
        part[:, : 2 * half] = torch.cat([a, a], dim=1)[:, order]
    inputs = torch.zeros(num_rows, width)
    v = torch.randn(num_rows, half, generator=generator)
    inputs[:, : 2 * half] = torch.cat([v, -v], dim=1)[:, order]
    yield linear_of(weight), inputs.to(device, dtype)


def _rows_agree(module: nn.Module, inputs: torch.Tensor, row_counts: Sequence[int]) -> bool:
    alone = torch.cat([module(inputs[i : i + 1]) for i in range(max(row_counts))])
    return all(torch.equal(module(inputs[:count]), alone[:count]) for count in row_counts)


def choose_form(linear: nn.Linear, quantization: str = "none") -> tuple[LinearForm, bool]:
    """Returns the first form that is batch-invariant here and True, else the slowest form and False."""
    forms = forms_for(linear.weight, quantization)
    for form in forms:
        if is_batch_invariant(form, linear):
            return form, True
    return (PLAIN_FORMS if linear.weight.device.type == "cpu" and quantization == "none" else forms)[0], False


class LinearForms:
    """Builds linear layers in the form that is batch-invariant here, tested once per shape.

    `report` names the form by shape, `"OUTxIN" -> name`, with " (NOT batch-invariant)" where none is.
    """

    def __init__(self, quantization: str = "none") -> None:
        self._quantization = quantization
        self._chosen: dict[tuple[int, int, bool, str], LinearForm] = {}
        self.report: dict[str, str] = {}

    def build(self, linear: nn.Module, *, is_output: bool = False) -> nn.Module:
        """Builds a layer in its form; all but the output layer are quantized, because errors there go straight into the
        logits."""
        if isinstance(linear, SummedLinear | GatheredLinear):
            linear.linear = self.build(linear.linear, is_output=is_output)
            return linear
        assert isinstance(linear, nn.Linear)
        quantization = "none" if is_output else self._quantization
        shape = (linear.out_features, linear.in_features, linear.bias is not None, quantization)
        if shape not in self._chosen:
            self._chosen[shape], holds = choose_form(linear, quantization)
            label = f"{linear.out_features}x{linear.in_features}"
            self.report[label] = self._chosen[shape].name + ("" if holds else " (NOT batch-invariant)")
        return self._chosen[shape].build(linear)


@torch.inference_mode()
def round_weights(model: nn.Module, quantization: str, output_layer: nn.Module | None = None) -> None:
    """Rounds all weights that `LinearForms` will quantize, in place, to their quantized values.

    transformers then computes from them what the forms have to reproduce. Of a sharded model each rank rounds its own
    part, as it will quantize it.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module is not output_layer:
            weight = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
            weight.copy_(rounded(weight, quantization))


def make_batch_invariant(model: nn.Module, forms: LinearForms, output_layer: nn.Module | None = None) -> None:
    """Replaces every linear layer of `model`, in place, by the form for its shape.

    The original weights are released as their packed copies are made; tied weights stay, because the embedding needs
    them.
    """
    if isinstance(output_layer, GatheredLinear):
        output_layer = output_layer.linear
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):  # GPT-2's linear layers
                child = linear_of(child.weight.t().contiguous(), child.bias)
            if type(child) is nn.Linear:
                built = forms.build(child, is_output=child is output_layer)
                is_narrow = child.out_features % NARROW_MULTIPLE and child is not output_layer
                setattr(parent, name, NarrowOutput(built, child.out_features) if is_narrow else built)
