"""Settings of an engine. Loads without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from outrider.errors import ConfigurationError
from outrider.settings import CAPACITY, MODEL, REQUIRED, check, setting

MASK_TOKEN_KEYS: Final = ("pard_token", "ptd_token_id", "mask_token_id")
"""Names in config.json of the mask token of a model that guesses several tokens in one pass."""
AUTO: Final = "auto"
"""A `max_model_len`: the model's own, or what fits into memory if that is less."""


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings that an engine is built from. Raises ConfigurationError, naming the flag."""

    model: Path = setting(REQUIRED, "model folder in Hugging Face format", MODEL, "folder")
    dtype: Dtype = setting(Dtype.BFLOAT16, "type of weights and KV in memory", MODEL)
    quantization: Quantization = setting(
        Quantization.NONE, "quantize the weights while loading: int8 and fp8 halve their memory and move the logits "
        "a little; on a CPU a step with int8 takes about as long or longer, one with fp8 several times as long",
        MODEL,
    )  # fmt: skip
    device: Device = setting(Device.AUTO, "where the model runs; auto: on the GPU if there is one", MODEL)
    max_num_seqs: int = setting(32, "sequences that run at once", CAPACITY, "sequences", at_least=1)
    max_model_len: int | str | None = setting(
        None, "longest prompt plus output; auto: the model's, or what fits into memory if that is less",
        CAPACITY, "tokens", at_least=2, word=AUTO, aliases=("-1",), shows="the model's",
    )  # fmt: skip
    memory_utilization: float | None = setting(
        None, "share of the device's memory that this worker may use; KV gets what the weights and a step's work leave "
        "of it. Of a GPU or of a container with a limit it is a share of the whole, elsewhere of what is free",
        CAPACITY, "share", above=0, at_most=1, shows="0.9; 0.4 on a machine whose memory others use too",
    )  # fmt: skip
    kv_cache_gib: float | None = setting(
        None, "memory for KV, whatever --memory-utilization is. Sequences of a target worker allocate blocks of it as "
        "they grow, and preempt each other when it is full",
        CAPACITY, "GiB", above=0, shows="what --memory-utilization leaves",
    )  # fmt: skip
    block_size: int | None = setting(
        None, "KV entries in a block",
        CAPACITY, "tokens", at_least=1,
        shows="16 on a CPU, 256 on a GPU, whose attention takes multiples of that",
    )  # fmt: skip
    enable_prefix_caching: bool = setting(True, "share the KV of common prefixes between sequences", CAPACITY)
    num_threads: int = setting(1, "torch threads", CAPACITY, "threads", at_least=1)
    cpu_affinity: str | None = setting(None, "cores to run on, such as 0 or 0,1", CAPACITY, "cores", shows="any")
    enforce_eager: bool = setting(
        False, "run transformers' own modules instead of the compiled kernels, and use no CUDA graphs on a GPU",
        MODEL,
    )  # fmt: skip

    has_trees: bool = False  # hint trees are fed, not only sequences
    early_exit_layer: int | None = None  # only so many of the model's layers run (`early_exit`)
    num_threads_beside_draft: int | None = None  # of steps that leave cores to draft workers; None: of all steps
    beside_bytes: int = 0  # that stay free for what is loaded beside the model later, a draft head
    beside_bytes_per_token: int = 0  # the same of each KV entry

    def __post_init__(self) -> None:
        check(self)
        if self.quantization != Quantization.NONE and self.dtype != Dtype.BFLOAT16:
            raise ConfigurationError(f"{self.quantization} weights are computed in bfloat16: set --dtype bfloat16")

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30)
