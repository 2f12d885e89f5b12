"""What bounds a target worker (I7), and what it does unless told otherwise. Pure, and loads without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import ConfigurationError
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS

MAX_BATCHED_TOKENS = 512  # rows for which `engine.linear` tries its forms


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one target worker (I7)."""

    max_num_seqs: int = 32  # sessions that run at once
    max_num_waiting: int = 64  # sessions that wait for a place
    max_num_batched_tokens: int = 512  # fed in one step
    max_model_len: int = 1024  # prompt plus output, tokens
    # That everybody who runs can grow by, tokens, when another gets a place. With less, sessions are let in and out
    # again for every block that comes free; with more, KV lies idle that most texts end before they need it.
    growth_tokens: int = 32
    # Hints fed per session and step; with the last token nine rows, a tile of the compiled products (`decode.cpp`).
    num_speculative_tokens: int = 8
    hint_wait_ms_max: float = 10.0
    wait_for_num_hints: int | None = None  # hints that a step waits for; None: as many as measurements say
    has_lookup: bool = True  # of hints in a session's own text, and in
    max_lookup_tokens: int = 0  # so many tokens of ended sessions' outputs
    may_rest: bool = True  # sessions that lose time by listening to their draft worker stop for a while
    max_early_sessions: int = 256  # that draft workers speak of before the coordinator does
    max_early_events: int = 128  # kept for each of them
    max_early_hints: int = 512  # in these events
    early_s: float = 5.0  # seconds that they are kept
    end_of_sequence_ids: frozenset[int] = field(default_factory=frozenset)
    enable_prefix_caching: bool = True  # prompts that begin alike share KV blocks

    def __post_init__(self) -> None:
        """Raises ConfigurationError, naming the flag."""
        if self.max_lookup_tokens < 0:
            raise ConfigurationError(
                f"--max-lookup-tokens is {self.max_lookup_tokens}; permitted: 0 and more"
            )
        if self.max_num_seqs < 1 or self.max_num_waiting < 1:
            raise ConfigurationError("--max-num-seqs and --max-num-waiting must be at least 1")
        if not self.max_num_seqs < self.max_num_batched_tokens <= MAX_BATCHED_TOKENS:
            raise ConfigurationError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; permitted: above --max-num-seqs "
                f"({self.max_num_seqs}), so that prompts get on, to {MAX_BATCHED_TOKENS}, as far as batch invariance "
                "is proven"
            )
        if self.growth_tokens < 0:
            raise ConfigurationError(f"growth_tokens is {self.growth_tokens}; permitted: 0 and more")
        if not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigurationError(
                f"--num-speculative-tokens is {self.num_speculative_tokens}; permitted: 0 to {MAX_SPECULATIVE_TOKENS}"
            )
