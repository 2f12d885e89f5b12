"""How long a request looks for a target to run at. Pure.

While its client has seen nothing, it is refused after a few attempts: another try costs the client little, and one that
brings targets down must not meet them all. Only targets that have had it count; for others it waits as long as texts
may wait in the queue. Once tokens have been shown it goes on wherever that is possible, and gives up only after no
target has got it any further for long.
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

    def lasts(self, now_s: float, num_tokens: int, *, found_target: bool, was_sent: bool) -> bool:
        """Whether to try again. `num_tokens` have been committed so far; `was_sent`: the target has had the request."""
        if num_tokens > self._num_tokens:
            self._num_tokens, self._stuck_since_s = num_tokens, now_s
        if self.has_begun:
            return now_s - self._stuck_since_s < self.wait_max_s
        self._num_attempts += was_sent
        return found_target and self._num_attempts < self.attempts_max

    @property
    def has_begun(self) -> bool:
        """Whether there are tokens that must not be lost."""
        return self._num_tokens > 0
