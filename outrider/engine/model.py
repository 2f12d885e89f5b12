"""Runs steps of a causal language model over a paged KV cache; `loading.load_model` builds it.

The model code is transformers' own; only its attention (`attention`) and its linear layers (`linear`) are ours.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.engine.device import choose_device, read_facts
from outrider.engine.device_steps import DeviceSteps
from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.kv.kv_plan import LOOKAHEAD_ENTRIES as LOOKAHEAD_ENTRIES
from outrider.engine.kv.kv_plan import KvPlan
from outrider.engine.kv.kv_plan import ModelLoadError as ModelLoadError
from outrider.engine.layers.attention import LayerCache, attending, padded_rows, plan_step
from outrider.engine.layers.decoder import FusedDecoder
from outrider.engine.layers.features import FeatureSource, ModuleTaps
from outrider.engine.layers.kv_layout import LayerLayout, bytes_per_token
from outrider.engine.layers.linear import LinearForms
from outrider.engine.layers.paged_attention import Attend
from outrider.engine.options import MASK_TOKEN_KEYS, EngineOptions
from outrider.engine.rank_messages import decode_pairs, decode_step, encode_pairs, encode_step
from outrider.engine.ranks.rank_group import RankGroup, RankMessage
from outrider.engine.sequence_chunk import SequenceChunk as SequenceChunk
from outrider.engine.threads import threads
from outrider.text.tokenizer import tokenizer_eos_token_ids
from outrider.text.vocabulary_map import VocabularyMap

NO_MASK_TOKEN = -1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_for(choice: str) -> str:
    """torch's name for a choice of `--device`: auto, cpu or cuda; every rank has its own GPU."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def check_device(choice: str) -> None:
    """Raises DeviceError if there is no such device here."""
    choose_device(choice, read_facts())


class Engine:
    """A model, its KV cache and the allocator of its blocks. Not thread-safe: one thread runs it.

    In a tensor-parallel group every rank has one, with its shard of the model and of the KV. Calls on rank 0 are
    repeated on all ranks, once `lead` has been called there and `follow` on the others.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineOptions,
        layers: Sequence[LayerLayout],
        num_parameters: int,
        kv: KvPlan,
        group: RankGroup | None = None,
    ) -> None:
        """layers: KV layout of each attention call on this rank (`find_layout`). num_parameters: of the whole model.
        kv: of this rank (`plan_kv`)."""
        self.model = model
        self.config = config
        self.device = device_for(config.device)
        self.group = group
        self._is_leading = False
        self._has_met = False  # the other ranks, once their models were loaded
        hf_config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
        self.vocab_size: int = hf_config.vocab_size
        self.max_model_len = kv.max_model_len
        self.num_layers = len(layers)
        self.num_parameters = num_parameters
        self.numerics = ""
        """The line that identifies the engine's arithmetic (`numerics`); the loader sets it."""
        self.eos_token_ids = _eos_token_ids(model) | tokenizer_eos_token_ids(config.model)
        self.can_share_cores = False
        """Whether steps may have different numbers of threads; the loader sets it."""
        self.mask_token_id = NO_MASK_TOKEN
        """The token that a draft model for parallel drafting reads where it is to guess; `enable_masks` sets it."""
        dtype = DTYPES[config.dtype]
        self.kv_bytes_per_token = bytes_per_token(layers, dtype)
        self.block_size = kv.block_size
        self.allocator = BlockAllocator(kv.num_blocks, self.block_size)
        self._scratch_block_ids = range(kv.num_blocks, kv.num_blocks + kv.num_scratch_blocks)
        num_slots = self._scratch_block_ids.stop * self.block_size
        self.layers = [
            LayerCache(
                new_cache((num_slots, each.num_kv_heads, each.key_dim), dtype, self.device),
                new_cache((num_slots, each.num_kv_heads, each.value_dim), dtype, self.device),
                each.visibility,
            )
            for each in layers
        ]
        self._num_threads: int | None = None  # of the products and the attention of a step; None: torch's
        self._fused: FusedDecoder | None = None
        self._device_steps: DeviceSteps | None = None
        self._foreign: _ForeignVocabulary | None = None
        self._source: FeatureSource | None = None
        self._taps: ModuleTaps | None = None
        self.features: torch.Tensor | None = None
        """Features of the entries in every slot, once `tap` was called.  # [num_slots, size]"""

    @property
    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values per layer.  # [num_slots, num_kv_heads, key_dim], [num_slots, num_kv_heads, value_dim]"""
        return [(layer.keys, layer.values) for layer in self.layers]

    @property
    def longest(self) -> int:
        """Most KV entries of a sequence, hints included."""
        return self.max_model_len + LOOKAHEAD_ENTRIES

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    @property
    def is_paged(self) -> bool:
        """Whether steps attend through the block table, on a GPU."""
        return self._device_steps is not None

    @property
    def feeds_trees(self) -> bool:
        """Whether a node of a hint tree is known to have the bits that it would have in a line of tokens: on a GPU only
        with blocks into which paths are copied (`EngineOptions.has_trees`)."""
        return self.device == "cpu" or len(self._scratch_block_ids) > 0

    def use_threads(self, *, beside_draft: bool) -> None:
        """Sets the threads of the steps from now on: those beside draft workers, or all there are. Only where
        `can_share_cores` says so."""
        self._num_threads = self.config.num_threads_beside_draft if beside_draft else self.config.num_threads

    def fuse(self, forms: LinearForms) -> None:
        """Moves the weights into a `FusedDecoder`, which runs all steps from then on."""
        self._fused = FusedDecoder(self.model, self.caches, self.longest, self.block_size, forms)

    def attend_paged(self, attend: Attend) -> None:
        """Makes steps attend through the block table, where they fit."""
        self._device_steps = DeviceSteps(
            self.model, self.layers, self.block_size, self._scratch_block_ids, self.longest, attend
        )

    def capture_graphs(self) -> None:
        """Captures small steps as graphs. Raises RuntimeError where the model does not permit it."""
        assert self._device_steps is not None
        self._meet_first()
        self._device_steps.capture()

    def enable_masks(self) -> bool:
        """Reads the mask token from the model's configuration; returns whether there is one. Call it before
        `set_vocabulary`. Raises ModelLoadError if it is not a token of the model."""
        found = mask_token(self.model.config)
        if found is not None:
            self.mask_token_id = found
        return found is not None

    def tap(self, source: FeatureSource) -> None:
        """Makes every step keep the features of its rows. Raises ModelLoadError where the model has no such states."""
        if not all(0 <= layer_id <= self.num_layers for layer_id in source.layer_ids):
            raise ModelLoadError(
                f"a draft head reads the states {source.layer_ids}, and the model has layers 0 to {self.num_layers - 1}"
            )
        if (
            self.group is not None and self._device_steps is not None
        ):  # the other ranks' graphs would not be captured anew
            raise ModelLoadError("a draft head's features are kept on one GPU only: serve the target with one rank")
        num_slots = self._scratch_block_ids.stop * self.block_size
        self._source = source
        self.features = new_cache((num_slots, source.size), DTYPES[self.config.dtype], self.device)
        if self._fused is not None:
            self._fused.tap(source.layer_ids)
            return
        self._taps = ModuleTaps(self.model, source.layer_ids)
        if self._device_steps is not None:
            self._device_steps.tap(self._taps)

    def set_vocabulary(self, vocabulary: VocabularyMap, end_of_sequence_ids: frozenset[int]) -> None:
        """Makes the engine take and return token ids of another vocabulary, with these end-of-sequence ids."""
        device = self.device
        num_ids = len(vocabulary.own_ids)
        own_mask_ids = [self.mask_token_id] if self.mask_token_id != NO_MASK_TOKEN else []
        self._foreign = _ForeignVocabulary(
            [*vocabulary.own_ids, *own_mask_ids],
            torch.tensor(vocabulary.own_ids, device=device),
            ~torch.tensor(vocabulary.is_shared, device=device),
        )
        self.vocab_size, self.eos_token_ids = num_ids, end_of_sequence_ids
        if own_mask_ids:
            self.mask_token_id = num_ids  # the first id that the vocabulary does not have

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Runs one step and returns float32 logits.  # [sum of num_logits, vocab_size]

        Logits come in the order of `chunks`, each chunk's in the order of its tokens. When no chunk wants any, there is
        one meaningless row.
        """
        if self._foreign is not None:
            chunks = [self._foreign.translated(chunk) for chunk in chunks]
        if self._is_leading:
            self._send(RankMessage.FORWARD, encode_step(chunks))
        self._meet_first()
        logits = self._forward(chunks)
        return logits if self._foreign is None else self._foreign.selected(logits)

    def move_entries(self, source_slots: npt.NDArray[np.int64], destination_slots: npt.NDArray[np.int64]) -> None:
        """Moves KV entries between slots; sources and destinations may overlap."""
        if self._is_leading:
            self._send(RankMessage.MOVE_ENTRIES, encode_pairs(source_slots, destination_slots))
        self._move_entries(source_slots, destination_slots)

    @torch.inference_mode()
    def _forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        if self._source is None:
            return self._run(chunks, None)
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        width: int = self.model.config.get_text_config().hidden_size  # type: ignore[union-attr,operator]
        tapped = torch.empty(
            *(num_rows, len(self._source.layer_ids), width), dtype=DTYPES[self.config.dtype], device=self.device
        )
        logits = self._run(chunks, tapped)
        assert self.features is not None
        slots = np.concatenate(
            [chunk.kv.slots(chunk.kv.length - len(chunk.token_ids), chunk.kv.length) for chunk in chunks]
        )
        self.features.index_copy_(0, torch.from_numpy(slots).to(self.device), self._source.features(tapped))
        return logits

    def _run(self, chunks: Sequence[SequenceChunk], tapped: torch.Tensor | None) -> torch.Tensor:
        wanted = _wanted_rows(chunks)
        if self._device_steps is not None:
            num_rows = sum(len(chunk.token_ids) for chunk in chunks)
            logits = self._device_steps.forward(chunks, range(num_rows) if wanted is None else wanted, tapped)
            if logits is not None:
                return logits
        device = self.device
        numbers = np.array([token_id for chunk in chunks for token_id in chunk.token_ids], dtype=np.int64)
        token_ids = torch.from_numpy(numbers).to(device)
        blocks = [chunk.query_block() for chunk in chunks]
        if self._fused is not None:
            rows = None if wanted is None else torch.tensor(wanted)
            with threads(self._num_threads):
                return self._fused.forward(token_ids, blocks, rows, tapped).float()
        layout = plan_step(blocks, self.layers)
        num_tokens = token_ids.shape[0]
        padding = token_ids[:1].expand(padded_rows(num_tokens) - num_tokens)
        with attending(layout):
            all_logits: torch.Tensor = self.model(
                input_ids=torch.cat([token_ids, padding]).unsqueeze(0),
                position_ids=layout.positions,
                use_cache=False,
                logits_to_keep=torch.tensor(range(num_tokens) if wanted is None else wanted, device=device),
            ).logits
        if tapped is not None and self._taps is not None:
            tapped.copy_(self._taps.take()[:num_tokens])
        if layout.num_calls != self.num_layers:
            raise ModelLoadError(f"{layout.num_calls} of {self.num_layers} layers attended through the paged cache")
        return all_logits[0].float()

    @torch.inference_mode()
    def _move_entries(self, source_slots: npt.NDArray[np.int64], destination_slots: npt.NDArray[np.int64]) -> None:
        device = self.device
        sources, destinations = (torch.from_numpy(slots).to(device) for slots in (source_slots, destination_slots))
        moved = [tensor for layer in self.caches for tensor in layer]
        if self.features is not None:
            moved.append(self.features)
        for cache in moved:
            cache.index_copy_(0, destinations, cache.index_select(0, sources))

    def _send(self, kind: RankMessage, numbers: npt.NDArray[np.int32]) -> None:
        assert self.group is not None
        self.group.send(kind, numbers)

    def _meet_first(self) -> None:
        """Waits for ranks that load more slowly, before the first operation that has no time for that."""
        if self.group is not None and not self._has_met:
            self.group.meet()
            self._has_met = True

    def lead(self) -> None:
        """Makes the other ranks repeat every call on this one; waits until they have called `follow`."""
        if self.group is not None:
            self.group.meet()
        self._is_leading = self.group is not None

    def idle(self) -> None:
        """Tells the other ranks that rank 0 is alive and idle; must be called regularly, or they end."""
        if self._is_leading:
            self._send(RankMessage.IDLE, np.empty(0, dtype=np.int32))

    def dismiss(self) -> None:
        """Ends the other ranks' `follow`, those that are still there."""
        if self._is_leading:
            self._is_leading = False
            with contextlib.suppress(RuntimeError):
                self._send(RankMessage.STOP, np.empty(0, dtype=np.int32))

    def follow(self) -> None:
        """Repeats rank 0's calls until `dismiss`. Raises RuntimeError when rank 0 is gone."""
        assert self.group is not None
        self.group.meet()
        while True:
            kind, numbers = self.group.receive()
            match kind:
                case RankMessage.FORWARD:
                    self._forward(decode_step(numbers, self.allocator))
                case RankMessage.MOVE_ENTRIES:
                    self._move_entries(*decode_pairs(numbers))
                case RankMessage.IDLE:
                    pass
                case RankMessage.STOP:
                    return

    def new_sequence(self) -> KVSequence:
        """Returns an empty sequence in the engine's KV cache."""
        return KVSequence(self.allocator)


@dataclass(frozen=True, slots=True)
class _ForeignVocabulary:
    """A vocabulary that is not the model's own (`vocabulary_map`)."""

    own_ids: Sequence[int]  # of the vocabulary's ids, then of the mask token where there is one
    columns: torch.Tensor  # the vocabulary's, [vocab_size]
    is_foreign: torch.Tensor  # [vocab_size], ids without a counterpart in the model

    def translated(self, chunk: SequenceChunk) -> SequenceChunk:
        return replace(chunk, token_ids=[self.own_ids[token_id] for token_id in chunk.token_ids])

    def selected(self, logits: torch.Tensor) -> torch.Tensor:
        """Maps logits.  # [num_rows, the model's own] -> [num_rows, vocab_size]"""
        return logits.index_select(1, self.columns).masked_fill_(self.is_foreign, float("-inf"))


def _wanted_rows(chunks: Sequence[SequenceChunk]) -> list[int] | None:
    """Rows whose logits are needed; None for all of them."""
    wanted: list[int] = []
    num_rows = 0
    for chunk in chunks:
        num_rows += len(chunk.token_ids)
        wanted += range(num_rows - chunk.num_logits, num_rows)
    if len(wanted) == num_rows:
        return None
    return wanted or [0]  # the output layer needs at least one row


def new_cache(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of zeros. On a CPU its memory is committed as it is written; `torch.zeros` would commit all of it."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def mask_token(config: Any) -> int | None:
    """The mask token of a draft model for parallel drafting, as `config.json` names it; None for other models.

    Published checkpoints repeat one token: `pard_token` (PARD), `ptd_token_id` (vLLM's name), `mask_token_id`. Raises
    ModelLoadError if it is not a row of the embedding.
    """
    text_config = config.get_text_config()
    for key in MASK_TOKEN_KEYS:
        token_id = getattr(text_config, key, None)
        if token_id is not None:
            if not isinstance(token_id, int) or not 0 <= token_id < text_config.vocab_size:
                raise ModelLoadError(
                    f"config.json: {key} is {token_id!r}, not a token id below the vocabulary's "
                    f"{text_config.vocab_size}: correct it, or remove it to draft without mask tokens"
                )
            return token_id
    return None


def own_limit(text_config: Any) -> int:
    """The longest sequence that a model was made for, tokens."""
    return getattr(text_config, "max_position_embeddings", None) or 1 << 20


def _eos_token_ids(model: nn.Module) -> frozenset[int]:
    """End-of-sequence tokens: the generation configuration's, else the model's."""
    generation: Any = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])
