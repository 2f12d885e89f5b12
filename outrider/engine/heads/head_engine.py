"""Runs a head with attention over a paged KV cache of its own, with the interface of `Engine`.

Beside the KV of every entry stands a feature: what the row of the next entry takes. `set_features` stores the target's
own; until one arrives, the head's output for that entry takes its place. So a scheduler drafts with a head as with any
model. Where features arrive later, the rows behind them are run again in place, by a chunk of the same entries.

Invariant: the target's feature of an entry stays until its block is handed out again (after `truncate` gave it back) or
`forget_features` is called; the head never overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.heads.fused_head import FusedHead
from outrider.engine.heads.head import DraftHead, hides_first
from outrider.engine.heads.waves import Run, plan_waves
from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.kv.kv_plan import LOOKAHEAD_ENTRIES, KvPlan
from outrider.engine.layers.attention import LayerCache, QueryBlock, attending, padded_rows, plan_step
from outrider.engine.layers.features import unpacked
from outrider.engine.layers.kv_layout import LayerLayout, bytes_per_token
from outrider.engine.layers.linear import LinearForms
from outrider.engine.model import DTYPES, ModelLoadError, device_for, new_cache
from outrider.engine.options import EngineOptions
from outrider.engine.sequence_chunk import SequenceChunk


class HeadEngine:
    """A draft head, its KV cache and the features of its entries. Not thread-safe: one thread runs it."""

    def __init__(
        self,
        head: DraftHead,
        config: EngineOptions,
        layers: tuple[LayerLayout, ...],
        kv: KvPlan,
        eos_token_ids: frozenset[int],
        forms: LinearForms | None = None,
    ) -> None:
        """layers: KV layout of the head's layers (`DraftHead.layout`). eos_token_ids: the target's. forms: of the
        products of a head that is to be fused (`can_fuse`), None for others."""
        self.head = head
        self.config = config
        self.device = device_for(config.device)
        self.vocab_size, self.feature_size = head.vocab_size, head.hidden_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = kv.max_model_len
        self.num_layers = len(layers)
        self.num_parameters = sum(parameter.numel() for parameter in head.parameters())
        self.numerics = ""
        self.mask_token_id = 0  # none is fed: a head reads features
        self.group = None
        dtype = DTYPES[config.dtype]
        self.kv_bytes_per_token = entry_bytes(head, layers, dtype)
        self.block_size = kv.block_size
        self.allocator = _FeatureAllocator(kv.num_blocks, kv.block_size)
        num_slots = kv.num_blocks * kv.block_size
        self.layers = [
            LayerCache(
                new_cache((num_slots, each.num_kv_heads, each.key_dim), dtype, self.device),
                new_cache((num_slots, each.num_kv_heads, each.value_dim), dtype, self.device),
                each.visibility,
            )
            for each in hides_first(layers)
        ]
        self.features = new_cache((num_slots, 1, head.hidden_size), dtype, self.device)[:, 0]
        """By slot.  # [num_slots, feature_size]"""
        self._fused: FusedHead | None = None
        if forms is not None:
            assert isinstance(head, Eagle3Head)
            self._fused = FusedHead(head, self.caches[0], self.longest, forms)

    @property
    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values per layer.  # [num_slots, num_kv_heads, key_dim], [num_slots, num_kv_heads, value_dim]"""
        return [(layer.keys, layer.values) for layer in self.layers]

    @property
    def longest(self) -> int:
        """Most KV entries of a sequence, hints included."""
        return self.max_model_len + LOOKAHEAD_ENTRIES

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Runs one step and returns float32 logits.  # [sum of num_logits, vocab_size]

        As `Engine.forward`. Rows that follow on each other in one chunk run at once where the target's features of the
        entries before them are there, else one after the other.
        """
        token_ids = torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids], device=self.device)
        normed = self.features.new_empty(token_ids.shape[0], self.feature_size)
        is_given = self.allocator.is_given
        waves = plan_waves(chunks, lambda chunk, entry: bool(is_given[chunk.kv.slots(entry, entry + 1)[0]]))
        for wave in waves:
            rows = torch.tensor([row for run in wave for row in run.rows], device=self.device)
            normed.index_copy_(0, rows, self._run(wave, token_ids.index_select(0, rows)))
        wanted = torch.tensor(_wanted_rows(chunks), device=self.device)
        return self.head.logits(normed.index_select(0, wanted))

    def set_features(self, slots: npt.NDArray[np.int64], vectors: torch.Tensor) -> None:
        """Stores the target's features of entries, which replace the head's own.  # [n], [n, feature_size]

        An entry's feature is the projection of the target's states at its token. It counts for rows that run from now
        on. Raises ValueError for another width.
        """
        if vectors.shape != (len(slots), self.feature_size):
            raise ValueError(f"features are {self.feature_size} wide, got {list(vectors.shape)} for {len(slots)} slots")
        at = torch.from_numpy(np.asarray(slots, dtype=np.int64)).to(self.device)
        self.features.index_copy_(0, at, vectors.to(self.device, self.features.dtype))
        self.allocator.is_given[slots] = True

    def take_features(self, slots: npt.NDArray[np.int64], data: bytes) -> None:
        """`set_features`, of features as they travel."""
        self.set_features(slots, unpacked(data, self.feature_size))

    # A head runs in one process, so that there are no ranks to lead.

    def lead(self) -> None: ...
    def idle(self) -> None: ...
    def dismiss(self) -> None: ...

    def forget_features(self, slots: npt.NDArray[np.int64]) -> None:
        """Lets the head's own output take the place of the target's features, from the next run of the rows on."""
        self.allocator.is_given[slots] = False

    @torch.inference_mode()
    def move_entries(self, source_slots: npt.NDArray[np.int64], destination_slots: npt.NDArray[np.int64]) -> None:
        """Moves entries with their features between slots; sources and destinations may overlap."""
        sources, destinations = (
            torch.from_numpy(np.asarray(slots, dtype=np.int64)).to(self.device)
            for slots in (source_slots, destination_slots)
        )
        for cache in (*(tensor for layer in self.caches for tensor in layer), self.features):
            cache.index_copy_(0, destinations, cache.index_select(0, sources))
        self.allocator.is_given[destination_slots] = self.allocator.is_given[source_slots]

    def new_sequence(self) -> KVSequence:
        """Returns an empty sequence in the head's KV cache."""
        return KVSequence(self.allocator)

    @staticmethod
    def first_entries(kv: KVSequence, length: int) -> KVSequence:
        """A view of the first entries of a sequence, for a chunk that runs rows in its middle again; never freed."""
        return KVSequence(kv.allocator, kv.block_ids, length)

    def _run(self, wave: Sequence[Run], token_ids: torch.Tensor) -> torch.Tensor:
        """Runs the rows of a wave, in the order of its runs; returns their states after the norm and stores their
        features.  # [num_rows, hidden_size]"""
        before = np.concatenate([_slots(run.block.kv, run.previous) for run in wave])
        features = self.features.index_select(0, torch.from_numpy(np.maximum(before, 0)).to(self.device))
        features[torch.from_numpy(before < 0).to(self.device)] = 0
        states, normed = self._states(token_ids, features, [run.block for run in wave])
        own = np.concatenate([_slots(run.block.kv, run.entries) for run in wave])
        is_own = torch.from_numpy(~self.allocator.is_given[own]).to(self.device)
        output = normed if self.head.feeds_normalized else states
        self.features.index_copy_(0, torch.from_numpy(own).to(self.device)[is_own], output[is_own])
        return normed

    def _states(
        self, token_ids: torch.Tensor, features: torch.Tensor, blocks: Sequence[QueryBlock]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' states before the norm and after it."""
        if self._fused is not None:
            return self._fused.forward(token_ids, features, blocks)
        num_rows = token_ids.shape[0]
        layout = plan_step(blocks, self.layers)
        missing = padded_rows(num_rows) - num_rows  # padding repeats the first row
        token_ids = torch.cat([token_ids, token_ids[:1].expand(missing)])
        features = torch.cat([features, features[:1].expand(missing, -1)])
        with attending(layout):
            states = self.head(token_ids.unsqueeze(0), features.unsqueeze(0), layout.positions)
        if layout.num_calls != self.num_layers:
            raise ModelLoadError(f"{layout.num_calls} of {self.num_layers} layers attended through the paged cache")
        normed: torch.Tensor = self.head.norm(states)[0, :num_rows]
        return states[0, :num_rows], normed


class _FeatureAllocator(BlockAllocator):
    """An allocator that notes, by slot, whether the target's feature is there; a block is handed out without any."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.is_given = np.zeros(num_blocks * block_size, dtype=np.bool_)

    def allocate(self) -> int:
        block_id = super().allocate()
        self.is_given[block_id * self.block_size : (block_id + 1) * self.block_size] = False
        return block_id


def entry_bytes(head: DraftHead, layers: Sequence[LayerLayout], dtype: torch.dtype) -> int:
    """Bytes that an entry takes: keys, values and its feature."""
    return bytes_per_token(layers, dtype) + head.hidden_size * dtype.itemsize


def _slots(kv: KVSequence, entries: Sequence[int]) -> npt.NDArray[np.int64]:
    """Cache slots of entries; -1 for the entry before the first."""
    size = kv.allocator.block_size
    return np.array(
        [-1 if each < 0 else kv.block_ids[each // size] * size + each % size for each in entries], dtype=np.int64
    )


def _wanted_rows(chunks: Sequence[SequenceChunk]) -> list[int]:
    """Rows whose logits are wanted; the first one where none are."""
    wanted: list[int] = []
    num_rows = 0
    for chunk in chunks:
        num_rows += len(chunk.token_ids)
        wanted += range(num_rows - chunk.num_logits, num_rows)
    return wanted or [0]
