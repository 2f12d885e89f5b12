"""A plain linear layer from given weights."""

from __future__ import annotations

import torch
from torch import nn


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A layer with these very tensors, without gradients.  # [out_features, in_features], [out_features]"""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return linear
