"""What steps cost: measured times between measured sizes, and what a worker adds around the model. Pure.

All times are milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KNEE: Final = 1.25
"""Times a step over one token: up to there hints ride along almost for nothing."""
MEMORY_BOUND_TOKENS: Final = 4
"""A step is called memory-bound when more tokens than these stay below the knee: the weights are read once for all of
them. In a small model the launch of operations does the same, and the advice is the same too."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time of one forward pass by the number of tokens fed, for one sequence; sizes rise, times never fall."""

    num_tokens: tuple[int, ...]
    step_ms: tuple[float, ...]
    sequence_ms: float = 0.0  # more for every further sequence among which the same tokens are spread

    def __post_init__(self) -> None:
        if not self.num_tokens or len(self.num_tokens) != len(self.step_ms) or self.step_ms[0] <= 0.0:
            raise ValueError(f"no step times: {self.num_tokens}, {self.step_ms}")

    @classmethod
    def measured(cls, medians: Sequence[tuple[int, float]], sequence_ms: float = 0.0) -> StepTimes:
        """From (tokens, milliseconds) in any order. More tokens never cost less: where they seem to, it was noise, and
        the sizes concerned share their mean (isotonic regression, pool adjacent violators)."""
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
        """Linear between sizes and, with the last slope, beyond them."""
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
        """Tokens at which a step costs `KNEE` times the smallest one; None when no measured size does."""
        limit = KNEE * self.step_ms[0]
        for i in range(1, len(self.num_tokens)):
            if self.step_ms[i] >= limit:
                low, high = self.step_ms[i - 1], self.step_ms[i]
                share = (limit - low) / (high - low)
                return self.num_tokens[i - 1] + share * (self.num_tokens[i] - self.num_tokens[i - 1])
        return None

    @property
    def is_memory_bound(self) -> bool:
        """Whether a step over one token leaves most of the arithmetic idle."""
        knee = self.knee
        return knee is None or knee > MEMORY_BOUND_TOKENS


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a worker does around its model: scheduling, sampling, messages. Python's, so hardly the model's size.

    Fitted at 835556f to the demo pair, one AMD EPYC (Zen 5) core per worker, workers connected by loopback gRPC. What
    the fit leaves out (two models that share a cache, a draft that is asked for more the faster its target is) makes
    it too hopeful where steps are as short as the small demo target's.
    """

    step_ms: float = 0.25  # every target step
    session_ms: float = 0.1  # of it, for each session
    hints_ms: float = 0.25  # a target step that may get hints, besides
    hints_session_ms: float = 0.25  # of it, for each session
    draft_step_ms: float = 0.4  # every draft step
    draft_session_ms: float = 0.09  # of it, for each session that it grows
    link_ms: float = 0.15  # a message from worker to worker, one way

    @property
    def plain_ms(self) -> float:
        """Of a plain step with one session, which is what `--overhead-ms` names."""
        return self.step_ms + self.session_ms

    def scaled(self, factor: float) -> Overheads:
        """On a machine whose Python takes `factor` times as long; the network stays what it is."""
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
        """Of one target step."""
        plain = self.step_ms + self.session_ms * num_sessions
        return plain + self.hints_ms + self.hints_session_ms * num_sessions if has_hints else plain

    def draft_ms(self, num_sessions: int) -> float:
        """Of one draft step that grows so many sessions."""
        return self.draft_step_ms + self.draft_session_ms * num_sessions


FREE: Final = Overheads(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
