"""The wait for hints before a step, of one worker. Pure.

Whether and how long is `speculation.best_wait`'s to say, from what is known of each session's hints; here that becomes
one deadline for the step, and what came of it is learned from.
"""

from __future__ import annotations

from collections.abc import Sequence

from target_worker.limits import SchedulerLimits
from target_worker.session import Session
from target_worker.speculation import HintTiming, best_wait
from target_worker.step_cost import StepLine

PATIENCE = 3.0
PATIENCE_S = 5e-4
"""A wait goes on for so many times what was expected, and so much: to stop right before the hints come is the worst of
both. Hints that were waited for in vain are expected later from then on, until no wait for them pays
(`HintTiming.on_disappointment`)."""


class HintWait:
    """At most one is under way. Times are the shell's, seconds."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._deadline: float | None = None
        self.usual_timing = HintTiming()  # of the sessions so far: where new ones start from

    def on_hints(self, session: Session, now: float, path_len: int, base_len: int) -> None:
        """As `HintTiming.on_hints`, for whoever waits."""
        session.timing.on_hints(now, path_len, base_len, is_waited=self._deadline is not None)
        self.usual_timing.learn_from(session.timing)

    def end(self) -> None:
        """The step begins."""
        self._deadline = None

    def until(
        self, now: float, hoping: Sequence[Session], num_running: int, line: StepLine, usual_rate: float
    ) -> float | None:
        """The moment to wait for, or None to go on. One step waits `hint_wait_ms_max` at the most, in all.

        hoping: sessions that hints may come for; line and usual_rate: as in `best_wait`.
        """
        longest_s = self._limits.hint_wait_ms_max / 1e3
        if self._deadline is not None:
            longest_s = self._deadline - now
            if longest_s <= 0.0:
                for session in hoping:
                    if session.timing.path_len == 0:
                        session.timing.on_disappointment(now)
                return None
        wait_s = self._wanted_s(now, hoping, num_running, line, usual_rate, longest_s)
        if wait_s <= 0.0:
            return None
        if self._deadline is None:
            self._deadline = now + min(PATIENCE * wait_s + PATIENCE_S, longest_s)
        return self._deadline

    def _wanted_s(
        self,
        now: float,
        hoping: Sequence[Session],
        num_running: int,
        line: StepLine,
        usual_rate: float,
        longest_s: float,
    ) -> float:
        """Seconds that the next step should wait, 0.0 for not at all."""
        limit, wanted = self._limits.num_speculative_tokens, self._limits.wait_for_num_hints
        if wanted is not None:
            has_enough = all(
                session.timing.path_len >= min(wanted, session.hint_limit(limit)) for session in hoping
            )
            return 0.0 if has_enough else longest_s
        hoping = [session for session in hoping if session.timing.has_heard]
        limits = [session.hint_limit(limit) for session in hoping]
        return best_wait(
            [session.timing for session in hoping],
            # By the record alone: how sure the draft will be of hints that are to come is not known.
            [session.acceptance.chances(own) for session, own in zip(hoping, limits, strict=True)],
            limits,
            line,
            now,
            longest_s,
            num_others=num_running - len(hoping),
            usual_rate=usual_rate,
        )
