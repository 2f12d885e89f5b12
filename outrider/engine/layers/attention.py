"""Attention over the paged KV cache, registered with transformers as `outrider`.

A step is flat: all sequences' new tokens side by side, `[1, num_tokens]`. `StepLayout` holds, once per step and for all
layers, which cache slots the tokens write and which they may read. A layer's keys and values may differ in width
(latent attention), layers may differ in heads, and each may see less than the whole past: `kv_layout` finds both by
watching the model. The arithmetic is batch-invariant by construction (invariant I2, bit for bit):

- the step and its query rows are padded to a multiple of 8, so that neither a matrix product nor an element-wise
  function, whose vectorized body and scalar remainder may round differently, treats few rows in another way;
- sums over keys (weights times values) run in chunks of 64 keys, each of the same shape, added up in order; keys
  beyond the sequence have weight zero, so that more padding adds exact zeros. A score is a sum over head_dim, which
  is the same everywhere; only how many scores stand side by side differs.

So nothing in a row's result depends on how many rows or sequences share the step; a self-test at start checks it
(`self_test.batch_invariance_failures`). Padding for `scaled_dot_product_attention` instead, as done elsewhere, is exact
on some processors only: on a Zen 5 core float32 results changed where the padded length crossed 256.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.engine.kv.kv_cache import KVSequence

ATTENTION_NAME = "outrider"
ROWS_MULTIPLE = 8
KEYS_CHUNK = 64
MAX_ROWS_PER_CALL = 256
"""Longer query blocks are split, to bound the score matrix."""


Visibility = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' mask function: (sequence, head, query positions, key positions), broadcast, to True where a query sees
a key. It depends on positions alone."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's KV cache, and its visibility rule: None means every position up to the row's own."""

    keys: torch.Tensor  # [num_slots, num_kv_heads, key_dim]
    values: torch.Tensor  # [num_slots, num_kv_heads, value_dim]
    visibility: Visibility | None = None


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """New tokens of one sequence: entries `[kv.length - num_rows, kv.length)` of its KV, already reserved.

    Rows of committed tokens see every entry up to their own. Nodes of a hint tree have `paths`: for each row, root
    first, the entries that it sees beyond the first `tree_start` (which are committed): its ancestors' and its own. The
    index of an entry among those that a row sees is its position, so a node is computed exactly as if its path were
    committed.
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

    row_index: torch.Tensor  # [num_members * rows] into the flat step; padding repeats the member's first row
    flat_index: torch.Tensor  # [num_real_rows] into num_members * rows
    real_rows: torch.Tensor  # [num_real_rows] into the flat step
    key_slots: torch.Tensor  # [num_members * keys]
    query_positions: torch.Tensor  # [num_members, rows]
    hidden: torch.Tensor  # [num_members, 1, 1, rows, keys], True where a row must not see
    num_members: int
    is_identity: bool  # the step has only this member, with the same padding: no gather needed
    masks: dict[Visibility, torch.Tensor] = field(default_factory=dict)

    def hidden_by(self, visibility: Visibility | None) -> torch.Tensor:
        """The mask of a layer, built once for all layers with the same rule."""
        if visibility is None:
            return self.hidden
        if visibility not in self.masks:
            key_positions = torch.arange(self.hidden.shape[-1], device=self.hidden.device)
            sees = visibility(0, 0, self.query_positions[:, :, None], key_positions)
            self.masks[visibility] = self.hidden | ~sees[:, None, None]
        return self.masks[visibility]


@dataclass(slots=True)
class StepLayout:
    """Cache slots that a step's tokens write and read. Built once per step by `plan_step`."""

    write_slots: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [1, num_rows]; rows from num_tokens on are padding and repeat the first
    groups: list[_Group]
    layers: Sequence[LayerCache]  # in the order in which the model attends
    num_calls: int = 0

    def attend(
        self,
        query: torch.Tensor,  # [num_rows, num_heads, key_dim]
        key: torch.Tensor,  # [num_rows, num_kv_heads, key_dim]
        value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,  # [num_heads]
    ) -> torch.Tensor:
        """Writes the rows' keys and values and returns `[num_rows, num_heads, value_dim]`."""
        layer = self.layers[self.num_calls]
        self.num_calls += 1
        num_tokens = self.write_slots.shape[0]
        layer.keys.index_copy_(0, self.write_slots, key[:num_tokens])
        layer.values.index_copy_(0, self.write_slots, value[:num_tokens])
        output: torch.Tensor | None = None
        for group in self.groups:
            rows = query if group.is_identity else query.index_select(0, group.row_index)
            attended = _attend(rows, layer, group, scale, softcap, sinks)
            if group.is_identity:
                return attended
            if output is None:
                output = attended.new_empty(query.shape[0], *attended.shape[1:])
            output.index_copy_(0, group.real_rows, attended.index_select(0, group.flat_index))
        assert output is not None
        output[num_tokens:] = output[0]  # padding repeats the first row
        return output


class Layout(Protocol):
    """A step's attention: `StepLayout`, or `paged_attention.PagedStep` on a GPU."""

    num_calls: int  # of the attention, in this step so far

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...


_current: ContextVar[Layout] = ContextVar("outrider_step_layout")


@contextlib.contextmanager
def attending(layout: Layout) -> Iterator[None]:
    """Makes `paged_attention` use this step. (Not every model passes keyword arguments on to it.)"""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def plan_step(blocks: Sequence[QueryBlock], layers: Sequence[LayerCache]) -> StepLayout:
    """Lays out one step over `blocks` in the given order; its tokens are followed by padding (`padded_rows`)."""
    device = layers[0].keys.device
    write_slots = []
    positions: list[int] = []
    by_rows: dict[int, list[_Member]] = {}
    for block in blocks:
        slots = block.kv.slots(0, block.kv.length)
        write_slots.append(slots[block.kv.length - block.num_rows :])
        for member in _members(block, slots, first_row=len(positions)):
            by_rows.setdefault(padded_rows(member.num_rows), []).append(member)
            positions.extend(range(member.first_position, member.first_position + member.num_rows))
    groups = [_plan_group(rows, members, len(positions), device) for rows, members in by_rows.items()]
    positions += positions[:1] * (padded_rows(len(positions)) - len(positions))
    return StepLayout(
        write_slots=torch.from_numpy(np.concatenate(write_slots)).to(device),
        positions=torch.tensor([positions], device=device),
        groups=groups,
        layers=layers,
    )


def padded_rows(num_rows: int) -> int:
    """The number of rows, rounded up to the next multiple that kernels need."""
    return -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE


def _members(block: QueryBlock, slots: npt.NDArray[np.int64], first_row: int) -> Iterator[_Member]:
    """Splits a block's rows into members, in order."""
    if block.paths is None:
        first = block.kv.length - block.num_rows
        for offset in range(0, block.num_rows, MAX_ROWS_PER_CALL):
            num_rows = min(MAX_ROWS_PER_CALL, block.num_rows - offset)
            yield _Member(first_row + offset, num_rows, first + offset, slots[: first + offset + num_rows])
        return
    text = slots[: block.tree_start]
    for row, path in enumerate(block.paths):
        key_slots = np.concatenate([text, slots[path]])
        yield _Member(first_row + row, 1, len(key_slots) - 1, key_slots)


def _plan_group(rows: int, members: list[_Member], num_tokens: int, device: torch.device) -> _Group:
    longest = max(len(member.key_slots) for member in members)
    keys = -(-longest // KEYS_CHUNK) * KEYS_CHUNK
    num_members = len(members)
    row_index = np.zeros((num_members, rows), dtype=np.int64)
    key_slots = np.zeros((num_members, keys), dtype=np.int64)
    query_positions = np.zeros((num_members, rows), dtype=np.int64)
    is_real = np.zeros((num_members, rows), dtype=np.bool_)
    for i, member in enumerate(members):
        count = member.num_rows
        # Padding repeats the first row and its position: it must see something, or its softmax is not a number.
        row_index[i] = member.first_row
        query_positions[i] = member.first_position
        row_index[i, :count] = np.arange(member.first_row, member.first_row + count)
        query_positions[i, :count] = np.arange(member.first_position, member.first_position + count)
        key_slots[i, : len(member.key_slots)] = member.key_slots
        is_real[i, :count] = True
    hidden = np.arange(keys) > query_positions[:, :, None]
    return _Group(
        row_index=torch.from_numpy(row_index.reshape(-1)).to(device),
        flat_index=torch.from_numpy(np.flatnonzero(is_real)).to(device),
        real_rows=torch.from_numpy(row_index[is_real]).to(device),
        key_slots=torch.from_numpy(key_slots.reshape(-1)).to(device),
        query_positions=torch.from_numpy(query_positions).to(device),
        hidden=torch.from_numpy(hidden).to(device)[:, None, None],
        num_members=num_members,
        is_identity=num_members == 1 and members[0].num_rows == num_tokens,
    )


def paged_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that transformers calls in every layer; returns `[1, num_rows, num_heads, value_dim]`.

    s_aux: attention sinks, one logit per head, which take a share of the weights and contribute nothing.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    return _current.get().attend(queries, keys, values, scale, softcap, s_aux).unsqueeze(0), None


def _attend(
    query: torch.Tensor,  # [num_members * rows, num_heads, key_dim]
    layer: LayerCache,
    group: _Group,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [num_heads]
) -> torch.Tensor:
    """Attends every row to its own keys; returns `[num_members * rows, num_heads, value_dim]`."""
    num_members = group.num_members
    rows = query.shape[0] // num_members
    num_heads, key_dim = query.shape[1], query.shape[2]
    num_kv_heads, value_dim = layer.values.shape[1], layer.values.shape[2]
    share = num_heads // num_kv_heads
    num_keys = group.key_slots.shape[0] // num_members
    num_chunks = num_keys // KEYS_CHUNK

    # Query heads that share a KV head become rows of one product: [num_members * num_kv_heads, share * rows, key_dim].
    folded = query.view(num_members, rows, num_kv_heads, share, key_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_members * num_kv_heads, share * rows, key_dim)
    keys = layer.keys.index_select(0, group.key_slots).view(num_members, num_keys, num_kv_heads, key_dim)
    keys = keys.permute(0, 2, 3, 1).reshape(num_members * num_kv_heads, key_dim, num_keys)
    values = layer.values.index_select(0, group.key_slots).view(num_members, num_keys, num_kv_heads, value_dim)
    values = values.transpose(1, 2).reshape(num_members * num_kv_heads * num_chunks, KEYS_CHUNK, value_dim)

    scores = torch.bmm(folded, keys).float().mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(num_members, num_kv_heads, share, rows, num_keys)
    scores.masked_fill_(group.hidden_by(layer.visibility), float("-inf"))
    weights = _softmax(scores, sinks).to(query.dtype)
    weights = weights.view(num_members * num_kv_heads, share * rows, num_chunks, KEYS_CHUNK).transpose(1, 2)
    weights = weights.reshape(num_members * num_kv_heads * num_chunks, share * rows, KEYS_CHUNK)
    parts = torch.bmm(weights, values).view(num_members * num_kv_heads, num_chunks, share * rows, value_dim)
    total = parts[:, 0]
    if num_chunks > 1:
        total = total.float()
        for chunk in range(1, num_chunks):
            total = total + parts[:, chunk]
        total = total.to(query.dtype)
    total = total.view(num_members, num_kv_heads, share, rows, value_dim).permute(0, 3, 1, 2, 4)
    return total.reshape(num_members * rows, num_heads, value_dim).contiguous()


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of the keys, which sum to 1 together with the sink's.

    scores: [num_members, num_kv_heads, share, rows, num_keys]
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    num_kv_heads, share, num_keys = scores.shape[1], scores.shape[2], scores.shape[-1]
    # The sink gets a chunk of its own, so that the keys are summed in the same order as without it.
    chunk = scores.new_full((*scores.shape[:-1], KEYS_CHUNK), float("-inf"))
    chunk[..., 0] = sinks.float().view(1, num_kv_heads, share, 1)
    return torch.softmax(torch.cat([scores, chunk], dim=-1), dim=-1)[..., :num_keys].contiguous()


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Makes transformers build no mask: `StepLayout` has it."""


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
