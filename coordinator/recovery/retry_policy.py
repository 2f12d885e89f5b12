"""The retry policy of a sequence: how long it looks for a target to run at. Pure.

Until its client has seen a token, it is refused after a few attempts that count: another try costs the client little.
Attempts at targets that never had it do not count; these it retries for as long as sequences may wait in the queue.
Targets that were lost while they had it do not count for a while either: `coordinator.recovery.poison` limits them.
Once tokens have been shown, it gives up only after no target has generated another one for `wait_max_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import OutriderError, WorkerUnanswered, WorkerUnreached


@dataclass(slots=True)
class RetryPolicy:
    """Decides on a retry after each attempt that failed or could not begin."""

    attempts_max: int  # before the first token
    wait_max_s: float  # after it, without another one
    _num_attempts: int = 0
    _num_tokens: int = 0
    _stuck_since_s: float = 0.0

    def permits_another(self, now_s: float, num_tokens: int, *, found_target: bool, uses_attempt: bool) -> bool:
        """Whether to try again. `num_tokens`: committed so far."""
        if num_tokens > self._num_tokens:
            self._num_tokens, self._stuck_since_s = num_tokens, now_s
        if self.has_begun:
            return now_s - self._stuck_since_s < self.wait_max_s
        self._num_attempts += uses_attempt
        return found_target and self._num_attempts < self.attempts_max

    def uses_attempt(self, error: OutriderError | None, *, is_loss: bool, waited_s: float) -> bool:
        """Whether an attempt that ended so uses up one of `attempts_max`. `waited_s`: since the request came."""
        if is_loss and waited_s < self.wait_max_s:
            return False
        return isinstance(error, WorkerUnanswered) or not isinstance(error, WorkerUnreached)

    @property
    def has_begun(self) -> bool:
        """Whether the sequence has tokens, which must not be lost."""
        return self._num_tokens > 0
