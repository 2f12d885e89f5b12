"""Time per step, including what lies between steps, on the shell's clock. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.concurrency.decayed_mean import DecayedMean

DECAY = 0.98
"""Decay per step of the rate; it covers about the last fifty steps."""


@dataclass(slots=True)
class Pace:
    """Measures the time from one step to the next. Times are on the shell's clock, seconds."""

    finished_at: float | None = None  # of the last step, while there was something to do ever since
    has_waited: bool = False  # for hints, since then
    gap_ms: float = 0.0  # smoothed, from a step's end to the next one's start
    whole_ms: float = 0.0  # from the end of the step before to the last one's, waits included; 0.0: unknown
    # Tokens that a session was given lately, over the milliseconds that this took.
    tokens: DecayedMean = field(default_factory=lambda: DecayedMean(DECAY))

    def idle(self) -> None:
        """Notes that there is nothing to run: the next gap is not overhead."""
        self.finished_at = None

    def wait(self) -> None:
        """Notes a deliberate wait for hints before the next step."""
        self.has_waited = True

    def busy_ms(self, step_ms: float, now: float) -> float:
        """Takes a step that ends now; returns its time with the gap before it, deliberate waits not counted."""
        self.whole_ms = 0.0 if self.finished_at is None else (now - self.finished_at) * 1e3
        if self.whole_ms > 0.0 and not self.has_waited:
            self.gap_ms += 0.1 * (min(max(self.whole_ms - step_ms, 0.0), step_ms) - self.gap_ms)
        self.finished_at, self.has_waited = now, False
        return step_ms + self.gap_ms

    def commit(self, num_tokens: int, num_sessions: int) -> None:
        """Takes the tokens of the step that ended last, provided that it only decoded."""
        if self.whole_ms > 0.0:
            self.tokens.observe(num_tokens / num_sessions, self.whole_ms)

    @property
    def rate(self) -> float:
        """Tokens per millisecond and session lately, 0.0 while unknown."""
        return self.tokens.mean

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token of a session lately, 0.0 while unknown."""
        return 1.0 / self.rate if self.rate else 0.0
