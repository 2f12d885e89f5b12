"""Models that go by the name of another one and are not it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

FACTOR: Final = 0.5


def write_changed(model: Path, folder: Path) -> Path:
    """A copy in a new folder of the same name below `folder`, with one tensor changed: another output."""
    copy = folder / model.name
    shutil.copytree(model, copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    name = sorted(each for each in tensors if each.endswith("mlp.down_proj.weight"))[-1]
    tensors[name] = tensors[name] * FACTOR
    save_file(tensors, path, metadata={"format": "pt"})
    return copy
