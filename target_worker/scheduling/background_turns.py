"""Lets background sessions take part in few steps while others run. Pure.

A row more makes a step longer, and so the gap between two tokens of everybody in it. Beside other sessions, those of
batches therefore take part only as far as the measured cost of a step says that it is almost free. That may be not at
all, so they have a turn in one step of `TURN_STEPS`, or after `TURN_S`: they are not silent for so long that they count
as lost, and at most one gap in 100 is longer for it. When nothing else runs they take part in every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from outrider.sampling_params import BACKGROUND_PRIORITY
from target_worker.hints.step_cost import StepLine
from target_worker.scheduling.batch_slots import StepRoom
from target_worker.scheduling.session import Session

FREE_SHARE: Final = 0.03
"""Most by which background sessions may lengthen a step of others, outside of their turns."""
TURN_STEPS: Final = 128
TURN_S: Final = 8.0


def is_background(session: Session) -> bool:
    """Whether a session runs for no waiting client."""
    return session.rank[0] >= BACKGROUND_PRIORITY


class BackgroundTurns:
    """The turns of one worker's background sessions."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._row_tokens = 1 + num_speculative_tokens  # most that a session feeds
        self._num_steps = 0  # without a turn
        self._since_s: float | None = None  # the last turn
        self._held: frozenset[str] = frozenset()

    def holds(self, session: Session) -> bool:
        """Whether the session was left out of the last step; nothing waits for its hints then."""
        return session.session_id in self._held

    def limit(self, room: StepRoom, line: StepLine, now: float) -> StepRoom:
        """Returns the sessions that take part in a step."""
        others = [each for each in room.decoding if not is_background(each)]
        prompts = [each for each in room.prefilling if not is_background(each[0])]
        is_alone = not others and not prompts
        has_all = len(others) == len(room.decoding) and len(prompts) == len(room.prefilling)
        since_s = now if self._since_s is None else self._since_s
        self._num_steps += 1
        if is_alone or has_all or self._num_steps >= TURN_STEPS or now - since_s >= TURN_S:
            self._num_steps, self._since_s, self._held = 0, now, frozenset()
            return room
        self._since_s = since_s
        num_tokens = FREE_SHARE * line.step_ms(len(others)) / line.token_ms
        behind = [each for each in room.decoding if is_background(each)]
        chosen = behind[: int(num_tokens / self._row_tokens)]
        held = {each.session_id for each in behind[len(chosen) :]}
        held |= {each.session_id for each, _ in room.prefilling if is_background(each)}
        self._held = frozenset(held)
        return replace(room, decoding=[*others, *chosen], prefilling=prompts)
