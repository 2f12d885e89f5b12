"""Attention over the paged KV cache, registered with transformers as `outrider`.

A step is flat: all sequences' new tokens side by side, `[1, num_tokens]`. `StepLayout` says, once per step and for
all layers, which cache slots the tokens write and which they may read. The arithmetic is batch-invariant by
construction (invariant I2, bit for bit):

- query rows are padded to a multiple of 8, so that a matrix product never takes a different kernel for few rows;
- the products over keys run in chunks of 64 keys, each of the same shape, added up in order; keys beyond the
  sequence are masked to probability zero, so that more padding adds exact zeros.

Nothing in a row's result then depends on how many rows or sequences share the step. (Padding for
`scaled_dot_product_attention` instead, as done elsewhere, holds on some processors only: on a Zen 5 core float32
results changed where the padded length crossed 256.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.engine.kv_cache import KVSequence

ATTENTION_NAME = "outrider"
ROWS_MULTIPLE = 8
KEYS_CHUNK = 64
MAX_ROWS_PER_CALL = 256
"""Longer query blocks are cut, to bound the score matrix."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """New tokens of one sequence: entries `[kv.length - num_rows, kv.length)` of its KV, already reserved.

    `positions` are given for hint trees, where an entry's index is not its position; `visible[i, j]` then says
    whether row `i` sees entry `tree_start + j`. Entries before `tree_start` are seen by every row.
    """

    kv: KVSequence
    num_rows: int
    positions: npt.NDArray[np.int64] | None = None  # [num_rows]
    tree_start: int = 0
    visible: npt.NDArray[np.bool_] | None = None  # [num_rows, kv.length - tree_start]
    key_positions: npt.NDArray[np.int64] | None = None  # [kv.length - tree_start]


@dataclass(slots=True)
class _Group:
    """Query blocks with the same padded number of rows, attended in one call."""

    row_index: torch.Tensor  # [num_seqs * rows] into the flat step; padding repeats row 0
    flat_index: torch.Tensor  # [num_real_rows] into num_seqs * rows
    real_rows: torch.Tensor  # [num_real_rows] into the flat step
    key_slots: torch.Tensor  # [num_seqs * keys]
    query_positions: torch.Tensor  # [num_seqs, rows]
    key_positions: torch.Tensor  # [num_seqs, keys]
    hidden: torch.Tensor  # [num_seqs, 1, 1, rows, keys], True where a row may not look
    num_seqs: int
    is_identity: bool  # one sequence without padding rows: no gather needed
    windows: dict[int, torch.Tensor] = field(default_factory=dict)

    def hidden_within(self, window: int | None) -> torch.Tensor:
        """The mask, with keys `window` or more positions back hidden as well."""
        if window is None:
            return self.hidden
        if window not in self.windows:
            too_far = self.query_positions[:, :, None] - self.key_positions[:, None, :] >= window
            self.windows[window] = self.hidden | too_far[:, None, None]
        return self.windows[window]


@dataclass(slots=True)
class StepLayout:
    """Where a step's tokens are written and what they see. Made once per step by `plan_step`."""

    write_slots: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [1, num_tokens]
    groups: list[_Group]
    caches: list[
        tuple[torch.Tensor, torch.Tensor]
    ]  # per layer: keys, values [num_slots, num_kv_heads, head_dim]
    num_calls: int = 0


def plan_step(blocks: Sequence[QueryBlock], caches: list[tuple[torch.Tensor, torch.Tensor]]) -> StepLayout:
    """Lays out one step over `blocks` in the given order."""
    write_slots, positions = [], []
    by_rows: dict[int, list[tuple[int, QueryBlock, int]]] = {}
    offset = 0
    for block in blocks:
        first = block.kv.length - block.num_rows
        write_slots.append(block.kv.slots(first, block.kv.length))
        positions.append(np.arange(first, block.kv.length) if block.positions is None else block.positions)
        for cut in range(0, block.num_rows, MAX_ROWS_PER_CALL):
            num_rows = min(MAX_ROWS_PER_CALL, block.num_rows - cut)
            padded = -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
            by_rows.setdefault(padded, []).append((offset, block, cut))
        offset += block.num_rows
    groups = [_plan_group(rows, members, offset) for rows, members in by_rows.items()]
    return StepLayout(
        write_slots=torch.from_numpy(np.concatenate(write_slots)),
        positions=torch.from_numpy(np.concatenate(positions)).unsqueeze(0),
        groups=groups,
        caches=caches,
    )


def _plan_group(rows: int, members: list[tuple[int, QueryBlock, int]], num_tokens: int) -> _Group:
    longest = max(block.kv.length for _, block, _ in members)
    keys = -(-longest // KEYS_CHUNK) * KEYS_CHUNK
    num_seqs = len(members)
    row_index = np.zeros((num_seqs, rows), dtype=np.int64)
    key_slots = np.zeros((num_seqs, keys), dtype=np.int64)
    query_positions = np.zeros((num_seqs, rows), dtype=np.int64)
    key_positions = np.zeros((num_seqs, keys), dtype=np.int64)
    hidden = np.ones((num_seqs, rows, keys), dtype=np.bool_)
    hidden[:, :, 0] = False  # padding rows must see something, or their softmax is not a number
    is_real = np.zeros((num_seqs, rows), dtype=np.bool_)
    for i, (offset, block, cut) in enumerate(members):
        length = block.kv.length
        first = length - block.num_rows
        count = min(rows, block.num_rows - cut)
        row_index[i, :count] = np.arange(offset + cut, offset + cut + count)
        is_real[i, :count] = True
        key_slots[i, :length] = block.kv.slots(0, length)
        key_positions[i, :length] = np.arange(length)
        if block.visible is None:
            entries = np.arange(first + cut, first + cut + count)
            query_positions[i, :count] = (
                entries if block.positions is None else block.positions[cut : cut + count]
            )
            hidden[i, :count, :length] = np.arange(length)[None, :] > entries[:, None]
        else:
            assert block.positions is not None
            assert block.key_positions is not None
            query_positions[i, :count] = block.positions[cut : cut + count]
            key_positions[i, block.tree_start : length] = block.key_positions
            hidden[i, :count, : block.tree_start] = False
            hidden[i, :count, block.tree_start : length] = ~block.visible[cut : cut + count]
    return _Group(
        row_index=torch.from_numpy(row_index.reshape(-1)),
        flat_index=torch.from_numpy(np.flatnonzero(is_real)),
        real_rows=torch.from_numpy(row_index[is_real]),
        key_slots=torch.from_numpy(key_slots.reshape(-1)),
        query_positions=torch.from_numpy(query_positions),
        key_positions=torch.from_numpy(key_positions),
        hidden=torch.from_numpy(hidden)[:, None, None],
        num_seqs=num_seqs,
        is_identity=num_seqs == 1 and bool(is_real.all()) and num_tokens == rows,
    )


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    outrider_layout: StepLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer; returns `[1, num_tokens, num_heads, head_dim]`."""
    if unused.get("s_aux") is not None:
        raise UnsupportedAttentionError("attention sinks (s_aux)")
    keys, values = outrider_layout.caches[module.layer_idx]  # type: ignore[index]
    keys.index_copy_(0, outrider_layout.write_slots, key[0].transpose(0, 1))
    values.index_copy_(0, outrider_layout.write_slots, value[0].transpose(0, 1))
    outrider_layout.num_calls += 1
    flat_query = query[0].transpose(0, 1)  # [num_tokens, num_heads, head_dim]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: torch.Tensor | None = None
    for group in outrider_layout.groups:
        rows = flat_query if group.is_identity else flat_query.index_select(0, group.row_index)
        attended = _attend(rows, keys, values, group, scale, sliding_window, softcap)
        if group.is_identity:
            return attended.unsqueeze(0), None
        real = attended.index_select(0, group.flat_index)
        if len(outrider_layout.groups) == 1:
            return real.unsqueeze(0), None
        if output is None:
            output = torch.empty_like(flat_query)
        output.index_copy_(0, group.real_rows, real)
    assert output is not None
    return output.unsqueeze(0), None


def _attend(
    query: torch.Tensor,  # [num_seqs * rows, num_heads, head_dim]
    keys: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
    values: torch.Tensor,
    group: _Group,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of every row over its own sequence; `[num_seqs * rows, num_heads, head_dim]`."""
    num_seqs = group.num_seqs
    rows = query.shape[0] // num_seqs
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads = keys.shape[1]
    share = num_heads // num_kv_heads
    num_keys = group.key_slots.shape[0] // num_seqs
    num_chunks = num_keys // KEYS_CHUNK

    # Query heads that share a KV head become rows of one product: [num_seqs * num_kv_heads, share * rows, head_dim].
    folded = query.view(num_seqs, rows, num_kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_seqs * num_kv_heads, share * rows, head_dim)
    own_keys = keys.index_select(0, group.key_slots).view(num_seqs, num_keys, num_kv_heads, head_dim)
    own_keys = own_keys.permute(0, 2, 3, 1).reshape(num_seqs * num_kv_heads, head_dim, num_keys)
    own_values = values.index_select(0, group.key_slots).view(num_seqs, num_keys, num_kv_heads, head_dim)
    own_values = own_values.transpose(1, 2).reshape(
        num_seqs * num_kv_heads * num_chunks, KEYS_CHUNK, head_dim
    )

    scores = torch.bmm(folded, own_keys).float().mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(num_seqs, num_kv_heads, share, rows, num_keys)
    scores.masked_fill_(group.hidden_within(window), float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    weights = weights.view(num_seqs * num_kv_heads, share * rows, num_chunks, KEYS_CHUNK).transpose(1, 2)
    weights = weights.reshape(num_seqs * num_kv_heads * num_chunks, share * rows, KEYS_CHUNK)
    parts = torch.bmm(weights, own_values).view(num_seqs * num_kv_heads, num_chunks, share * rows, head_dim)
    total = parts[:, 0]
    if num_chunks > 1:
        total = total.float()
        for chunk in range(1, num_chunks):
            total = total + parts[:, chunk]
        total = total.to(query.dtype)
    total = total.view(num_seqs, num_kv_heads, share, rows, head_dim).permute(0, 3, 1, 2, 4)
    return total.reshape(num_seqs * rows, num_heads, head_dim)


class UnsupportedAttentionError(Exception):
    """The model asks its attention for something that the engine does not do."""


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """transformers builds no mask: `StepLayout` holds it."""


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
