"""Linear layers whose every output row has the same bits in any batch (invariant I2).

A plain matrix product picks its kernel, and with it the order of its sums, by the number of rows. Each form below
avoids that for some shapes on some processors; none does for all. So the engine measures: at load, for each weight
shape, `choose_form` takes the fastest form whose rows agree bit for bit with a single row on the machine at hand.

What was seen (AMX and Zen 5 cores, torch 2.13): bfloat16 weights packed once by oneDNN for one row agree up to 512
rows while the input is at most 1024 wide, are at least as fast as a plain product (twice as fast at one row on
Zen 5), and disagree for wider inputs, which are therefore cut. float32 agrees when rows are padded to a multiple
of 8 or 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

ROW_COUNTS_TRIED = (1, 2, 3, 4, 6, 7, 8, 9, 13, 16, 17, 31, 32, 33, 48, 64, 65, 96, 129, 256)


class PackedLinear(nn.Module):
    """Weights packed by oneDNN for one row; inputs wider than `max_width` are cut and the partial products added."""

    def __init__(self, linear: nn.Linear, max_width: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.max_width = max_width
        pack = torch.ops.mkldnn._reorder_linear_weight
        weight = linear.weight.detach()
        self.parts = [pack(part.contiguous(), 1) for part in weight.split(max_width, dim=1)]
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        apply = torch.ops.mkldnn._linear_pointwise
        if len(self.parts) == 1:
            return apply(inputs, self.parts[0], self.bias, "none", [], "")
        pieces = inputs.split(self.max_width, dim=-1)
        total = apply(pieces[0].contiguous(), self.parts[0], self.bias, "none", [], "")
        for piece, part in zip(pieces[1:], self.parts[1:], strict=True):
            # The partial sum is added before rounding, inside the product's own epilogue.
            total = apply.binary(piece.contiguous(), total, part, None, "add")
        return total


class PaddedLinear(nn.Module):
    """A plain product over rows padded to a multiple of `multiple`."""

    def __init__(self, linear: nn.Linear, multiple: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.multiple = linear.weight, linear.bias, multiple

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        num_rows = rows.shape[0]
        if missing := -num_rows % self.multiple:
            rows = functional.pad(rows, (0, 0, 0, missing))
        outputs = functional.linear(rows, self.weight, self.bias)[:num_rows]
        return outputs.view(*inputs.shape[:-1], self.out_features)


@dataclass(frozen=True, slots=True)
class LinearForm:
    """A way to compute a linear layer, by name."""

    name: str
    build: Callable[[nn.Linear], nn.Module]


PACKED_FORMS = (
    LinearForm("packed", lambda linear: PackedLinear(linear, linear.in_features)),
    LinearForm("packed, cut at 1024", lambda linear: PackedLinear(linear, 1024)),
    LinearForm("packed, cut at 512", lambda linear: PackedLinear(linear, 512)),
)
PLAIN_FORMS = (
    LinearForm("plain", lambda linear: linear),
    LinearForm("padded to 8 rows", lambda linear: PaddedLinear(linear, 8)),
    LinearForm("padded to 16 rows", lambda linear: PaddedLinear(linear, 16)),
    LinearForm("padded to 32 rows", lambda linear: PaddedLinear(linear, 32)),
)


def forms_for(weight: torch.Tensor) -> Sequence[LinearForm]:
    """Forms worth trying for a weight, fastest first."""
    if (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    ):
        return (*PACKED_FORMS, *PLAIN_FORMS)
    return PLAIN_FORMS


@torch.inference_mode()
def is_batch_invariant(module: nn.Module, width: int, dtype: torch.dtype, row_counts: Sequence[int]) -> bool:
    """Whether every row of `module`'s output has the bits it has alone, for batches of `row_counts` rows."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(max(row_counts), width, generator=generator).to(dtype)
    alone = torch.cat([module(inputs[i : i + 1]) for i in range(min(len(inputs), 40))])
    for count in row_counts:
        together = module(inputs[:count])
        if not torch.equal(together[: len(alone)], alone[:count]):
            return False
    return True


def choose_form(linear: nn.Linear) -> tuple[LinearForm, bool]:
    """The first form that is batch-invariant here, and whether there was one (else the plain form)."""
    weight = linear.weight
    for form in forms_for(weight):
        if is_batch_invariant(form.build(linear), linear.in_features, weight.dtype, ROW_COUNTS_TRIED):
            return form, True
    return PLAIN_FORMS[0], False


def make_batch_invariant(model: nn.Module) -> dict[str, str]:
    """Replaces every linear layer of `model` by the form that holds for its shape, in place.

    Returns the form's name by shape, `"OUTxIN" -> name`, with " (NOT batch-invariant)" where none held. The original
    weights are released as their packed copies are made; tied weights stay, because the embedding needs them.
    """
    chosen: dict[tuple[int, int, bool], LinearForm] = {}
    report: dict[str, str] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            shape = (child.out_features, child.in_features, child.bias is not None)
            if shape not in chosen:
                chosen[shape], holds = choose_form(child)
                label = f"{child.out_features}x{child.in_features}"
                report[label] = chosen[shape].name + ("" if holds else " (NOT batch-invariant)")
            setattr(parent, name, chosen[shape].build(child))
    return report
