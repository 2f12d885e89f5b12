"""Attention on a GPU: FlashAttention over the block table, by `torch.nn.attention.varlen`.

Batch-invariant as far as the kernel is: without splitting the keys (`num_splits=1`) the order of its sums is that of
the keys, whatever else is in the step, and it is never told that a step has one row a sequence, for which it has
another algorithm. `self_test.batch_invariance_failures` looks whether that holds on the device at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outrider.engine.attention import LayerCache, Visibility
from outrider.engine.paged_layout import PagedShape

BLOCK_SIZE = 256
"""KV entries of a block: the kernel takes multiples of this."""
MAX_HEAD_DIM = 256


class Attend(Protocol):
    """`torch.nn.attention.varlen.varlen_attn`, as far as it is used."""

    def __call__(
        self,
        query: torch.Tensor,  # [num_rows, num_heads, head_dim]
        key: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,  # int32 [num_sequences + 1]
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,  # int32 [num_sequences]
        block_table: torch.Tensor,  # int32 [num_sequences, num_blocks]
        num_splits: int,
    ) -> Any: ...  # a tensor like `query`, as long as no log-sum-exp is asked for


class PagedStep:
    """A step's numbers on the device, and the attention that goes by them (`attention.Layout`)."""

    def __init__(
        self,
        numbers: torch.Tensor,  # int32 [shape.size], as `PagedPlan.write_down` has them
        shape: PagedShape,
        layers: Sequence[LayerCache],
        windows: Sequence[int | None],
        block_size: int,
        attend: Attend,
    ) -> None:
        """windows: of each layer, see `window_of`."""
        self.num_calls = 0
        self._layers, self._windows = layers, windows
        self._block_size, self._attend, self._shape = block_size, attend, shape
        parts = dict(zip(shape.places(), numbers.split(list(shape.places().values())), strict=True))
        self.token_ids = parts["token_ids"].long()
        self.positions = parts["positions"].long().unsqueeze(0)
        self.wanted = parts["wanted"].long()
        self._write_slots = parts["write_slots"].long()
        self._copy_from, self._copy_to = parts["copy_from"].long(), parts["copy_to"].long()
        self._query_starts, self._key_counts = parts["query_starts"], parts["key_counts"]
        self._block_table = parts["block_table"].view(shape.num_sequences, shape.num_blocks)

    def attend(
        self,
        query: torch.Tensor,  # [num_rows, num_heads, head_dim]
        key: torch.Tensor,  # [num_rows, num_kv_heads, head_dim]
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes the rows' keys and values and returns `[num_rows, num_heads, head_dim]`."""
        assert softcap is None, "FlashAttention as torch has it knows no softcap"
        assert sinks is None, "FlashAttention as torch has it knows no sinks"
        layer, window = self._layers[self.num_calls], self._windows[self.num_calls]
        self.num_calls += 1
        for cache, new in ((layer.keys, key), (layer.values, value)):
            cache.index_copy_(0, self._write_slots, new)
            if self._shape.num_copies:
                cache.index_copy_(0, self._copy_to, cache.index_select(0, self._copy_from))
        blocks = (-1, self._block_size, *layer.keys.shape[1:])
        return self._attend(
            query.contiguous(),
            layer.keys.view(blocks),
            layer.values.view(blocks),
            self._query_starts,
            None,
            self._shape.num_rows,
            self._shape.num_blocks * self._block_size,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # keys before a row's own, and after it
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self._key_counts,
            block_table=self._block_table,
            num_splits=1,
        )


def window_of(visibility: Visibility, longest: int) -> int | None:
    """How many keys a row sees, up to its own, where that is always as many of the last as there are; else None.

    longest: entries of a sequence.
    """
    positions = torch.arange(longest)

    def seen(query: int) -> torch.Tensor:
        sees = visibility(0, 0, torch.tensor(query).view(1, 1, 1), positions).expand(1, 1, longest)[0, 0]
        return (sees & (positions <= query)).nonzero().flatten()

    window = len(seen(longest - 1))
    queries = {
        *range(min(longest, 64)),
        *range(0, longest, max(longest // 64, 1)),
        *range(window - 1, window + 2),
    }
    for query in sorted(query for query in queries if 0 <= query < longest):
        if not torch.equal(seen(query), positions[max(query + 1 - window, 0) : query + 1]):
            return None
    return window


def why_not_paged(
    layers: Sequence[LayerCache], block_size: int, longest: int, *, is_plain: bool
) -> str | None:
    """Why these layers cannot attend by FlashAttention; None when they can.

    longest: entries of a sequence. is_plain: the layers' weights are a softmax of scaled scores, without a softcap and
    without sinks.
    """
    if block_size % BLOCK_SIZE:
        return f"--block-size is {block_size}, not a multiple of {BLOCK_SIZE}"
    if not is_plain:
        return "its attention has a softcap or sinks"
    for layer in layers:
        if layer.visibility is not None and window_of(layer.visibility, longest) is None:
            return "what some of its layers see of the past is no window"
        if layer.keys.shape[-1] != layer.values.shape[-1]:
            return "its keys and values differ in width"
        if layer.keys.shape[-1] > MAX_HEAD_DIM or layer.keys.shape[-1] % 8:
            return f"its heads are {layer.keys.shape[-1]} wide, not a multiple of 8 up to {MAX_HEAD_DIM}"
        if layer.keys.dtype not in (torch.bfloat16, torch.float16):
            return "its KV is not of 16 bits"
    return None
