"""Between the host and the device that computes logits; nothing else in this package waits for the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

NOTHING = torch.empty(0)
"""Stands for a part that there is not; made once, for a step may need several."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. Nobody waits: the copy is queued like any other operation."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def filled(values: Sequence[Any], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """Python's numbers as a tensor on the device, likewise."""
    return to_device(np.array(values, dtype=dtype), device)


def to_host(parts: Sequence[torch.Tensor]) -> list[list[float]]:
    """The elements of each part, flattened, in one transfer: the host waits once.

    Several parts travel as float64, which has every float32 and every token id.
    """
    if len(parts) == 1 and parts[0].numel():
        return [parts[0].reshape(-1).tolist()]
    sizes = [part.numel() for part in parts]
    present = [part for part in parts if part.numel()]
    if len(present) > 1:
        flat = torch.cat([part.reshape(-1).double() for part in present]).tolist()
    else:
        flat = present[0].reshape(-1).tolist() if present else []
    ends = itertools.accumulate(sizes)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]
