"""Logits of reference code that cannot be imported here, stored by the scripts beside this module."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FILE: Final = Path(__file__).parent / "reference_logits.safetensors"


def store(source: str, about: str, logits: dict[str, torch.Tensor]) -> None:
    """Replaces what a source stored. about: its version and the command."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    if FILE.is_file():
        tensors, metadata = load_file(FILE), sources()
    tensors = {name: each for name, each in tensors.items() if not name.startswith(f"{source}/")}
    tensors |= {f"{source}/{name}": each.detach().float().contiguous() for name, each in logits.items()}
    save_file(tensors, FILE, metadata=metadata | {source: about})


def sources() -> dict[str, str]:
    """The version of every source."""
    with safe_open(FILE, "pt") as file:
        return dict(file.metadata())


def logits(source: str, name: str) -> torch.Tensor:
    """The logits that a source stored for a case."""
    return load_file(FILE)[f"{source}/{name}"]
