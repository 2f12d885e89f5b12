"""The wait for hints before a step. Pure.

`speculation.best_wait` chooses its length from each session's timing; this module turns that into one deadline for the
step and learns from the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.hints.speculation import HintTiming, best_wait
from outrider.hints.step_cost import StepLine
from target_worker.limits import SchedulerLimits
from target_worker.scheduling.session import Session

WAIT_FACTOR = 3.0
WAIT_MARGIN_S = 5e-4
"""A wait lasts so many times the expected time, plus a constant: stopping right before the hints come is the worst
case. Hints that were waited for in vain are expected later, until waiting no longer pays
(`HintTiming.on_missed_hints`)."""


class HintWait:
    """The wait of one worker; at most one is under way. Times are on the shell's clock, seconds."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._deadline: float | None = None
        self.usual_timing = HintTiming()  # mean over sessions; new ones start from it

    def on_hints(self, session: Session, now: float, path_len: int, base_len: int) -> None:
        """Takes the arrival of a session's hints, as `HintTiming.on_hints`."""
        session.timing.on_hints(now, path_len, base_len, is_waited=self._deadline is not None)
        self.usual_timing.learn_from(session.timing)

    def end(self) -> None:
        """Ends the wait because the step begins."""
        self._deadline = None

    def until(
        self, now: float, expecting: Sequence[Session], num_running: int, line: StepLine, usual_rate: float
    ) -> float | None:
        """Returns the moment to wait for, or None to run the step. The waits of one step total at most
        `hint_wait_ms_max`.

        expecting: sessions that hints may come for; line and usual_rate: as in `best_wait`.
        """
        longest_s = self._limits.hint_wait_ms_max / 1e3
        if self._deadline is not None:
            longest_s = self._deadline - now
            if longest_s <= 0.0:
                for session in expecting:
                    if session.timing.path_len == 0:
                        session.timing.on_missed_hints(now)
                return None
        wait_s = self._wanted_s(now, expecting, num_running, line, usual_rate, longest_s)
        if wait_s <= 0.0:
            return None
        if self._deadline is None:
            self._deadline = now + min(WAIT_FACTOR * wait_s + WAIT_MARGIN_S, longest_s)
        return self._deadline

    def _wanted_s(
        self,
        now: float,
        expecting: Sequence[Session],
        num_running: int,
        line: StepLine,
        usual_rate: float,
        longest_s: float,
    ) -> float:
        """Seconds that the next step should wait; 0.0 for not at all."""
        limit, wanted = self._limits.num_speculative_tokens, self._limits.wait_for_num_hints
        if wanted is not None:
            has_enough = all(session.timing.path_len >= min(wanted, session.hint_limit(limit)) for session in expecting)
            return 0.0 if has_enough else longest_s
        expecting = [session for session in expecting if session.timing.has_received]
        limits = [session.hint_limit(limit) for session in expecting]
        return best_wait(
            [session.timing for session in expecting],
            # By acceptance alone: the draft's confidence in hints to come is unknown.
            [session.acceptance.chances(own) for session, own in zip(expecting, limits, strict=True)],
            limits,
            line,
            now,
            longest_s,
            num_others=num_running - len(expecting),
            usual_rate=usual_rate,
        )
