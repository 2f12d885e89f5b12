"""How much KV a worker keeps, and whether it may start at all: decided before anything is loaded. Pure arithmetic.

A worker may use a share of its device (`DeviceMemory.budget`). The weights, the work of a step and the process come
first, KV gets the rest (`plan_kv`). Workers that share a device divide it so that each of them keeps the KV of equally
many tokens (`divide`). The worker, `outrider plan` and the checks of `outrider serve` all decide by these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider.engine.options import AUTO, EngineOptions
from outrider.errors import ConfigurationError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
OWN_SHARE: Final = 0.9
"""Share of a GPU, or of a container's memory, that a worker uses."""
SHARED_SHARE: Final = 0.4
"""Share of a machine's free memory that a worker uses. A target and a draft worker leave a fifth to the coordinator,
Redis and the system."""
ALL_SHARE: Final = 2 * SHARED_SHARE
"""Share of a machine's free memory that all its workers use together, where they are planned together."""
BLOCK_SIZE_ON_CPU: Final = 16
BLOCK_SIZE_ON_GPU: Final = 256
"""FlashAttention's block tables take multiples of it."""
NUM_SCRATCH_BLOCKS: Final = 32
"""Blocks beside the cache into which a draft's steps on a GPU copy the paths of hint trees."""
LOOKAHEAD_ENTRIES: Final = 256
"""KV entries that a sequence may use beyond its longest length: hints being verified, a draft's hint tree."""
LEAST_LEN: Final = 2


class ModelLoadError(ConfigurationError):
    """The model cannot be served; the message names the cause and a remedy."""


class UnevenRanksError(ModelLoadError):
    """So many ranks cannot share the model's heads."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory that one rank needs, bytes."""

    weights: int
    weights_read: int  # read in every step: all but an embedding that is not also the output layer
    kv_per_token: int
    step: int  # activations and logits of the largest step
    process: int  # including what oneDNN compiles while serving
    longest: int  # sequence that the model was made for, tokens

    @property
    def fixed(self) -> int:
        """Bytes before the first KV entry."""
        return self.weights + self.step + self.process


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that each rank of a worker may use, bytes."""

    usable: int
    free: int  # the bound of explicitly requested KV
    words: str  # for a refusal
    num_ranks: int = 1  # that share it


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, bytes."""

    total: int
    free: int
    is_own: bool  # a GPU or a container of the worker's own, not a machine that others use too

    def share(self, utilization: float | None, default: float = SHARED_SHARE) -> float:
        """The share that may be used: the given one, else by whom the device belongs to."""
        return utilization or (OWN_SHARE if self.is_own else default)

    def usable(self, share: float) -> int:
        """Bytes of a share of the whole device, if so much is free, and otherwise of what is free.

        So two workers with 0.6 and 0.3 get the same, in whatever order they start and start again.
        """
        return int(share * (self.total if share * self.total <= self.free else self.free))

    def budget(self, utilization: float | None, num_ranks: int = 1, default: float = SHARED_SHARE) -> Budget:
        """The part of each of `num_ranks` ranks on this device."""
        share = self.share(utilization, default)
        usable = self.usable(share)
        words = _usable_in_words(self.free, usable, share)
        return Budget(usable // num_ranks, self.free // num_ranks, words, num_ranks)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The KV cache of each rank of a worker."""

    num_blocks: int  # with the one that no sequence owns
    block_size: int  # entries
    num_scratch_blocks: int
    max_model_len: int  # tokens
    num_bytes: int  # of the blocks that sequences use

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV fits, over all sequences."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_longest(self) -> int:
        """Sequences of the longest length whose KV fits."""
        return (self.num_blocks - 1) // _num_blocks(self.max_model_len, self.block_size)


@dataclass(frozen=True, slots=True)
class Load:
    """The ranks of a model on one device, of one worker or several."""

    needs: ModelMemory
    options: EngineOptions
    num_ranks: int = 1


def plan_kv(needs: ModelMemory, budget: Budget, options: EngineOptions, device_type: str) -> KvPlan:
    """Decides the KV of each rank and the longest sequence. Raises ModelLoadError with the numbers and remedies.

    On a CPU there is at most the KV of `max_num_seqs` of the longest sequences; on a GPU all memory that is left is
    taken, where it keeps common prefixes.
    """
    needs = replace(
        needs,
        weights=needs.weights + options.beside_bytes,
        kv_per_token=needs.kv_per_token + options.beside_bytes_per_token,
    )
    length = _wanted_len(needs, options)
    block_size = _block_size(options, device_type)
    num_scratch = _num_scratch_blocks(options, device_type)
    block_bytes = block_size * needs.kv_per_token
    fixed = _fixed(needs, options, device_type)
    explicit = options.kv_cache_bytes
    num_blocks = (max(budget.usable - fixed, 0) if explicit is None else explicit) // block_bytes
    fitting = num_blocks * block_size - LOOKAHEAD_ENTRIES
    if fitting < length:
        if options.max_model_len != AUTO or fitting < LEAST_LEN:
            raise _too_little(needs, budget, options, length, fitting, fixed, block_size)
        length = fitting
    if device_type == "cpu":
        num_blocks = min(num_blocks, _num_blocks(length, block_size) * options.max_num_seqs)
    kv = num_blocks * block_bytes
    if explicit is not None and fixed + kv > budget.free:
        told = replace(budget, words=f"{in_words(budget.free * budget.num_ranks)} are free, and")
        missing = fixed + kv - budget.free
        raise _refusal(needs, told, options, missing, f"({in_words(kv)})", "Lower --kv-cache-gib or leave it out")
    return KvPlan(1 + num_blocks, block_size, num_scratch, length, kv)


def _too_little(
    needs: ModelMemory,
    budget: Budget,
    options: EngineOptions,
    length: int,
    fitting: int,
    fixed: int,
    block_size: int,
) -> ModelLoadError:
    """The refusal where not one sequence of `length` tokens has room, but one of `fitting` tokens."""
    needed = _num_blocks(length, block_size) * block_size * needs.kv_per_token
    shorter = f"--max-model-len {fitting} or {AUTO}" if fitting >= LEAST_LEN else ""
    explicit = options.kv_cache_bytes
    if explicit is not None:
        return ModelLoadError(
            f"{explicit / GIB:.2f} GiB of KV cache hold no sequence of {length} tokens; one needs {needed / GIB:.2f} "
            f"GiB: raise --kv-cache-gib or leave it out{shorter and f', or set {shorter}'}"
        )
    kv = f"of one sequence of {length} tokens ({needed / GIB:.2f} GiB)"
    remedies = f"Set {shorter}. {_REMEDIES}" if shorter else _REMEDIES
    return _refusal(needs, budget, options, fixed + needed - budget.usable, kv, remedies)


def divide(loads: Sequence[Load], memory: DeviceMemory, share: float, device_type: str) -> list[Budget]:
    """Divides a device: the budget of each rank of these loads. Together they fit into the share and keep the KV of
    equally many tokens, for a draft needs KV for every token of its target.

    Raises ModelLoadError where the models alone do not fit."""
    usable = memory.usable(share)
    processes = sum(each.num_ranks for each in loads)
    words = _usable_in_words(memory.free, usable, share, processes)
    fixed = [_fixed(each.needs, each.options, device_type) for each in loads]
    left = usable - sum(own * each.num_ranks for own, each in zip(fixed, loads, strict=True))
    if left < 0:
        told = (f"{each.num_ranks} × {in_words(own)}" for own, each in zip(fixed, loads, strict=True))
        raise ModelLoadError(
            f"{' and '.join(str(each.options.model) for each in loads)}: {words} {in_words(-left)} are missing for "
            f"the weights, a step's work and the processes ({' and '.join(told)}). {_REMEDIES}"
        )
    num_tokens = left // sum(each.needs.kv_per_token * each.num_ranks for each in loads)
    parts = [own + num_tokens * each.needs.kv_per_token for own, each in zip(fixed, loads, strict=True)]
    return [Budget(part, part, words) for part in parts]


_REMEDIES: Final = (
    "Raise --memory-utilization if the device is for this alone, quantize the model (--quantization), shard it over "
    "more ranks, or use a larger device; `outrider plan` shows what fits"
)


def _wanted_len(needs: ModelMemory, options: EngineOptions) -> int:
    given = options.max_model_len
    if given is None or given == AUTO:
        return needs.longest
    if not LEAST_LEN <= int(given) <= needs.longest:
        raise ModelLoadError(
            f"max_model_len is {given}; permitted for this model: {LEAST_LEN} to {needs.longest}, or {AUTO}"
        )
    return int(given)


def _block_size(options: EngineOptions, device_type: str) -> int:
    return options.block_size or (BLOCK_SIZE_ON_CPU if device_type == "cpu" else BLOCK_SIZE_ON_GPU)


def _num_scratch_blocks(options: EngineOptions, device_type: str) -> int:
    return NUM_SCRATCH_BLOCKS if device_type != "cpu" and options.has_trees else 0


def _fixed(needs: ModelMemory, options: EngineOptions, device_type: str) -> int:
    """Bytes before the first block of a sequence."""
    num_blocks = 1 + _num_scratch_blocks(options, device_type)
    return needs.fixed + num_blocks * _block_size(options, device_type) * needs.kv_per_token


def _num_blocks(length: int, block_size: int) -> int:
    """Blocks of one sequence of this length and its hints."""
    return -(-(length + LOOKAHEAD_ENTRIES) // block_size)


def _refusal(
    needs: ModelMemory, budget: Budget, options: EngineOptions, missing: int, kv: str, remedies: str
) -> ModelLoadError:
    ranks = f" of each of {budget.num_ranks} ranks" if budget.num_ranks > 1 else ""
    return ModelLoadError(
        f"{options.model} does not fit: {budget.words} {in_words(missing * budget.num_ranks)} are missing for the "
        f"weights ({in_words(needs.weights)}), a step's work ({in_words(needs.step)}), the process "
        f"({in_words(needs.process)}) and KV {kv}{ranks}. {remedies}"
    )


def _usable_in_words(free: int, usable: int, share: float, num_processes: int = 1) -> str:
    may = "may be used" if num_processes == 1 else f"{num_processes} processes may use together"
    return f"{in_words(free)} are free, and of the {in_words(usable)} that {may} (--memory-utilization {share:g})"


def in_words(num_bytes: float) -> str:
    """Formats a size, such as 15.0 GiB or 130 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if abs(num_bytes) >= unit:
            scaled = num_bytes / unit
            return f"{scaled:.0f} {name}" if scaled >= 100 else f"{scaled:.1f} {name}"
    return f"{num_bytes:.0f} B"
