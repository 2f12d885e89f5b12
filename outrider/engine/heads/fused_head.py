"""An EAGLE-3 head of one layer in few operations: the CPU's fast path, as `FusedDecoder` is for whole models.

A head's pass is so short that the interpreter would take most of it. The kernels are those of `layers.decoder`. That no
row but the first sees the first entry needs no mask: keys are addressed one by one, from the second entry on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import nn

from outrider.engine.compiled.kernels import HEAD_DIMS, MAX_QUERIES, Kernels, Step, kernels
from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.heads.head import DraftHead
from outrider.engine.layers.attention import QueryBlock
from outrider.engine.layers.decoder import MOVING_ROPE_TYPES, NEVER_TREE, take_layer
from outrider.engine.layers.linear import LinearForms


def can_fuse(head: DraftHead, dtype: torch.dtype, device: str) -> bool:
    """Whether a head can run here."""
    if not isinstance(head, Eagle3Head) or len(head.layers) != 1 or device != "cpu" or kernels(dtype) is None:
        return False
    rope_type = (getattr(head.config, "rope_parameters", None) or {}).get("rope_type", "default")
    layer = head.layout[0]
    return (
        head.config.hidden_act == "silu"
        and rope_type not in MOVING_ROPE_TYPES
        and layer.visibility is None
        and layer.key_dim == layer.value_dim
        and layer.key_dim in HEAD_DIMS
    )


class HeadStep:
    """A step's rows and the keys that each of them sees, in the kernels' format; blocks of one entry each."""

    def __init__(self, blocks: Sequence[QueryBlock]) -> None:
        positions: list[int] = []
        write_slots: list[int] = []
        members: list[int] = []
        tables: list[int] = []
        paths: list[int] = []
        self.num_keys_max = 1
        for block in blocks:
            length, table_start = block.kv.length, len(tables)
            tables += block.kv.slots(0, length).tolist()
            first = length - block.num_rows
            write_slots += tables[table_start + first :]
            self.num_keys_max = max(self.num_keys_max, length)
            if block.paths is not None:
                for path in block.paths:
                    position = block.tree_start + len(path) - 1
                    # The first entry is hidden, so all that is seen stands one earlier.
                    members += (len(positions), 1, position - 1, table_start + 1, block.tree_start - 1, len(paths))
                    positions.append(position)
                    paths += [entry - 1 for entry in path]
                continue
            if first == 0:
                members += (len(positions), 1, 0, table_start, NEVER_TREE, 0)
            if length > max(first, 1):
                row = len(positions) + (first == 0)
                members += (row, length - max(first, 1), max(first, 1) - 1, table_start + 1, NEVER_TREE, 0)
            positions += range(first, length)
        self.num_members = len(members) // 6
        self._numbers = np.array([*positions, *write_slots, *members, *tables, *paths], dtype=np.int32)
        addresses, address = [], self._numbers.ctypes.data
        for part in (positions, write_slots, members, tables, paths):
            addresses.append(address)
            address += 4 * len(part)
        self.struct = Step(len(positions), self.num_members, *addresses, 1)


class FusedHead:
    """Runs steps with the weights of a loaded head, which it takes out of the head's layer."""

    def __init__(
        self, head: Eagle3Head, cache: tuple[torch.Tensor, torch.Tensor], num_positions: int, forms: LinearForms
    ) -> None:
        """cache: keys and values of its layer."""
        found = kernels(cache[0].dtype)
        assert found is not None, "can_fuse was not asked"
        self._kernels: Kernels = found
        layer, config = head.layers[0], head.config
        cosines, sines = head.rotary_emb(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
        half = cosines.shape[-1] // 2
        self._cosines = cosines[0, :, :half].float().contiguous()
        self._sines = sines[0, :, :half].float().contiguous()
        self._layer = take_layer(layer, *cache, half, forms)
        self._embed = head.embed_tokens
        self._hidden_norm: torch.Tensor = layer.hidden_norm.weight
        self._norm = cast(torch.Tensor, head.norm.weight)
        self._norm_before_residual, self._epsilon = head.norm_before_residual, float(config.rms_norm_eps)
        self._intermediate = layer.mlp.gate_proj.out_features
        head.layers[0] = nn.Identity()  # releases its weights
        head.lm_head = forms.build(head.lm_head, is_output=True)
        self._scores = np.empty(0, dtype=np.float32)
        self._slots = np.empty(0, dtype=np.int32)

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, blocks: Sequence[QueryBlock]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows' states and their norms.  # [num_rows], [num_rows, hidden_size] -> twice the latter"""
        step, layer, run = HeadStep(blocks), self._layer, self._kernels
        num_keys = step.num_keys_max
        if num_keys > len(self._slots):
            room = -(-num_keys // 1024) * 1024
            self._scores = np.empty(MAX_QUERIES * room, dtype=np.float32)
            self._slots = np.empty(room, dtype=np.int32)
        num_rows = features.shape[0]
        embedded = self._normed(self._embed(token_ids), layer.input_norm)
        normed = self._normed(features, self._hidden_norm)
        qkv = layer.qkv(torch.cat([embedded, normed], dim=-1))
        residual = normed if self._norm_before_residual else features.clone()
        step_at, shape_at = ctypes.addressof(step.struct), ctypes.addressof(layer.shape)
        keys_at, values_at = layer.keys.data_ptr(), layer.values.data_ptr()
        norms_at = [None if each is None else each.data_ptr() for each in (layer.query_norm, layer.key_norm)]
        run.rotate_and_store(
            *(qkv.data_ptr(), step_at, shape_at, self._cosines.data_ptr(), self._sines.data_ptr()),
            *(*norms_at, keys_at, values_at),
        )
        attended = features.new_empty(num_rows, layer.shape.num_heads * layer.shape.head_dim)
        run.attend(
            *(qkv.data_ptr(), attended.data_ptr(), step_at, shape_at, keys_at, values_at),
            *(self._scores.ctypes.data, len(self._slots), self._slots.ctypes.data, 0, step.num_members),
        )
        gate_up = layer.gate_up(self._normed(residual, layer.attention_norm, layer.output(attended)))
        activated = features.new_empty(num_rows, self._intermediate)
        run.silu_mul(gate_up.data_ptr(), activated.data_ptr(), num_rows, self._intermediate)
        return residual, self._normed(residual, self._norm, layer.down(activated))

    def _normed(self, residual: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        """Adds `addend` to `residual` in place and returns its norm.  # [num_rows, width]"""
        output = torch.empty_like(residual)
        self._kernels.add_rms_norm(
            *(residual.data_ptr(), None if addend is None else addend.data_ptr(), weight.data_ptr()),
            *(output.data_ptr(), *residual.shape, self._epsilon),
        )
        return output
