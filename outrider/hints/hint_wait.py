"""The wait for hints before a step. Pure.

`speculation.best_wait` chooses its length from each session's timing; this module turns that into one deadline for the
step and learns from the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from outrider.hints.acceptance import BlockAcceptance
from outrider.hints.speculation import HintTiming, best_wait
from outrider.hints.step_cost import StepLine

WAIT_FACTOR = 3.0
WAIT_MARGIN_S = 5e-4
"""A wait lasts so many times the expected time, plus a constant: stopping right before the hints come is the worst
case. Hints that were waited for in vain are expected later, until waiting no longer pays
(`HintTiming.on_missed_hints`)."""


class Expecting(NamedTuple):
    """A session that hints may come for."""

    timing: HintTiming
    acceptance: BlockAcceptance
    limit: int  # most hints that its next step may feed


class HintWait:
    """The wait of one engine; at most one is under way. Times are on the shell's clock, seconds."""

    def __init__(self, longest_ms: float, num_wanted: int | None = None) -> None:
        """longest_ms: most that all waits of one step take together; num_wanted: so many hints of each session are
        waited for, however long they take; None: as many as pay."""
        self._longest_s = longest_ms / 1e3
        self._num_wanted = num_wanted
        self._deadline: float | None = None
        self.usual_timing = HintTiming()  # mean over sessions; new ones start from it

    def on_hints(self, timing: HintTiming, now: float, path_len: int, base_len: int) -> None:
        """Takes the arrival of a session's hints, as `HintTiming.on_hints`."""
        timing.on_hints(now, path_len, base_len, is_waited=self._deadline is not None)
        self.usual_timing.learn_from(timing)

    def end(self) -> None:
        """Ends the wait because the step begins."""
        self._deadline = None

    def until(
        self,
        now: float,
        expecting: Sequence[Expecting],
        num_running: int,
        line: StepLine,
        usual_rate: float,
        most_s: float = math.inf,
    ) -> float | None:
        """Returns the moment to wait for, or None to run the step.

        line and usual_rate: as in `best_wait`; most_s: so long objectives allow, which says nothing about when hints
        come.
        """
        if most_s <= 0.0:
            return None
        longest_s = self._longest_s
        if self._deadline is not None:
            longest_s = self._deadline - now
            if longest_s <= 0.0:
                for each in expecting:
                    if each.timing.path_len == 0:
                        each.timing.on_missed_hints(now)
                return None
        longest_s = min(longest_s, most_s)
        wait_s = self._wanted_s(now, expecting, num_running, line, usual_rate, longest_s)
        if wait_s <= 0.0:
            return None
        if self._deadline is None:
            self._deadline = now + min(WAIT_FACTOR * wait_s + WAIT_MARGIN_S, longest_s)
        return self._deadline

    def _wanted_s(
        self,
        now: float,
        expecting: Sequence[Expecting],
        num_running: int,
        line: StepLine,
        usual_rate: float,
        longest_s: float,
    ) -> float:
        """Seconds that the next step should wait; 0.0 for not at all."""
        if self._num_wanted is not None:
            has_enough = all(each.timing.path_len >= min(self._num_wanted, each.limit) for each in expecting)
            return 0.0 if has_enough else longest_s
        expecting = [each for each in expecting if each.timing.has_received]
        return best_wait(
            [each.timing for each in expecting],
            # By acceptance alone: the draft's confidence in hints to come is unknown.
            [each.acceptance.chances(each.limit) for each in expecting],
            [each.limit for each in expecting],
            line,
            now,
            longest_s,
            num_others=num_running - len(expecting),
            usual_rate=usual_rate,
        )
