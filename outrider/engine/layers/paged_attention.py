"""Attention on a GPU: FlashAttention over the block table, by `torch.nn.attention.varlen`.

It is as batch-invariant as the kernel: without splitting the keys (`num_splits=1`) they are summed in order, whatever
else is in the step, and the kernel is never told that a step has one row a sequence, for which it has another
algorithm. `self_test.batch_invariance_failures` checks that on the actual device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from outrider.engine.kv.kv_plan import BLOCK_SIZE_ON_GPU as BLOCK_SIZE
from outrider.engine.layers.attention import LayerCache, Visibility
from outrider.engine.layers.paged_layout import PagedShape

MAX_HEAD_DIM = 256


Attend = Callable[..., Any]
"""`torch.nn.attention.varlen.varlen_attn`, as `PagedStep.attend` calls it."""


NEEDED_PARAMETERS: Final = ("enable_gqa", "seqused_k", "block_table", "num_splits")
"""Parameters that `PagedStep.attend` names and older versions of `varlen_attn` lack."""


def missing_parameters(attend: Attend) -> list[str]:
    """Names of parameters that this version of `varlen_attn` lacks; empty where it can attend over a block table."""
    known = inspect.signature(attend).parameters
    return [name for name in NEEDED_PARAMETERS if name not in known]


class PagedStep:
    """A step's numbers on the device, and the attention over them."""

    def __init__(
        self,
        numbers: torch.Tensor,  # int32 [shape.size], from `PagedPlan.write_down`
        shape: PagedShape,
        layers: Sequence[LayerCache],
        windows: Sequence[int | None],
        block_size: int,
        attend: Attend,
    ) -> None:
        """windows: of each layer, from `window_of`."""
        self.num_calls = 0
        self._layers, self._windows = layers, windows
        self._block_size, self._attend, self._shape = block_size, attend, shape
        parts = dict(zip(shape.part_sizes(), numbers.split(list(shape.part_sizes().values())), strict=True))
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
        attended: torch.Tensor = self._attend(
            query.contiguous(),
            layer.keys.view(blocks),
            layer.values.view(blocks),
            self._query_starts,  # int32 [num_sequences + 1]
            None,
            self._shape.num_rows,
            self._shape.num_blocks * self._block_size,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # keys before a row's own, and after it
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self._key_counts,  # int32 [num_sequences]
            block_table=self._block_table,  # int32 [num_sequences, num_blocks]
            num_splits=1,
        )
        return attended


def window_of(visibility: Visibility, longest: int) -> int | None:
    """The number of last keys that a row sees, its own included, if that is the same for all rows; else None.

    longest: the most entries of a sequence.
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


def why_not_paged(layers: Sequence[LayerCache], block_size: int, longest: int, *, is_plain: bool) -> str | None:
    """The reason why these layers cannot attend by FlashAttention; None when they can.

    longest: the most entries of a sequence. is_plain: the layers' weights are a softmax of scaled scores, without
    softcap or sinks.
    """
    if block_size % BLOCK_SIZE:
        return f"--block-size is {block_size}, not a multiple of {BLOCK_SIZE}"
    if not is_plain:
        return "its attention has a softcap or sinks"
    for layer in layers:
        if layer.visibility is not None and window_of(layer.visibility, longest) is None:
            return "some of its layers see the past by another rule than a window"
        if layer.keys.shape[-1] != layer.values.shape[-1]:
            return "its keys and values differ in width"
        if layer.keys.shape[-1] > MAX_HEAD_DIM or layer.keys.shape[-1] % 8:
            return f"its heads are {layer.keys.shape[-1]} wide, not a multiple of 8 up to {MAX_HEAD_DIM}"
        if layer.keys.dtype not in (torch.bfloat16, torch.float16):
            return "its KV is not of 16 bits"
    return None
