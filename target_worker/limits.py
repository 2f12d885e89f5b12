"""Settings of a target worker: bounds (I7) and how it is offered. Pure, and loads without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from outrider.engine.options import EngineOptions
from outrider.observability.vllm_names import MetricsNames
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS
from outrider.settings import CAPACITY, MODEL, NETWORK, SPECULATION, SettingError, check, same_as, setting

MAX_BATCHED_TOKENS = 512  # rows for which `engine.linear` tries its forms


class EngineName(StrEnum):
    OUTRIDER = "outrider"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How a target worker's model is run and offered."""

    engine: EngineName = setting(
        EngineName.OUTRIDER, "engine that runs the model; vllm: an installed vLLM, whose own flags follow after --",
        MODEL,
    )  # fmt: skip

    served_model_name: str | None = setting(
        None, "name that clients ask for", MODEL, "name", shows="the model folder's name"
    )
    draft_head: Path | None = setting(
        None, "folder of a draft head made for this model: EAGLE-3, Medusa, or --model itself where that has an MTP "
        "layer. It drafts where no draft worker does; draft workers that run it, EAGLE-3 alone, get what it reads of "
        "the hidden states with the committed tokens",
        MODEL, "folder", shows="none",
    )  # fmt: skip
    local_head: bool = setting(
        True, "with --draft-head, also run the head in this process; without, draft workers alone do",
        MODEL,
    )  # fmt: skip
    num_threads_beside_draft: int | None = setting(
        None, "threads of steps that verify hints, where that was measured to be faster than --num-threads: for a "
        "worker some of whose cores are those of its draft workers",
        CAPACITY, "threads", at_least=1, shows="--num-threads in all steps",
    )  # fmt: skip
    metrics_names: MetricsNames = setting(
        MetricsNames.BOTH, "names of the metrics that vLLM has, too: outrider_..., vllm:... or both; others have only "
        "ours",
        NETWORK,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one target worker (I7). Raises ConfigurationError, naming the flag."""

    max_num_seqs: int = same_as(EngineOptions, "max_num_seqs")
    max_num_waiting: int = setting(
        64, "sequences that may wait for a slot, not counting preempted ones",
        CAPACITY, "sequences", at_least=1,
    )  # fmt: skip
    max_num_batched_tokens: int = setting(512, "most tokens fed in one step", CAPACITY, "tokens")
    max_model_len: int = 1024  # prompt plus output, tokens
    # That everybody who runs can grow by, tokens, when another gets a place. With less, sessions are let in and out
    # again for every block that comes free; with more, KV lies idle that most texts end before they need it.
    growth_tokens: int = 32
    # With the last token nine rows, a tile of the compiled products (`decode.cpp`).
    num_speculative_tokens: int = setting(
        8, "most hints verified per sequence and step",
        SPECULATION, "tokens", at_least=0, at_most=MAX_SPECULATIVE_TOKENS,
    )  # fmt: skip
    verifies_branches: bool = setting(
        True, "also verify a draft worker's alternatives to its likeliest hints where that pays; greedy decoding and "
        "sampling with a seed, on CPUs",
        SPECULATION, flag="--branches", is_advanced=True,
    )  # fmt: skip
    num_local_tokens: int | None = setting(
        None, "most hints verified per sequence and step where the last come from lookup or a client's prediction, "
        "which cost no draft worker's time; fewer than --num-speculative-tokens count as so many",
        SPECULATION, "tokens", at_least=0, at_most=MAX_SPECULATIVE_TOKENS,
        shows=f"four times --num-speculative-tokens, at most {MAX_SPECULATIVE_TOKENS}",
    )  # fmt: skip
    hint_wait_ms_max: float = setting(
        10.0, "longest that a step waits for hints; 0: never",
        SPECULATION, "milliseconds", at_least=0, flag="--hint-wait-ms",
    )  # fmt: skip
    wait_for_num_hints: int | None = setting(
        None, "hints that a step waits for, within --hint-wait-ms",
        SPECULATION, "tokens", shows="as many as measured times say", is_advanced=True,
    )  # fmt: skip
    has_lookup: bool = setting(
        True, "also take hints from the sequence itself: from what followed when its last tokens occurred before",
        SPECULATION, flag="--lookup",
    )  # fmt: skip
    max_lookup_tokens: int = setting(
        0, "with --lookup, search ended sequences' outputs too, and keep so many of their tokens, such as 65536; "
        "sequences of one cache salt share them",
        SPECULATION, "tokens", at_least=0,
    )  # fmt: skip
    # Sequences that lose time by accepting hints of their draft worker stop for a while.
    may_pause: bool = setting(
        True, "never pause a draft worker whose hints cost more than they gain",
        SPECULATION, flag="--always-listen", is_inverse=True, is_advanced=True,
    )  # fmt: skip
    max_early_sessions: int = 256  # that draft workers name before the coordinator does
    max_early_events: int = 128  # kept for each of them
    max_early_hints: int = 512  # in these events
    early_s: float = 5.0  # seconds that they are kept
    end_of_sequence_ids: frozenset[int] = field(default_factory=frozenset)
    enable_prefix_caching: bool = same_as(EngineOptions, "enable_prefix_caching")

    @property
    def num_local_tokens_max(self) -> int:
        """Most hints verified per sequence and step, those of local sources included."""
        asked = 4 * self.num_speculative_tokens if self.num_local_tokens is None else self.num_local_tokens
        return max(min(asked, MAX_SPECULATIVE_TOKENS), self.num_speculative_tokens)

    def __post_init__(self) -> None:
        check(self)
        if not self.max_num_seqs < self.max_num_batched_tokens <= MAX_BATCHED_TOKENS:
            raise SettingError(
                "max_num_batched_tokens",
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; permitted: above --max-num-seqs "
                f"({self.max_num_seqs}), so that prompts get on, to {MAX_BATCHED_TOKENS}, as far as batch invariance "
                "is proven",
            )
        if self.growth_tokens < 0:
            raise SettingError("growth_tokens", f"growth_tokens is {self.growth_tokens}; permitted: 0 and more")
