"""How long a request looks for a target to run at. Pure.

While its client has seen nothing, it is refused after a few attempts that count: another try costs the client little.
Targets that have not had it do not count; for these it waits as long as texts may wait in the queue. Nor do, for a
while, those that were lost while they had it: how many that may be is said in `poison`. Once tokens have been shown it
goes on wherever that is possible, and gives up only after no target has got it any further for long.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Patience:
    """Told after each attempt that failed, or that could not even begin."""

    attempts_max: int  # before the first token
    wait_max_s: float  # after it, without another one
    _num_attempts: int = 0
    _num_tokens: int = 0
    _stuck_since_s: float = 0.0

    def lasts(self, now_s: float, num_tokens: int, *, found_target: bool, counts: bool) -> bool:
        """Whether to try again. `num_tokens` have been committed so far."""
        if num_tokens > self._num_tokens:
            self._num_tokens, self._stuck_since_s = num_tokens, now_s
        if self.has_begun:
            return now_s - self._stuck_since_s < self.wait_max_s
        self._num_attempts += counts
        return found_target and self._num_attempts < self.attempts_max

    @property
    def has_begun(self) -> bool:
        """Whether there are tokens that must not be lost."""
        return self._num_tokens > 0
