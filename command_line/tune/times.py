"""Step times, interpolated between measured sizes, and the overhead of a worker around its model. Pure.

All times are milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KNEE: Final = 1.25
"""Cost of a step relative to one token. Up to this factor hints are almost free."""
MEMORY_BOUND_TOKENS: Final = 4
"""A step counts as memory-bound if more than this many tokens stay below the knee: their weights are read once for
all. Launching operations has the same effect in a small model, and the advice is the same."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time of one forward pass by number of tokens, for one sequence. Sizes rise and times never fall."""

    num_tokens: tuple[int, ...]
    step_ms: tuple[float, ...]
    sequence_ms: float = 0.0  # for each further sequence that the same tokens are spread over

    def __post_init__(self) -> None:
        if not self.num_tokens or len(self.num_tokens) != len(self.step_ms) or self.step_ms[0] <= 0.0:
            raise ValueError(f"no step times: {self.num_tokens}, {self.step_ms}")

    @classmethod
    def measured(cls, medians: Sequence[tuple[int, float]], sequence_ms: float = 0.0) -> StepTimes:
        """Builds times from (tokens, milliseconds) in any order. More tokens never cost less. Where they seem to, it
        was noise, and the sizes concerned get their mean (isotonic regression, pool adjacent violators)."""
        pooled: list[tuple[float, int]] = []  # mean time and number of sizes
        for _, time_ms in sorted(medians):
            mean, count = time_ms, 1
            while pooled and pooled[-1][0] > mean:
                other, other_count = pooled.pop()
                mean = (mean * count + other * other_count) / (count + other_count)
                count += other_count
            pooled.append((mean, count))
        times = tuple(mean for mean, count in pooled for _ in range(count))
        return cls(tuple(sorted(size for size, _ in medians)), times, max(sequence_ms, 0.0))

    def at(self, num_tokens: float, num_sequences: int = 1) -> float:
        """Time at a size: linear between measured sizes and, with the last slope, beyond them."""
        return self._line(num_tokens) + self.sequence_ms * (num_sequences - 1)

    def _line(self, num_tokens: float) -> float:
        sizes, times = self.num_tokens, self.step_ms
        if num_tokens <= sizes[0] or len(sizes) == 1:
            return times[0]
        right = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
        left = right - 1
        slope = (times[right] - times[left]) / (sizes[right] - sizes[left])
        return times[left] + slope * (num_tokens - sizes[left])

    @property
    def knee(self) -> float | None:
        """Tokens at which a step costs `KNEE` times the smallest one; None if no measured size does."""
        limit = KNEE * self.step_ms[0]
        for i in range(1, len(self.num_tokens)):
            if self.step_ms[i] >= limit:
                low, high = self.step_ms[i - 1], self.step_ms[i]
                share = (limit - low) / (high - low)
                return self.num_tokens[i - 1] + share * (self.num_tokens[i] - self.num_tokens[i - 1])
        return None

    @property
    def is_memory_bound(self) -> bool:
        """Whether a step with one token leaves most of the arithmetic units idle."""
        knee = self.knee
        return knee is None or knee > MEMORY_BOUND_TOKENS


@dataclass(frozen=True, slots=True)
class Overheads:
    """Time a worker spends around its model on scheduling, sampling and messages. It hardly depends on the model.

    Fitted at 835556f to the demo pair, one AMD EPYC (Zen 5) core per worker, workers connected by loopback gRPC. The
    fit ignores that two models share a cache and that a faster target asks its draft for more. It is therefore too
    optimistic where steps are as short as the small demo target's.
    """

    step_ms: float = 0.25  # every target step
    session_ms: float = 0.1  # per session
    hints_ms: float = 0.25  # every target step that may get hints, in addition
    hints_session_ms: float = 0.25  # per session
    draft_step_ms: float = 0.4  # every draft step
    draft_session_ms: float = 0.09  # per session that it grows
    link_ms: float = 0.15  # a message from worker to worker, one way

    @property
    def plain_ms(self) -> float:
        """Overhead of a plain step with one session, which `--overhead-ms` sets."""
        return self.step_ms + self.session_ms

    def scaled(self, factor: float) -> Overheads:
        """Overheads of a machine that takes `factor` times as long. The network's part stays."""
        return Overheads(
            self.step_ms * factor,
            self.session_ms * factor,
            self.hints_ms * factor,
            self.hints_session_ms * factor,
            self.draft_step_ms * factor,
            self.draft_session_ms * factor,
            self.link_ms,
        )

    def target_ms(self, num_sessions: int, *, has_hints: bool) -> float:
        """Overhead of one target step."""
        plain = self.step_ms + self.session_ms * num_sessions
        return plain + self.hints_ms + self.hints_session_ms * num_sessions if has_hints else plain

    def draft_ms(self, num_sessions: int) -> float:
        """Overhead of one draft step that grows `num_sessions` sessions."""
        return self.draft_step_ms + self.draft_session_ms * num_sessions
