"""How long steps take with what lies between them, as the clock of the shell has it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98
"""Per step: the rate is that of the last fifty or so."""


@dataclass(slots=True)
class Pace:
    """What passes from one step to the next. Times are the shell's, seconds."""

    finished_at: float | None = None  # of the last step, while there was something to do ever since
    has_waited: bool = False  # for hints, since then
    gap_ms: float = 0.0  # smoothed, from a step's end to the next one's start
    whole_ms: float = 0.0  # from the end of the step before to the last one's, waits included; 0.0: unknown
    num_tokens: float = 0.0  # that a session was given lately, and
    total_ms: float = 0.0  # how long that took

    def idle(self) -> None:
        self.finished_at = None

    def wait(self) -> None:
        self.has_waited = True

    def busy_ms(self, step_ms: float, now: float) -> float:
        """What the step that ends now took together with the work before it, deliberate waits not counted."""
        self.whole_ms = 0.0 if self.finished_at is None else (now - self.finished_at) * 1e3
        if self.whole_ms > 0.0 and not self.has_waited:
            self.gap_ms += 0.1 * (min(max(self.whole_ms - step_ms, 0.0), step_ms) - self.gap_ms)
        self.finished_at, self.has_waited = now, False
        return step_ms + self.gap_ms

    def commit(self, num_tokens: int, num_sessions: int) -> None:
        """What the step that ended last gave, if it did nothing but decode."""
        if self.whole_ms > 0.0:
            self.num_tokens = DECAY * self.num_tokens + num_tokens / num_sessions
            self.total_ms = DECAY * self.total_ms + self.whole_ms

    @property
    def rate(self) -> float:
        """Tokens per millisecond and session lately, 0.0 while unknown."""
        return self.num_tokens / self.total_ms if self.total_ms else 0.0
