"""Lets background sessions take part in few steps while others run. Pure.

A row more makes a step longer, and so the gap between two tokens of everybody in it. Beside other sessions, those of
batches therefore take part only as far as the measured cost of a step says that it is almost free. That may be not at
all, so they have a turn in one step of `TURN_STEPS`: fewer than one gap in 500 is longer for it. When nothing else runs
they take part in every step.

A session that is held back is no part of the batch: no step waits for its hints, and whether hints pay is measured and
decided without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from outrider.hints.step_cost import StepCost
from target_worker.scheduling.session import Session

FREE_SHARE: Final = 0.03
"""Most by which background sessions may lengthen a step of others, outside of their turns."""
TURN_STEPS: Final = 512
"""With one in 128, four of five of the gaps that the 99th percentile leaves out would be those of turns."""


def not_in_background(sessions: Iterable[Session]) -> list[Session]:
    """The sessions that a client waits for. Safe to call from any thread."""
    return [session for session in list(sessions) if not session.is_background]


class BackgroundTurns:
    """The turns of one worker's background sessions. Before each step: `hold`, then `begin_step`."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._row_tokens = 1 + num_speculative_tokens  # most that a session feeds
        self._num_steps = 0  # without a turn
        self._held: frozenset[str] = frozenset()
        self.is_turn = False  # whether the current step has the sessions that are held back, too

    def hold(self, running: Collection[Session], cost: StepCost) -> list[Session]:
        """Decides which of the running sessions are held back, and returns the others; all are ordered by rank."""
        others = not_in_background(running)
        if not others or len(others) == len(running):
            self._held = frozenset()
            return list(running)
        line = cost.line(sum(each.committed_len for each in others))
        num_free = int(FREE_SHARE * line.step_ms(len(others)) / line.token_ms / self._row_tokens)
        behind = [each for each in running if each.is_background]
        free = [each.session_id for each in behind if each.num_pending == 1][:num_free]
        self._held = frozenset(each.session_id for each in behind) - frozenset(free)
        return self.active(running)

    def active(self, running: Iterable[Session]) -> list[Session]:
        """The running sessions that take part in every step."""
        return [session for session in running if session.session_id not in self._held] if self._held else list(running)

    def is_held(self, session: Session) -> bool:
        """Whether the session is left out of all steps but its turns."""
        return session.session_id in self._held

    @property
    def left_out(self) -> frozenset[str]:
        """Ids of the running sessions that take no part in the step that has begun."""
        return frozenset() if self.is_turn else self._held

    def begin_step(self) -> None:
        """Decides whether the step that begins now is a turn of the sessions that are held back."""
        self._num_steps += 1
        self.is_turn = bool(self._held) and self._num_steps >= TURN_STEPS
        if self.is_turn or not self._held:
            self._num_steps = 0
