"""What one request cost and what speculation brought it.

Pure: counts and clock readings go in. Counted here from the target's steps rather than read from its last
message, because a stop string ends a request before that message and a replay spreads it over two targets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from protos.outrider.v1 import common_pb2


@dataclass(slots=True)
class SpeculationCounts:
    """Per step: (hints verified, hints accepted), for steps that verified at least one."""

    num_steps: int = 0
    num_stale_hints: int = 0
    per_step: list[tuple[int, int]] = field(default_factory=list)

    def add_step(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_steps += 1
        if num_draft_tokens:
            self.per_step.append((num_draft_tokens, num_accepted))

    @property
    def num_draft_tokens(self) -> int:
        return sum(drafted for drafted, _ in self.per_step)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(accepted for _, accepted in self.per_step)

    def to_proto(self) -> common_pb2.SpeculationStats:
        """The counts as the contract has them; histograms over the steps that verified at least one hint."""
        return common_pb2.SpeculationStats(
            num_steps=self.num_steps,
            num_spec_steps=len(self.per_step),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            num_stale_hints=self.num_stale_hints,
            acceptance_histogram=_histogram([accepted for _, accepted in self.per_step]),
            draft_length_histogram=_histogram([drafted for drafted, _ in self.per_step]),
        )

    def to_json(self, *, num_speculative_tokens: int, is_detailed: bool) -> dict[str, Any]:
        """Under the names that load tools read. `num_speculative_tokens` as asked for, 0 for the target's
        choice.

        Means are over steps that verified hints, and null when there were none.
        """
        num_spec_steps, num_accepted = len(self.per_step), self.num_accepted_draft_tokens
        drafted_lengths = sorted({drafted for drafted, _ in self.per_step})
        stats: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted / num_spec_steps if num_spec_steps else None,
            "draft_acceptance_rate": num_accepted / self.num_draft_tokens if num_spec_steps else None,
            "acceptance_histogram": _histogram([accepted for _, accepted in self.per_step]),
            "acceptance_histogram_by_draft_length": {
                str(length): _histogram(
                    [accepted for drafted, accepted in self.per_step if drafted == length]
                )
                for length in drafted_lengths
            },
            "num_steps": self.num_steps,
            "num_spec_steps": num_spec_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_stale_hints": self.num_stale_hints,
            "num_spec_tokens": num_speculative_tokens or max(drafted_lengths, default=0),
        }
        if is_detailed:
            stats["per_step_accepted"] = [accepted for _, accepted in self.per_step]
            stats["per_step_drafted"] = [drafted for drafted, _ in self.per_step]
        return stats


@dataclass(slots=True)
class RequestTimes:
    """Clock readings of one request, in seconds of one monotonic clock."""

    arrival_s: float
    first_token_s: float | None = None
    last_chunk_s: float | None = None
    end_s: float | None = None
    num_chunks: int = 0
    queue_ms: float | None = None  # as the target reports it
    prefill_ms: float | None = None

    def chunk(self, now_s: float) -> float | None:
        """A chunk of tokens arrived. Returns the gap to the one before in seconds, None for the first."""
        gap_s = None if self.last_chunk_s is None else now_s - self.last_chunk_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_chunk_s = now_s
        self.num_chunks += 1
        return gap_s

    @property
    def generation_ms(self) -> float:
        """Arrival to end; 0 before the end."""
        return 0.0 if self.end_s is None else (self.end_s - self.arrival_s) * 1000

    @property
    def time_to_first_token_ms(self) -> float | None:
        return None if self.first_token_s is None else (self.first_token_s - self.arrival_s) * 1000

    def to_json(self, num_output_tokens: int) -> dict[str, float | None]:
        """Milliseconds, null where there is nothing to measure. Chunks carry several tokens under
        speculation, so `mean_itl_ms` (between chunks) says less than `time_per_output_token_ms`."""
        decode_ms = (
            (self.last_chunk_s - self.first_token_s) * 1000
            if self.first_token_s and self.last_chunk_s
            else 0.0
        )
        return {
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "generation_time_ms": self.generation_ms,
            "queue_time_ms": self.queue_ms,
            "mean_itl_ms": decode_ms / (self.num_chunks - 1) if self.num_chunks > 1 else None,
            "time_per_output_token_ms": decode_ms / (num_output_tokens - 1)
            if num_output_tokens > 1
            else None,
            "tokens_per_second": (
                1000 * num_output_tokens / self.generation_ms if self.generation_ms > 0 else None
            ),
        }


def _histogram(values: list[int]) -> list[int]:
    """How often each value occurs, from 0 to the largest."""
    counts = Counter(values)
    return [counts[value] for value in range(max(values, default=-1) + 1)]
