"""Hidden states of a model, kept for each KV entry: what draft heads read of their target.

Heads such as EAGLE's (2401.15077, 2503.01840), Medusa's (2401.10774) and MTP layers (2412.19437) draft from states
that the target computes anyway. States are numbered as transformers numbers `hidden_states`: i enters layer i, and the
last one has passed the final norm. A head may shorten them at once (EAGLE-3's `fc`), so that one *feature* vector is
kept for an entry, beside its keys and values and for as long as these: of shared prefixes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Project = Callable[[torch.Tensor], torch.Tensor]
"""Turns tapped states into features.  # [num_rows, num_taps * width] -> [num_rows, size]"""


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """The states of a model that are kept, and in what form."""

    layer_ids: tuple[int, ...]
    size: int  # of a feature
    project: Project | None = None  # None: the states side by side are the feature

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """Maps tapped states.  # [num_rows, num_taps, width] -> [num_rows, size]"""
        joined = tapped.flatten(1)
        return joined if self.project is None else self.project(joined)


def packed(features: torch.Tensor, slots: npt.NDArray[np.int64]) -> bytes:
    """Features as they travel: bfloat16 in little-endian order.  # [num_slots, size], [n]"""
    chosen = features.index_select(0, torch.from_numpy(slots).to(features.device))
    return chosen.to(device="cpu", dtype=torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False).tobytes()


def unpacked(data: bytes, size: int) -> torch.Tensor:
    """Reads what `packed` made.  # [n, size] bfloat16"""
    numbers = np.frombuffer(data, dtype="<i2").astype(np.int16)
    return torch.from_numpy(numbers).view(torch.bfloat16).view(-1, size)


class ModuleTaps:
    """Copies states out of transformers' modules while they run."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        """Raises ValueError where the model has no such layer."""
        body, layers = decoder_layers(model)
        self._states: dict[int, torch.Tensor] = {}
        self._layer_ids = tuple(layer_ids)
        for layer_id in set(layer_ids):
            if not 0 <= layer_id <= len(layers):
                raise ValueError(f"the model has {len(layers)} layers, so no state {layer_id}")
            if layer_id < len(layers):
                layers[layer_id].register_forward_pre_hook(self._entering(layer_id), with_kwargs=True)
            else:
                body.register_forward_hook(self._leaving(layer_id))

    def _entering(self, layer_id: int) -> Callable[..., None]:
        def keep(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._states[layer_id] = arguments[0] if arguments else named["hidden_states"]

        return keep

    def _leaving(self, layer_id: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
            self._states[layer_id] = output[0]

        return keep

    def take(self) -> torch.Tensor:
        """The states of the last forward pass.  # [num_rows, num_taps, width]"""
        found = torch.stack([self._states[layer_id][0] for layer_id in self._layer_ids], dim=1)
        self._states.clear()
        return found


def decoder_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs a model's layers, and these. Raises ValueError where there is none."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise ValueError(f"{type(model).__name__} has no list of {count} layers")
