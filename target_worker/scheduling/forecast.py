"""Estimates when a session gets a batch slot, and whether it can meet its deadline. Pure.

Estimates are for others to plan by. A session is refused for its deadline, before any work, only by a deliberately
optimistic forecast: it must miss the deadline even if slots become free as soon as is plausible, every hint is
accepted, steps take half their time, and its output ends as soon as its parameters let it. (Stop strings are known only
to the coordinator: where the end of sequence is ignored, the output is assumed to run to its limit.)
"""

from __future__ import annotations

import math

from outrider.concurrency.turnover import Turnover, retry_after_s
from outrider.errors import DeadlineExceeded, Overloaded
from target_worker.limits import SchedulerLimits
from target_worker.scheduling.background_turns import not_in_background
from target_worker.scheduling.batch_slots import BatchSlots
from target_worker.scheduling.session import Session

BEST_SHARE = 0.5
"""Share of the current step time; no step is expected to be faster."""


class Forecast:
    """Forecasts for all sessions of one worker. Times are on the shell's clock, seconds."""

    def __init__(self, limits: SchedulerLimits, slots: BatchSlots) -> None:
        self._limits = limits
        self._slots = slots
        self._turnover = Turnover()
        self._usual_len = 0.0  # mean length of a new session, tokens

    def come(self, session: Session) -> None:
        """Takes a session that starts to wait."""
        self._usual_len += 0.1 * (session.committed_len - self._usual_len)

    def leave(self, session: Session, now: float) -> None:
        """Takes a session that has ended, for whatever reason. One in the background is preempted for others, so that
        how long it took is nothing to them."""
        if session.first_step_at is not None and not session.is_background:
            self._turnover.leave(now - session.first_step_at)

    def wait_s(self, ms_per_token: float) -> float:
        """Expected wait of a session that came now; 0.0 when a slot is free. Safe to call from another thread.

        ms_per_token: recent time per token of a session, 0.0 while unknown; used until the first session has ended.
        """
        num_ends = self._slots.num_ends_before(len(not_in_background(self._slots.waiting)), int(self._usual_len))
        running = not_in_background(self._slots.running.values())
        if not num_ends or not running:
            return 0.0
        mean_len = sum(each.max_len - each.num_given_tokens for each in running) / len(running)
        return num_ends * self._turnover.stay_s(mean_len * ms_per_token / 1e3) / len(running)

    def check_room(self, ms_per_token: float, *, is_background: bool = False) -> None:
        """Raises Overloaded when no other session may wait. Those in the background are no reason to refuse others, so
        a worker holds at most `max_num_seqs` + `max_num_waiting` of each kind. Safe to call from another thread."""
        waiting = self._slots.waiting
        num_waiting = len(waiting if is_background else not_in_background(waiting))
        if num_waiting >= self._limits.max_num_waiting:
            raise Overloaded(f"{num_waiting} sessions are waiting", retry_after_s(self.wait_s(ms_per_token)))

    def check_in_time(self, session: Session, now: float, step_ms: float) -> None:
        """Raises DeadlineExceeded for a session past its deadline, or not begun anywhere and certain to miss it.

        step_ms: time of a step of one token, 0.0 while unknown.
        """
        if now >= session.deadline_at:
            raise DeadlineExceeded("not finished within the request's deadline")
        has_begun = session.first_step_at is not None or session.num_output_tokens
        if has_begun or math.isinf(session.deadline_at):
            return
        num_before = self._slots.num_before(session)
        num_ends = self._slots.num_ends_before(num_before, session.committed_len)
        slots_since = [each.first_step_at for each in not_in_background(self._slots.running.values())]
        ages_s = [now - since for since in slots_since if since is not None]
        least_s = self._turnover.least_wait_s(num_ends, ages_s) + self._least_work_s(session, step_ms)
        if now + least_s > session.deadline_at:
            raise DeadlineExceeded(
                f"the request's deadline is in {session.deadline_at - now:.2f} s, and this worker needs at "
                f"least {least_s:.2f} s"
            )

    def _least_work_s(self, session: Session, step_ms: float) -> float:
        """Least time that a session takes once it has a slot."""
        num_hints = 0 if session.speculation.is_plain else self._limits.num_local_tokens_max
        num_steps = -(-_least_tokens(session) // (1 + num_hints))
        return num_steps * step_ms * BEST_SHARE / 1e3


def _least_tokens(session: Session) -> int:
    """Least number of tokens that a session still generates before it can end."""
    sampling = session.sampling
    if sampling.ignore_eos and not sampling.stop_token_ids and session.grammar is None:
        return session.max_len - session.committed_len
    return max(sampling.min_tokens - session.num_output_tokens, 1)
