"""Attention over the paged KV cache, registered with transformers as `outrider`.

A step is flat: all sequences' new tokens side by side, `[1, num_tokens]`. `StepLayout` says, once per step and for
all layers, which cache slots the tokens write and which they may read. The arithmetic is batch-invariant by
construction (invariant I2, bit for bit):

- query rows are padded to a multiple of 8, so that a matrix product never takes a different kernel for few rows;
- sums over keys (weights times values) run in chunks of 64 keys, each of the same shape, added up in order; keys
  beyond the sequence have weight zero, so that more padding adds exact zeros. A score is a sum over head_dim, which
  is the same everywhere; only how many scores stand side by side differs.

Nothing in a row's result then depends on how many rows or sequences share the step; a self-test at start checks it
(`model.batch_invariance_failures`). (Padding for
`scaled_dot_product_attention` instead, as done elsewhere, holds on some processors only: on a Zen 5 core float32
results changed where the padded length crossed 256.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    Rows of plain text see every entry up to their own. Nodes of a hint tree give `paths`: for each row, root first,
    the entries that it sees beyond the first `tree_start` (which are text): its ancestors' and its own. The place of
    an entry among those that a row sees is its position, so a node's arithmetic is that of the same text in a line.
    """

    kv: KVSequence
    num_rows: int
    tree_start: int = 0
    paths: Sequence[Sequence[int]] | None = None  # [num_rows][...]


@dataclass(frozen=True, slots=True)
class _Member:
    """Rows at consecutive positions that read the same keys, each up to its own position."""

    first_row: int  # in the flat step
    num_rows: int
    first_position: int
    key_slots: npt.NDArray[np.int64]  # by position


@dataclass(slots=True)
class _Group:
    """Members with the same padded number of rows, attended in one call."""

    row_index: torch.Tensor  # [num_members * rows] into the flat step; padding repeats row 0
    flat_index: torch.Tensor  # [num_real_rows] into num_members * rows
    real_rows: torch.Tensor  # [num_real_rows] into the flat step
    key_slots: torch.Tensor  # [num_members * keys]
    query_positions: torch.Tensor  # [num_members, rows]
    hidden: torch.Tensor  # [num_members, 1, 1, rows, keys], True where a row may not look
    num_members: int
    is_identity: bool  # one member without padding rows: no gather needed
    windows: dict[int, torch.Tensor] = field(default_factory=dict)

    def hidden_within(self, window: int | None) -> torch.Tensor:
        """The mask, with keys `window` or more positions back hidden as well."""
        if window is None:
            return self.hidden
        if window not in self.windows:
            key_positions = torch.arange(self.hidden.shape[-1])
            too_far = self.query_positions[:, :, None] - key_positions >= window
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
    write_slots = []
    positions: list[int] = []
    by_rows: dict[int, list[_Member]] = {}
    for block in blocks:
        slots = block.kv.slots(0, block.kv.length)
        write_slots.append(slots[block.kv.length - block.num_rows :])
        for member in _members(block, slots, first_row=len(positions)):
            padded = -(-member.num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
            by_rows.setdefault(padded, []).append(member)
            positions.extend(range(member.first_position, member.first_position + member.num_rows))
    groups = [_plan_group(rows, members, len(positions)) for rows, members in by_rows.items()]
    return StepLayout(
        write_slots=torch.from_numpy(np.concatenate(write_slots)),
        positions=torch.tensor([positions]),
        groups=groups,
        caches=caches,
    )


def _members(block: QueryBlock, slots: npt.NDArray[np.int64], first_row: int) -> Iterator[_Member]:
    """A block's rows in their order, as members."""
    if block.paths is None:
        first = block.kv.length - block.num_rows
        for cut in range(0, block.num_rows, MAX_ROWS_PER_CALL):
            num_rows = min(MAX_ROWS_PER_CALL, block.num_rows - cut)
            yield _Member(first_row + cut, num_rows, first + cut, slots[: first + cut + num_rows])
        return
    text = slots[: block.tree_start]
    for row, path in enumerate(block.paths):
        key_slots = np.concatenate([text, slots[path]])
        yield _Member(first_row + row, 1, len(key_slots) - 1, key_slots)


def _plan_group(rows: int, members: list[_Member], num_tokens: int) -> _Group:
    longest = max(len(member.key_slots) for member in members)
    keys = -(-longest // KEYS_CHUNK) * KEYS_CHUNK
    num_members = len(members)
    row_index = np.zeros((num_members, rows), dtype=np.int64)
    key_slots = np.zeros((num_members, keys), dtype=np.int64)
    # Padding rows stand at position 0: they must see something, or their softmax is not a number.
    query_positions = np.zeros((num_members, rows), dtype=np.int64)
    is_real = np.zeros((num_members, rows), dtype=np.bool_)
    for i, member in enumerate(members):
        count = member.num_rows
        row_index[i, :count] = np.arange(member.first_row, member.first_row + count)
        query_positions[i, :count] = np.arange(member.first_position, member.first_position + count)
        key_slots[i, : len(member.key_slots)] = member.key_slots
        is_real[i, :count] = True
    hidden = np.arange(keys) > query_positions[:, :, None]
    return _Group(
        row_index=torch.from_numpy(row_index.reshape(-1)),
        flat_index=torch.from_numpy(np.flatnonzero(is_real)),
        real_rows=torch.from_numpy(row_index[is_real]),
        key_slots=torch.from_numpy(key_slots.reshape(-1)),
        query_positions=torch.from_numpy(query_positions),
        hidden=torch.from_numpy(hidden)[:, None, None],
        num_members=num_members,
        is_identity=num_members == 1 and bool(is_real.all()) and num_tokens == rows,
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
    query: torch.Tensor,  # [num_members * rows, num_heads, head_dim]
    keys: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
    values: torch.Tensor,
    group: _Group,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of every row over its own keys; `[num_members * rows, num_heads, head_dim]`."""
    num_members = group.num_members
    rows = query.shape[0] // num_members
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads = keys.shape[1]
    share = num_heads // num_kv_heads
    num_keys = group.key_slots.shape[0] // num_members
    num_chunks = num_keys // KEYS_CHUNK

    # Query heads that share a KV head become rows of one product: [num_members * num_kv_heads, share * rows, head_dim].
    folded = query.view(num_members, rows, num_kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_members * num_kv_heads, share * rows, head_dim)
    own_keys = keys.index_select(0, group.key_slots).view(num_members, num_keys, num_kv_heads, head_dim)
    own_keys = own_keys.permute(0, 2, 3, 1).reshape(num_members * num_kv_heads, head_dim, num_keys)
    own_values = values.index_select(0, group.key_slots).view(num_members, num_keys, num_kv_heads, head_dim)
    own_values = own_values.transpose(1, 2).reshape(
        num_members * num_kv_heads * num_chunks, KEYS_CHUNK, head_dim
    )

    scores = torch.bmm(folded, own_keys).float().mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(num_members, num_kv_heads, share, rows, num_keys)
    scores.masked_fill_(group.hidden_within(window), float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    weights = weights.view(num_members * num_kv_heads, share * rows, num_chunks, KEYS_CHUNK).transpose(1, 2)
    weights = weights.reshape(num_members * num_kv_heads * num_chunks, share * rows, KEYS_CHUNK)
    parts = torch.bmm(weights, own_values).view(
        num_members * num_kv_heads, num_chunks, share * rows, head_dim
    )
    total = parts[:, 0]
    if num_chunks > 1:
        total = total.float()
        for chunk in range(1, num_chunks):
            total = total + parts[:, chunk]
        total = total.to(query.dtype)
    total = total.view(num_members, num_kv_heads, share, rows, head_dim).permute(0, 3, 1, 2, 4)
    return total.reshape(num_members * rows, num_heads, head_dim)


class UnsupportedAttentionError(Exception):
    """The model asks its attention for something that the engine does not do."""


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """transformers builds no mask: `StepLayout` holds it."""


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
