"""Loads a causal language model and runs steps of it over a paged KV cache.

The model code is transformers' own; only its attention (`attention`) and its linear layers (`linear`) are ours.
`load_model` refuses, by name, an architecture that does not compute through them, by comparing with transformers'
own attention on a few tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import nn

from outrider.engine.attention import ATTENTION_NAME, LayerCache, attending, padded_rows, plan_step
from outrider.engine.decoder import FusedDecoder, why_not
from outrider.engine.device_steps import DeviceSteps
from outrider.engine.experts import has_experts, run_in_blocks, split_experts
from outrider.engine.kv_cache import BlockAllocator, KVSequence
from outrider.engine.kv_layout import (
    LayerLayout,
    UnsupportedModelError,
    bytes_per_token,
    find_layout,
    refuse_other_states,
)
from outrider.engine.linear import LinearForms, make_batch_invariant, round_weights
from outrider.engine.memory_plan import ServingShape, check_memory
from outrider.engine.orders import decode_pairs, decode_step, encode_pairs, encode_step
from outrider.engine.paged_attention import BLOCK_SIZE, Attend, why_not_paged
from outrider.engine.rank_group import Order, RankGroup
from outrider.engine.sequence_chunk import SequenceChunk as SequenceChunk
from outrider.engine.shards import keep_own_heads, num_kv_heads_of, plan_overrides, take_shards
from outrider.errors import ConfigurationError
from outrider.machine import available_memory
from outrider.vocabulary_map import VocabularyMap

logger = logging.getLogger(__name__)

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
        self.max_model_len = _max_model_len(hf_config, config.max_model_len)
        self.num_layers = len(layers)
        self.num_parameters = num_parameters
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
    def is_fused(self) -> bool:
        """Whether a `FusedDecoder` runs the steps."""
        return self._fused is not None

    def fuse(self, forms: LinearForms) -> None:
        """Moves the weights into a `FusedDecoder`, which runs all steps from then on."""
        num_positions = self.max_model_len + LOOKAHEAD_ENTRIES
        self._fused = FusedDecoder(self.model, self.caches, num_positions, self.block_size, forms)

    def attend_paged(self, attend: Attend) -> None:
        """Steps attend through the block table from then on, where they fit."""
        num_blocks_max = self.allocator.blocks_for(self.max_model_len + LOOKAHEAD_ENTRIES)
        self._device_steps = DeviceSteps(
            self.model, self.layers, self.block_size, self._scratch_block_ids, num_blocks_max, attend
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


def _max_model_len(hf_config: Any, wanted: int | None) -> int:
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


def load_model(config: EngineConfig, group: RankGroup | None = None) -> Engine:
    """Loads weights, makes them batch-invariant and checks the result. Raises ModelLoadError with the cause.

    With a group each rank calls it, and has its shard.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from outrider.engine.published_loading import read_as_plain

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(config.num_threads)
    if not (config.model_dir / "config.json").is_file():
        raise ModelLoadError(
            f"no model in {config.model_dir}: config.json is missing; name a folder in Hugging Face format"
        )
    if not any(config.model_dir.glob("*.safetensors")) and not any(config.model_dir.glob("*.bin")):
        raise ModelLoadError(
            f"{config.model_dir} has a config.json but no weights (*.safetensors); was the download finished?"
        )
    model: Any
    try:
        hf_config = AutoConfig.from_pretrained(config.model_dir, local_files_only=True)
        refuse_other_states(hf_config)
        published = read_as_plain(hf_config)
        if published is not None and group is not None:
            raise ValueError(
                f"its weights are quantized ({published.name}), and such a checkpoint cannot be cut between ranks: "
                "serve it with one rank, or the model as it was before with --quantization"
            )
        _check_memory(config, group)
        model, loading = AutoModelForCausalLM.from_pretrained(
            config.model_dir,
            config=hf_config,
            dtype=DTYPES[config.dtype],
            attn_implementation="eager",  # the definition: sdpa, for one, knows no softcap
            local_files_only=True,
            output_loading_info=True,
            distributed_config=None if group is None else _distribution(config, group),
        )
    except UnsupportedModelError as error:
        raise ModelLoadError(f"the engine cannot run {config.model_dir}: {error}") from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load {config.model_dir}: {error}") from error
    if published is not None:
        logger.info("weights were published as %s; read into %s", published.name, config.dtype)
    if missing := sorted(loading["missing_keys"]):
        raise ModelLoadError(
            f"{config.model_dir} lacks {len(missing)} tensors of its model, such as {missing[0]}; "
            "the weights are incomplete or of another architecture"
        )
    _refuse_moving_frequencies(model, config)
    _refuse_places_in_batch(model, config)
    model.eval().requires_grad_(False).to(config.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # a shard counts as the whole
    if group is not None and num_kv_heads_of(model.config) < group.size:
        keep_own_heads(model, group, num_kv_heads_of(model.config))
    if config.quantization != "none":
        round_weights(model, config.quantization, model.get_output_embeddings())
    try:
        expected = _reference_logits(model)
        if group is not None:
            take_shards(model, group)
        layers = find_layout(model)
    except UnsupportedModelError as error:
        raise ModelLoadError(f"the engine cannot run {type(model).__name__}: {error}") from error
    model.set_attn_implementation(ATTENTION_NAME)
    engine = Engine(model, config, layers, num_parameters, group)
    forms = LinearForms(config.quantization)
    obstacle = why_not(model) if config.use_kernels else "told not to"
    if obstacle is None:
        engine.fuse(forms)
    else:
        logger.info("without compiled kernels: %s", obstacle)
        split_experts(model, forms.build)
        run_in_blocks(model)
        make_batch_invariant(model, forms, model.get_output_embeddings())
    logger.info("linear layers: %s", forms.report)
    if config.is_cuda:
        _use_device(engine, is_plain=all(layer.is_plain for layer in layers))
    _check_against(engine, expected)
    _return_freed_memory()
    return engine


def _use_device(engine: Engine, *, is_plain: bool) -> None:
    """FlashAttention and CUDA graphs where the model permits them; says where it does not."""
    obstacle = why_not_paged(engine.layers, engine.block_size, is_plain=is_plain)
    if obstacle is not None:
        logger.warning("attention without FlashAttention, which is slow for long texts: %s", obstacle)
        return
    from torch.nn.attention.varlen import varlen_attn

    engine.attend_paged(varlen_attn)
    if not engine.config.use_kernels or has_experts(engine.model):
        logger.info("steps are no CUDA graphs: told not to, or which experts run depends on the rows")
        return
    try:
        engine.capture_graphs()
    except RuntimeError as error:
        logger.warning("steps are no CUDA graphs: %s", error)


def _check_memory(config: EngineConfig, group: RankGroup | None) -> None:
    """Refuses what cannot fit before minutes are spent on loading it, and before the system ends the process for it."""
    num_ranks = 1 if group is None else group.size
    shape = ServingShape(
        DTYPES[config.dtype],
        config.quantization,
        num_ranks,
        "cuda" if config.is_cuda else "cpu",
        config.max_model_len,
        config.max_num_seqs,
    )
    # A GPU is a rank's own, a machine's memory is that of all ranks on it; they begin to load at the same time.
    num_ranks_here = 1 if config.is_cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = torch.cuda.mem_get_info()[0] if config.is_cuda else available_memory()
    check_memory(config.model_dir, shape, free, config.kv_cache_bytes, num_ranks_here=num_ranks_here)


def _return_freed_memory() -> None:
    """To the system. Every weight was copied into its form, and what it left stays with the C library otherwise: as
    much as the model's shard itself was seen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _distribution(config: EngineConfig, group: RankGroup) -> Any:
    """transformers' description of how the model is cut. Raises ModelLoadError."""
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    hf_config = AutoConfig.from_pretrained(config.model_dir, local_files_only=True)
    num_heads, num_kv_heads = hf_config.num_attention_heads, num_kv_heads_of(hf_config)
    if num_heads % group.size or (num_kv_heads % group.size and group.size % num_kv_heads):
        raise ModelLoadError(
            f"{group.size} ranks cannot share {num_heads} attention heads and {num_kv_heads} KV heads: their number "
            "must divide both, or divide the first and be a multiple of the second"
        )
    return DistributedConfig(tp_size=group.size, tp_plan=plan_overrides(hf_config, group.size) or None)


def _refuse_moving_frequencies(model: Any, config: EngineConfig) -> None:
    """Rotary frequencies that depend on the longest sequence of a batch would let company change the text (I2)."""
    hf_config = model.config.get_text_config()
    found = getattr(hf_config, "rope_parameters", None) or {}
    max_model_len = _max_model_len(hf_config, config.max_model_len)
    # One description for all layers, or one for each kind of layer.
    for rope in (
        [found] if "rope_type" in found else [each for each in found.values() if isinstance(each, dict)]
    ):
        rope_type = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            hf_config, "original_max_position_embeddings", None
        )
        if rope_type in ("longrope", "dynamic") and max_model_len > (original or max_model_len):
            raise ModelLoadError(
                f"the engine cannot run {type(model).__name__} at {max_model_len} tokens: its {rope_type} "
                f"frequencies change with the longest sequence beyond {original}; set --max-model-len to {original} "
                "or less"
            )


def _refuse_places_in_batch(model: Any, config: EngineConfig) -> None:
    """Llama 4 scales far queries by their place in the batch, which is a position only where one text runs alone."""
    hf_config = model.config.get_text_config()
    max_model_len = _max_model_len(hf_config, config.max_model_len)
    limit = getattr(hf_config, "floor_scale", None)
    if getattr(hf_config, "attn_temperature_tuning", False) and limit and max_model_len >= limit:
        raise ModelLoadError(
            f"the engine cannot run {type(model).__name__} at {max_model_len} tokens: from token {limit} on "
            f"transformers scales its queries by their place in the batch; set --max-model-len to {limit - 1} or less"
        )


PROBE_LENGTH = 24


def _probe_token_ids(vocab_size: int) -> list[int]:
    return [(7919 * i + 13) % vocab_size for i in range(PROBE_LENGTH)]


@torch.inference_mode()
def _reference_logits(model: Any) -> torch.Tensor:
    """transformers' own answer to the probe.  # [PROBE_LENGTH, vocab_size]"""
    token_ids = torch.tensor(
        [_probe_token_ids(model.config.get_text_config().vocab_size)], device=model.device
    )
    return model(input_ids=token_ids, use_cache=False).logits[0].float()


def _check_against(engine: Engine, expected: torch.Tensor) -> None:
    """Refuses a model whose logits through the paged cache, in two chunks, are not transformers' own."""
    name = type(engine.model).__name__
    token_ids = _probe_token_ids(engine.vocab_size)
    kv = engine.new_sequence()
    parts = []
    try:
        for part in (token_ids[: PROBE_LENGTH // 2], token_ids[PROBE_LENGTH // 2 :]):
            kv.extend(len(part))
            parts.append(engine.forward([SequenceChunk(kv, part, len(part))]))
    except Exception as error:  # whatever a foreign architecture raises, the operator needs its name
        raise ModelLoadError(f"the engine cannot run {name}: {error}") from error
    finally:
        kv.free()
    if engine.group is not None and engine.group.rank > 0:
        return  # logits are rank 0's
    differences = (torch.cat(parts) - expected).abs().amax(dim=1)
    # In bfloat16 a row may well go to another expert than transformers sends it to, where two are about equally good.
    is_chancy = engine.config.dtype == "bfloat16" and has_experts(engine.model)
    difference = float(differences.median() if is_chancy else differences.max())
    tolerance = (1e-3 if engine.config.dtype == "float32" else 0.1) * max(1.0, float(expected.abs().max()))
    if not difference <= tolerance:
        raise ModelLoadError(
            f"the engine cannot run {name}: its logits differ from transformers' by {difference:.3g} "
            f"(permitted {tolerance:.3g}); its attention is not the one the paged cache computes"
        )


@torch.inference_mode()
def batch_invariance_failures(engine: Engine, num_rounds: int = 3) -> list[str]:
    """Self-test: the logits of a sequence alone, in company, in blocks and chunked must have the same bits.

    Returns what differed, empty when the machine keeps invariant I2 for this model.
    """
    generator = np.random.default_rng(0)
    failures = []
    for round_index in range(num_rounds):
        length = min(40 + 110 * round_index, engine.max_model_len)
        tail = min(8, length // 2)
        token_ids = generator.integers(0, engine.vocab_size, length).tolist()
        one_by_one = _logits_in_pieces(engine, token_ids, [length - tail] + [1] * tail)
        first = (length - tail) // 4
        for label, pieces in (
            (f"a block of {tail}", [length - tail, tail]),
            ("chunks", [first, length - tail - first, tail]),
        ):
            together = _logits_in_pieces(engine, token_ids, pieces, company=round_index + 1)
            if not torch.equal(one_by_one[-tail:], together[-tail:]):
                failures.append(f"{label} at length {length}")
    return failures


def _logits_in_pieces(
    engine: Engine, token_ids: list[int], pieces: list[int], company: int = 0
) -> torch.Tensor:
    """Logits of every token, run in `pieces`, with `company` other sequences in every step."""
    kv = engine.new_sequence()
    others = [engine.new_sequence() for _ in range(company)]
    outputs, done = [], 0
    for piece in filter(None, pieces):
        chunks = []
        for number, other in enumerate(others):
            size = min(1 + (3 * number + piece) % 7, len(token_ids))
            other.extend(size)
            chunks.append(SequenceChunk(other, token_ids[:size], 1))
        kv.extend(piece)
        chunks.append(SequenceChunk(kv, token_ids[done : done + piece], piece))
        outputs.append(engine.forward(chunks)[company:])
        done += piece
    for sequence in (kv, *others):
        sequence.free()
    return torch.cat(outputs)
