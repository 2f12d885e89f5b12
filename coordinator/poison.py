"""Requests that bring target workers down, known by what they had computed. Pure.

A run that loses as many workers as one run may is ended. What it asked for is remembered under a digest of its prompt
and grammar, so that its client's retries do not cost as many workers again: for CONVICTED_S the same is refused at
once. Innocent requests meet dying workers too, and popular prompts more often than others: whoever completes the same
prompt meanwhile clears it.
"""

from __future__ import annotations

from typing import Final

CONVICTED_S: Final = 120.0
CONVICTIONS_MAX: Final = 16
"""Prompts remembered at once, the latest ones; each is a label of a metric."""


class PoisonRecord:
    """Digests of prompts that cost too many workers. Times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def convict(self, prompt_digest: str, now_s: float) -> None:
        """A run with this prompt has lost as many workers as a run may."""
        self._until_s.pop(prompt_digest, None)
        self._until_s[prompt_digest] = now_s + CONVICTED_S
        while len(self._until_s) > CONVICTIONS_MAX:
            del self._until_s[next(iter(self._until_s))]

    def acquit(self, prompt_digest: str) -> bool:
        """A run with this prompt has come to its end. Whether that changes anything."""
        return self._until_s.pop(prompt_digest, None) is not None

    def time_left_s(self, prompt_digest: str, now_s: float) -> float:
        """For how long this prompt is refused; 0 when it is not."""
        return max(self._until_s.get(prompt_digest, now_s) - now_s, 0.0)

    def convicted(self, now_s: float) -> list[str]:
        """The prompts that are refused now."""
        self._until_s = {digest: until_s for digest, until_s in self._until_s.items() if until_s > now_s}
        return list(self._until_s)
