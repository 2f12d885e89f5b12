"""When a session gets a place here, and whether it can be in time. Pure.

What is expected is for others to plan by. Whether a session is sent away because of its deadline, before any work, is
decided by a forecast that leans to yes: it must be late though places come free as soon as is plausible, every hint
holds, steps take half the time that they take, and its text ends as soon as its parameters let it. (Of stop strings
only the coordinator knows: where the end of sequence is ignored, none is taken to come.)
"""

from __future__ import annotations

import math

from outrider.errors import DeadlineExceeded, Overloaded
from outrider.turnover import Turnover, retry_after_s
from target_worker.limits import SchedulerLimits
from target_worker.places import Places
from target_worker.session import Session

BEST_SHARE = 0.5
"""Of what a step takes now: no step is expected to be faster."""


class Forecast:
    """For all sessions of one worker. Times are the shell's clock, seconds."""

    def __init__(self, limits: SchedulerLimits, places: Places) -> None:
        self._limits = limits
        self._places = places
        self._turnover = Turnover()
        self._usual_len = 0.0  # of a session that comes, tokens

    def come(self, session: Session) -> None:
        """It waits from now on."""
        self._usual_len += 0.1 * (session.committed_len - self._usual_len)

    def leave(self, session: Session, now: float) -> None:
        """It has ended, for whatever reason."""
        if session.first_step_at is not None:
            self._turnover.leave(now - session.first_step_at)

    def wait_s(self, ms_per_token: float) -> float:
        """How long one that came now would wait, 0.0 when there is a place. May be asked from another thread.

        ms_per_token: of a session lately, 0.0 while unknown; used until the first one has ended.
        """
        num_ends = self._places.num_ends_before(len(self._places.waiting), int(self._usual_len))
        running = list(self._places.running.values())
        if not num_ends or not running:
            return 0.0
        mean_len = sum(each.max_len - each.num_given_tokens for each in running) / len(running)
        return num_ends * self._turnover.stay_s(mean_len * ms_per_token / 1e3) / len(running)

    def check_room(self, ms_per_token: float) -> None:
        """Raises Overloaded when no other session may wait. May be asked from another thread."""
        num_waiting = len(self._places.waiting)
        if num_waiting >= self._limits.max_num_waiting:
            raise Overloaded(f"{num_waiting} sessions wait already", retry_after_s(self.wait_s(ms_per_token)))

    def check_in_time(self, session: Session, now: float, step_ms: float) -> None:
        """Raises DeadlineExceeded for one that is late, or has not begun, here or elsewhere, and will be.

        step_ms: what a step of one token takes, 0.0 while unknown.
        """
        if now >= session.deadline_at:
            raise DeadlineExceeded("not finished within the request's deadline")
        has_begun = session.first_step_at is not None or session.num_output_tokens
        if has_begun or math.isinf(session.deadline_at):
            return
        num_before = self._places.num_before(session)
        num_ends = self._places.num_ends_before(num_before, session.committed_len)
        places_since = [each.first_step_at for each in self._places.running.values()]
        ages_s = [now - since for since in places_since if since is not None]
        least_s = self._turnover.least_wait_s(num_ends, ages_s) + self._least_work_s(session, step_ms)
        if now + least_s > session.deadline_at:
            raise DeadlineExceeded(
                f"{session.deadline_at - now:.2f} s are left of the request's time, and this worker would take "
                f"{least_s:.2f} s at the least"
            )

    def _least_work_s(self, session: Session, step_ms: float) -> float:
        """Once it has a place."""
        num_hints = 0 if session.speculation.is_plain else self._limits.num_speculative_tokens
        num_steps = -(-_least_tokens(session) // (1 + num_hints))
        return num_steps * step_ms * BEST_SHARE / 1e3


def _least_tokens(session: Session) -> int:
    """That a session has still to say before it can end."""
    sampling = session.sampling
    if sampling.ignore_eos and not sampling.stop_token_ids and session.grammar is None:
        return session.max_len - session.committed_len
    return max(sampling.min_tokens - session.num_output_tokens, 1)
