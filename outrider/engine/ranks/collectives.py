"""Sums over the ranks of a tensor-parallel group whose bits do not depend on the batch (invariant I2).

An all-reduce over three ranks or more splits the tensor into pieces and sums each in another order of ranks, and the
split depends on the tensor's size: with gloo, every number of rows but one changed the bits of a row. Gathering the
parts and adding them in the order of ranks gives every element the same sum. It moves as many parts as there are ranks
where an all-reduce moves two: little for the few rows of a decode step, and for prompts the price of exactness.
"""

from __future__ import annotations

import torch
from torch import distributed


def sum_over_ranks(part: torch.Tensor, group: distributed.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of every rank's `part`, the same bits on all ranks; added in float32, returned in the part's type."""
    parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, part.contiguous(), group)
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other.float()
    return total.to(part.dtype)
