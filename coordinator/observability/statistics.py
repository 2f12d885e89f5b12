"""Statistics of one request: its times, and the effect of speculation.

Pure: counts and clock readings go in. They come from the target's steps, not from its last message: a stop string ends
a request before that message, and a replay spreads it over two targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.hints.hint_source import SOURCE_NAMES
from outrider.objective import Objective
from protos.outrider.v1 import common_pb2


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of steps and hints. `per_step` has (hints verified, hints accepted) of each step that verified any."""

    num_steps: int = 0
    num_stale_hints: int = 0
    num_late_hints: int = 0
    num_prediction_tokens: int = 0  # verified
    num_accepted_prediction_tokens: int = 0
    # Only the target's last message has these: None if a stop string or a replay kept it away.
    num_hint_bytes: int | None = None
    num_forced_tokens: int | None = None
    num_lookup_tokens: int | None = None
    num_head_tokens: int | None = None  # accepted
    num_memory_tokens: int | None = None
    per_step: list[tuple[int, int]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # HintSource of each step that verified hints of any source

    def add_step(
        self, num_draft_tokens: int, num_accepted: int, source: int = common_pb2.HINT_SOURCE_UNSPECIFIED
    ) -> None:
        """Adds a step: a draft worker's hints verified and accepted, and the source of its first hint."""
        self.num_steps += 1
        if source:
            self.sources.append(source)
        if num_draft_tokens:
            self.per_step.append((num_draft_tokens, num_accepted))

    def add_predicted(self, num_verified: int, num_accepted: int) -> None:
        """Adds a step's tokens of the client's prediction."""
        self.num_prediction_tokens += num_verified
        self.num_accepted_prediction_tokens += num_accepted

    def add_end(self, stats: common_pb2.SpeculationStats, *, is_complete: bool) -> None:
        """Adds counts that only the target has; `is_complete`: it saw the whole session."""
        self.num_stale_hints += stats.num_stale_hints
        self.num_late_hints += stats.num_late_hints
        if is_complete:
            self.num_hint_bytes, self.num_forced_tokens = stats.num_hint_bytes, stats.num_forced_tokens
            self.num_lookup_tokens = stats.num_lookup_tokens
            self.num_head_tokens = stats.num_accepted_head_tokens
            self.num_memory_tokens = stats.num_memory_tokens

    @classmethod
    def merged(cls, parts: Sequence[SpeculationCounts]) -> SpeculationCounts:
        """Sums up a request's sequences; a count unknown for one is unknown for the whole."""
        return cls(
            num_steps=sum(part.num_steps for part in parts),
            num_stale_hints=sum(part.num_stale_hints for part in parts),
            num_late_hints=sum(part.num_late_hints for part in parts),
            num_prediction_tokens=sum(part.num_prediction_tokens for part in parts),
            num_accepted_prediction_tokens=sum(part.num_accepted_prediction_tokens for part in parts),
            num_hint_bytes=_sum_if_known([part.num_hint_bytes for part in parts]),
            num_forced_tokens=_sum_if_known([part.num_forced_tokens for part in parts]),
            num_lookup_tokens=_sum_if_known([part.num_lookup_tokens for part in parts]),
            num_head_tokens=_sum_if_known([part.num_head_tokens for part in parts]),
            num_memory_tokens=_sum_if_known([part.num_memory_tokens for part in parts]),
            per_step=[step for part in parts for step in part.per_step],
            sources=[source for part in parts for source in part.sources],
        )

    @property
    def num_draft_tokens(self) -> int:
        return sum(drafted for drafted, _ in self.per_step)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(accepted for _, accepted in self.per_step)

    @property
    def num_rejected_prediction_tokens(self) -> int:
        """Tokens of the prediction that were verified and not accepted."""
        return self.num_prediction_tokens - self.num_accepted_prediction_tokens

    def to_proto(self) -> common_pb2.SpeculationStats:
        """The counts as a message; histograms are over steps that verified at least one hint."""
        return common_pb2.SpeculationStats(
            num_steps=self.num_steps,
            num_spec_steps=len(self.per_step),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            num_stale_hints=self.num_stale_hints,
            num_late_hints=self.num_late_hints,
            acceptance_histogram=_histogram([accepted for _, accepted in self.per_step]),
            draft_length_histogram=_histogram([drafted for drafted, _ in self.per_step]),
            num_hint_bytes=self.num_hint_bytes or 0,
            num_forced_tokens=self.num_forced_tokens or 0,
            num_lookup_tokens=self.num_lookup_tokens or 0,
            num_accepted_head_tokens=self.num_head_tokens or 0,
            num_memory_tokens=self.num_memory_tokens or 0,
            num_prediction_tokens=self.num_prediction_tokens,
            num_accepted_prediction_tokens=self.num_accepted_prediction_tokens,
        )

    def to_json(self, *, num_speculative_tokens: int, is_detailed: bool, num_output_tokens: int = 0) -> dict[str, Any]:
        """The counts under the names that load tools read. `num_speculative_tokens`: most hints that a step
        can verify; 0: unknown.

        Means are over steps that verified hints; without any they are 1 and 0, as vLLM's are, which load tools rely on.
        """
        num_spec_steps, num_accepted = len(self.per_step), self.num_accepted_draft_tokens
        drafted_lengths = sorted({drafted for drafted, _ in self.per_step})
        num_spec_tokens = max(num_speculative_tokens, *drafted_lengths, 0)
        stats: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted / num_spec_steps if num_spec_steps else 1.0,
            "draft_acceptance_rate": num_accepted / self.num_draft_tokens if num_spec_steps else 0.0,
            # Load tools expect num_spec_tokens + 1 entries.
            "acceptance_histogram": _histogram([accepted for _, accepted in self.per_step], num_spec_tokens),
            "acceptance_histogram_by_draft_length": {
                str(length): _histogram([accepted for drafted, accepted in self.per_step if drafted == length])
                for length in drafted_lengths
            },
            "num_steps": self.num_steps,
            "num_spec_steps": num_spec_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_stale_hints": self.num_stale_hints,
            "num_late_hints": self.num_late_hints,
            "num_forced_tokens": self.num_forced_tokens,
            "num_lookup_tokens": self.num_lookup_tokens,
            "num_head_tokens": self.num_head_tokens,
            "num_steps_by_source": dict(Counter(_source_name(source) for source in self.sources)),
            "num_memory_tokens": self.num_memory_tokens,
            "num_accepted_prediction_tokens": self.num_accepted_prediction_tokens,
            "num_rejected_prediction_tokens": self.num_rejected_prediction_tokens,
            "num_hint_bytes": self.num_hint_bytes,
            "hint_bytes_per_token": (
                self.num_hint_bytes / num_output_tokens
                if self.num_hint_bytes is not None and num_output_tokens
                else None
            ),
            "num_spec_tokens": num_spec_tokens,
        }
        if is_detailed:
            stats["per_step_accepted"] = [accepted for _, accepted in self.per_step]
            stats["per_step_drafted"] = [drafted for drafted, _ in self.per_step]
            stats["per_step_source"] = [_source_name(source) for source in self.sources]
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
        """Records a chunk of tokens. Returns the gap to the one before in seconds, None for the first."""
        gap_s = None if self.last_chunk_s is None else now_s - self.last_chunk_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_chunk_s = now_s
        self.num_chunks += 1
        return gap_s

    @property
    def generation_ms(self) -> float:
        """Time from arrival to end; 0 before the end."""
        return 0.0 if self.end_s is None else (self.end_s - self.arrival_s) * 1000

    @property
    def time_to_first_token_ms(self) -> float | None:
        return None if self.first_token_s is None else (self.first_token_s - self.arrival_s) * 1000

    @property
    def decode_ms(self) -> float:
        """Time from the first to the last chunk; 0 with fewer than two."""
        if self.first_token_s is None or self.last_chunk_s is None:
            return 0.0
        return (self.last_chunk_s - self.first_token_s) * 1000

    def since_first_token_ms(self, now_s: float) -> float:
        """Time since the first token; 0 before it."""
        return 0.0 if self.first_token_s is None else (now_s - self.first_token_s) * 1000

    def tpot_ms(self, num_tokens: int) -> float | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        return self.decode_ms / (num_tokens - 1) if num_tokens > 1 else None

    @classmethod
    def merged(cls, parts: Sequence[RequestTimes]) -> RequestTimes:
        """Times of a request from its parallel sequences: from the first token of any to the end of the last."""
        firsts = [part.first_token_s for part in parts if part.first_token_s is not None]
        lasts = [part.last_chunk_s for part in parts if part.last_chunk_s is not None]
        ends = [part.end_s for part in parts if part.end_s is not None]
        return cls(
            arrival_s=parts[0].arrival_s,
            first_token_s=min(firsts, default=None),
            last_chunk_s=max(lasts, default=None),
            end_s=max(ends, default=None),
            num_chunks=sum(part.num_chunks for part in parts),
            queue_ms=parts[0].queue_ms,
            prefill_ms=parts[0].prefill_ms,
        )


def outcome_of(objective: Objective, parts: Sequence[tuple[RequestTimes, int]]) -> dict[str, bool]:
    """Whether a request met each part of its objective (`Objective.outcome`): whether each of its sequences did, given
    as its times and number of tokens."""
    outcomes = [objective.outcome(times.time_to_first_token_ms, times.tpot_ms(num)) for times, num in parts]
    return {kind: all(outcome[kind] for outcome in outcomes) for kind in outcomes[0]}


def slo_to_json(objective: Objective, outcome: Mapping[str, bool]) -> dict[str, Any]:
    """The objective as answers show it, and what became of it."""
    asked = {f"{kind}_ms": getattr(objective, f"{kind}_ms") for kind in outcome}
    return asked | {f"{kind}_met": is_met for kind, is_met in outcome.items()} | {"met": all(outcome.values())}


def times_to_json(parts: Sequence[tuple[RequestTimes, int]]) -> dict[str, float | None]:
    """Times of a request from those of its sequences, each with its number of tokens.

    Milliseconds, null if there is nothing to measure. Chunks carry several tokens under speculation, so `mean_itl_ms`
    (between chunks) says less than `time_per_output_token_ms`; both are means over all sequences.
    """
    times = RequestTimes.merged([part for part, _ in parts])
    decode_ms = sum(part.decode_ms for part, _ in parts)
    num_gaps = sum(max(part.num_chunks - 1, 0) for part, _ in parts)
    num_later_tokens = sum(max(num_tokens - 1, 0) for _, num_tokens in parts)
    num_tokens = sum(num_tokens for _, num_tokens in parts)
    return {
        "time_to_first_token_ms": times.time_to_first_token_ms,
        "generation_time_ms": times.generation_ms,
        "queue_time_ms": times.queue_ms,
        "mean_itl_ms": decode_ms / num_gaps if num_gaps else None,
        "time_per_output_token_ms": decode_ms / num_later_tokens if num_later_tokens else None,
        "tokens_per_second": 1000 * num_tokens / times.generation_ms if times.generation_ms > 0 else None,
    }


def _source_name(source: int) -> str:
    return SOURCE_NAMES.get(source, "other")  # a target's of a later release


def _sum_if_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _histogram(values: list[int], largest: int | None = None) -> list[int]:
    """Number of occurrences of each value from 0 to `largest`; None: the largest that occurs."""
    counts = Counter(values)
    return [counts[value] for value in range((max(values, default=-1) if largest is None else largest) + 1)]
