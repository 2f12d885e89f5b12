"""Runs steps of a causal language model over a paged KV cache; `loading.load_model` makes it.

The model code is transformers' own; only its attention (`attention`) and its linear layers (`linear`) are ours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.engine.attention import LayerCache, attending, padded_rows, plan_step
from outrider.engine.decoder import FusedDecoder
from outrider.engine.device_steps import DeviceSteps
from outrider.engine.kv_cache import BlockAllocator, KVSequence
from outrider.engine.kv_layout import LayerLayout, bytes_per_token
from outrider.engine.linear import LinearForms
from outrider.engine.orders import decode_pairs, decode_step, encode_pairs, encode_step
from outrider.engine.paged_attention import BLOCK_SIZE, Attend
from outrider.engine.rank_group import Order, RankGroup
from outrider.engine.sequence_chunk import SequenceChunk as SequenceChunk
from outrider.errors import ConfigurationError
from outrider.vocabulary_map import VocabularyMap

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUANTIZATIONS = ("none", "int8", "fp8")


class ModelLoadError(ConfigurationError):
    """The model cannot be served; the message names the cause and the way out."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is made from."""

    model_dir: Path
    dtype: str = "bfloat16"
    device: str = "cpu"
    max_num_seqs: int = 32  # sequences whose KV should fit at once
    max_model_len: int | None = None  # longest sequence, tokens; None: the model's own limit
    block_size: int | None = None  # KV entries per block; None: what suits the device
    kv_cache_bytes: int = 2 * 2**30  # most memory for KV
    num_threads: int = 1  # torch intra-op threads
    quantization: str = "none"  # of the linear layers' weights, the output layer's excepted
    use_kernels: bool = True  # where the model and the machine permit (`decoder`), CUDA graphs included
    has_trees: bool = False  # hint trees are fed, not texts alone

    def __post_init__(self) -> None:
        if self.quantization not in QUANTIZATIONS:
            raise ModelLoadError(
                f"quantization {self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}"
            )
        if self.quantization != "none" and self.dtype != "bfloat16":
            raise ModelLoadError(
                f"{self.quantization} weights are computed in bfloat16: set --dtype bfloat16"
            )
        if self.dtype not in DTYPES:
            raise ModelLoadError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.is_cuda and not torch.cuda.is_available():
            raise ModelLoadError("torch sees no CUDA device here: set --device cpu, or look at nvidia-smi")

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


def device_for(choice: str) -> str:
    """torch's name for what `--device` chooses: auto, cpu or cuda, of which every rank has its own."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


class Engine:
    """A model, its KV cache and the allocator of its blocks. Not thread-safe: one thread runs it.

    In a tensor-parallel group every rank has one, with its shard of the model and of the KV. What is called on rank 0
    is done on all of them, once `lead` has been called there and `follow` on the others.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        layers: Sequence[LayerLayout],
        num_parameters: int,
        group: RankGroup | None = None,
    ) -> None:
        """layers: what each call of the attention keeps on this rank (`find_layout`). num_parameters: of the whole
        model."""
        self.model = model
        self.config = config
        self.group = group
        self._is_leading = False
        hf_config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
        self.vocab_size: int = hf_config.vocab_size
        self.max_model_len = longest_sequence(hf_config, config.max_model_len)
        self.num_layers = len(layers)
        self.num_parameters = num_parameters
        self.numerics = ""
        """What else than the weights decides the bits of logits (`numerics`); the loader fills it in."""
        self.eos_token_ids = _eos_token_ids(model)
        dtype = DTYPES[config.dtype]
        self.kv_bytes_per_token = bytes_per_token(layers, dtype)
        self.block_size = config.block_size or (BLOCK_SIZE if config.is_cuda else BLOCK_SIZE_ON_CPU)
        num_blocks = _num_blocks(config, self.max_model_len, self.kv_bytes_per_token, self.block_size)
        self.allocator = BlockAllocator(num_blocks, self.block_size)
        self._scratch_block_ids = range(
            num_blocks, num_blocks + NUM_SCRATCH_BLOCKS * (config.is_cuda and config.has_trees)
        )
        num_slots = self._scratch_block_ids.stop * self.block_size
        self.layers = [
            LayerCache(
                torch.zeros(num_slots, each.num_kv_heads, each.key_dim, dtype=dtype, device=config.device),
                torch.zeros(num_slots, each.num_kv_heads, each.value_dim, dtype=dtype, device=config.device),
                each.visibility,
            )
            for each in layers
        ]
        self._fused: FusedDecoder | None = None
        self._device_steps: DeviceSteps | None = None
        self._language: _Language | None = None

    @property
    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values per layer.  # [num_slots, num_kv_heads, key_dim], [num_slots, num_kv_heads, value_dim]"""
        return [(layer.keys, layer.values) for layer in self.layers]

    @property
    def longest(self) -> int:
        """Entries of a sequence, hints included."""
        return self.max_model_len + LOOKAHEAD_ENTRIES

    @property
    def is_fused(self) -> bool:
        """Whether a `FusedDecoder` runs the steps."""
        return self._fused is not None

    @property
    def is_paged(self) -> bool:
        """Whether steps attend through the block table, on a GPU."""
        return self._device_steps is not None

    def fuse(self, forms: LinearForms) -> None:
        """Moves the weights into a `FusedDecoder`, which runs all steps from then on."""
        self._fused = FusedDecoder(self.model, self.caches, self.longest, self.block_size, forms)

    def attend_paged(self, attend: Attend) -> None:
        """Steps attend through the block table from then on, where they fit."""
        self._device_steps = DeviceSteps(
            self.model, self.layers, self.block_size, self._scratch_block_ids, self.longest, attend
        )

    def capture_graphs(self) -> None:
        """Small steps are launched as a whole from then on. Raises RuntimeError where the model does not permit it."""
        assert self._device_steps is not None
        self._device_steps.capture()

    def speak(self, vocabulary: VocabularyMap, end_of_sequence_ids: frozenset[int]) -> None:
        """Takes and gives token ids of another vocabulary from now on, of which these end a text."""
        device = self.config.device
        self._language = _Language(
            vocabulary.own_ids,
            torch.tensor(vocabulary.own_ids, device=device),
            ~torch.tensor(vocabulary.is_shared, device=device),
        )
        self.vocab_size, self.eos_token_ids = len(vocabulary.own_ids), end_of_sequence_ids

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Runs one step and returns float32 logits.  # [sum of num_logits, vocab_size]

        Logits come in the order of `chunks`, each chunk's in the order of its tokens. When no chunk wants any, there
        is one row without meaning.
        """
        if self._language is not None:
            chunks = [self._language.translated(chunk) for chunk in chunks]
        if self._is_leading:
            self._order(Order.FORWARD, encode_step(chunks))
        logits = self._forward(chunks)
        return logits if self._language is None else self._language.told(logits)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole KV blocks, as `KVSequence.extend` asks for."""
        if copies and self._is_leading:
            self._order(
                Order.COPY_BLOCKS, encode_pairs([pair[0] for pair in copies], [pair[1] for pair in copies])
            )
        self._copy_blocks(copies)

    def move_entries(
        self, source_slots: npt.NDArray[np.int64], destination_slots: npt.NDArray[np.int64]
    ) -> None:
        """Moves KV entries between slots; sources and destinations may overlap."""
        if self._is_leading:
            self._order(Order.MOVE_ENTRIES, encode_pairs(source_slots, destination_slots))
        self._move_entries(source_slots, destination_slots)

    @torch.inference_mode()
    def _forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        wanted = _wanted_rows(chunks)
        if self._device_steps is not None:
            num_rows = sum(len(chunk.token_ids) for chunk in chunks)
            logits = self._device_steps.forward(chunks, range(num_rows) if wanted is None else wanted)
            if logits is not None:
                return logits
        device = self.config.device
        token_ids = torch.tensor(
            [token_id for chunk in chunks for token_id in chunk.token_ids], device=device
        )
        blocks = [chunk.query_block() for chunk in chunks]
        if self._fused is not None:
            rows = None if wanted is None else torch.tensor(wanted)
            return self._fused.forward(token_ids, blocks, rows).float()
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
        if layout.num_calls != self.num_layers:
            raise ModelLoadError(
                f"{layout.num_calls} of {self.num_layers} layers attended through the paged cache"
            )
        return all_logits[0].float()

    @torch.inference_mode()
    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        for source, destination in copies:
            for cache in (tensor for layer in self.caches for tensor in layer):
                cache[destination * size : (destination + 1) * size] = cache[
                    source * size : (source + 1) * size
                ]

    @torch.inference_mode()
    def _move_entries(
        self, source_slots: npt.NDArray[np.int64], destination_slots: npt.NDArray[np.int64]
    ) -> None:
        device = self.config.device
        sources, destinations = (
            torch.from_numpy(slots).to(device) for slots in (source_slots, destination_slots)
        )
        for cache in (tensor for layer in self.caches for tensor in layer):
            cache.index_copy_(0, destinations, cache.index_select(0, sources))

    def _order(self, order: Order, numbers: npt.NDArray[np.int32]) -> None:
        assert self.group is not None
        self.group.send(order, numbers)

    def lead(self) -> None:
        """From now on the other ranks do what is done here; they must have called `follow`."""
        self._is_leading = self.group is not None

    def rest(self) -> None:
        """There is nothing to do, and rank 0 lives: to be said now and then, or the other ranks end."""
        if self._is_leading:
            self._order(Order.REST, np.empty(0, dtype=np.int32))

    def dismiss(self) -> None:
        """Ends the other ranks' `follow`. One that is gone needs no telling."""
        if self._is_leading:
            self._is_leading = False
            with contextlib.suppress(RuntimeError):
                self._order(Order.STOP, np.empty(0, dtype=np.int32))

    def follow(self) -> None:
        """Does what rank 0 says until it says that this is the end. Raises RuntimeError when it is gone."""
        assert self.group is not None
        while True:
            order, numbers = self.group.receive()
            match order:
                case Order.FORWARD:
                    self._forward(decode_step(numbers, self.allocator))
                case Order.COPY_BLOCKS:
                    sources, destinations = decode_pairs(numbers)
                    self._copy_blocks(list(zip(sources.tolist(), destinations.tolist(), strict=True)))
                case Order.MOVE_ENTRIES:
                    self._move_entries(*decode_pairs(numbers))
                case Order.REST:
                    pass
                case Order.STOP:
                    return

    def new_sequence(self) -> KVSequence:
        return KVSequence(self.allocator)


@dataclass(frozen=True, slots=True)
class _Language:
    """A vocabulary that is not the model's own (`vocabulary_map`)."""

    own_ids: Sequence[int]
    columns: torch.Tensor  # the same, [vocab_size]
    is_foreign: torch.Tensor  # [vocab_size], what the model has no word for

    def translated(self, chunk: SequenceChunk) -> SequenceChunk:
        return replace(chunk, token_ids=[self.own_ids[token_id] for token_id in chunk.token_ids])

    def told(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, the model's own] -> [num_rows, vocab_size]"""
        return logits.index_select(1, self.columns).masked_fill_(self.is_foreign, float("-inf"))


def _wanted_rows(chunks: Sequence[SequenceChunk]) -> list[int] | None:
    """Rows whose logits are wanted, None for all of them."""
    wanted: list[int] = []
    num_rows = 0
    for chunk in chunks:
        num_rows += len(chunk.token_ids)
        wanted += range(num_rows - chunk.num_logits, num_rows)
    if len(wanted) == num_rows:
        return None
    return wanted or [0]  # the output layer wants at least one row


BLOCK_SIZE_ON_CPU = 16
NUM_SCRATCH_BLOCKS = 32
LOOKAHEAD_ENTRIES = 256
"""KV entries that a sequence may use beyond its longest length: hints being verified, a draft's hint tree."""


def longest_sequence(hf_config: Any, wanted: int | None) -> int:
    longest: int = getattr(hf_config, "max_position_embeddings", None) or 1 << 20
    if wanted is not None and not 2 <= wanted <= longest:
        raise ModelLoadError(f"max_model_len is {wanted}; permitted for this model: 2 to {longest}")
    return wanted or longest


def _num_blocks(config: EngineConfig, max_model_len: int, kv_bytes_per_token: int, block_size: int) -> int:
    """Blocks for `max_num_seqs` of the longest sequences, or as many as the memory bound permits."""
    per_sequence = -(-(max_model_len + LOOKAHEAD_ENTRIES) // block_size)
    affordable = config.kv_cache_bytes // (kv_bytes_per_token * block_size)
    if affordable < per_sequence:
        needed = per_sequence * block_size * kv_bytes_per_token / 2**30
        raise ModelLoadError(
            f"{config.kv_cache_bytes / 2**30:.2f} GiB of KV cache hold no sequence of {max_model_len} tokens; "
            f"one needs {needed:.2f} GiB: raise --kv-cache-gib or lower --max-model-len"
        )
    return int(min(per_sequence * config.max_num_seqs, affordable)) + 1


def _eos_token_ids(model: nn.Module) -> frozenset[int]:
    """End-of-sequence tokens: the generation configuration's, else the model's."""
    generation: Any = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])
