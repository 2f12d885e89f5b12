"""Chooses how many hints to verify and how long to wait for them. Pure.

Both follow from measurements: step time by number of tokens fed, acceptance of a session's hints, their usual time of
arrival. In greedy and coupled mode the draft model's confidence in a hint counts as well. Under rejection sampling
nothing depends on a hint's own token or probability (invariant I4): stopping early at unlikely hints would make likely
tokens likelier.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.hints.step_cost import StepLine


def allot(gains: Sequence[Sequence[float]], cost: StepLine, budget: int) -> list[int]:
    """Returns the hints to feed per session that maximize expected tokens per millisecond over the whole batch.

    `gains[s][i]` is the probability that hints 0 to i of session s are all accepted, which is the number of tokens hint
    i is worth; it never rises along a session. A hint costs one more token fed, and is taken as long as it beats the
    batch's rate without it. At most `budget` in all.
    """
    token_ms = cost.token_ms
    counts = [0] * len(gains)
    tokens = float(len(gains))
    step_ms = cost.step_ms(len(gains))
    # Among equal gains the earlier hint of its session comes first: none can be fed without those before it.
    candidates = sorted(
        ((gain, i, session) for session, own in enumerate(gains) for i, gain in enumerate(own)),
        key=lambda candidate: (-candidate[0], candidate[1]),
    )
    for gain, _, session in candidates[:budget]:
        if gain * step_ms <= tokens * token_ms:
            break
        counts[session] += 1
        tokens += gain
        step_ms += token_ms
    return counts


FIRST_S_MAX = 0.5
"""Upper bound of the estimated wait. Real waits are far shorter; a larger estimate takes longer to correct."""
OPTIMISM = 0.8
OUTLIER = 4.0
LATE_FACTOR_MAX = 1.5
"""Factors for times: where a new session starts relative to the mean; the most that one late or missing arrival
counts."""
NUM_REMEMBERED = 16
"""Commits that may still be answered; answers come far sooner than after so many steps."""


@dataclass(slots=True)
class HintTiming:
    """Arrival times of one session's hints, learned from earlier ones; seconds on the shell's clock.

    A draft worker states which committed prefix its hints follow, so its answer to a commit is recognized even when the
    target has gone on meanwhile. Such an answer only bounds how soon hints would come if they were waited for: steps
    and commits without pause keep the workers' cores and links busy, so answers that nobody waits for come later.
    """

    first_s: float = 0.001  # from losing the cursor to the first hint below the new one
    gap_s: float = 0.0003  # between successive hints on the primary path
    lost_at: float | None = None
    grown_at: float = 0.0  # last change of the primary path
    path_len: int = 0
    # Committed length without hints below -> its time.
    lost_lens: dict[int, float] = field(default_factory=dict)
    has_received: bool = False  # whether hints have come; none are waited for during prefill
    smoothing: float = 0.2

    def fresh(self, now: float) -> HintTiming:
        """Returns the timing for a session whose tree is now empty: it starts somewhat below what was learned.

        A wrong optimistic start costs a few waits. Without it one slow hour would never be corrected: where hints are
        not waited for, nothing shows that they would come sooner.
        """
        return HintTiming(OPTIMISM * self.first_s, OPTIMISM * self.gap_s, lost_at=now, grown_at=now)

    def learn_from(self, other: HintTiming) -> None:
        """Moves a little towards another session's times."""
        share = 0.5 * self.smoothing
        self.first_s += share * (other.first_s - self.first_s)
        self.gap_s += share * (other.gap_s - self.gap_s)

    def on_commit(self, now: float, path_len: int, committed_len: int) -> None:
        """Takes a move of the cursor; `path_len` hints are still below it."""
        self.path_len, self.grown_at = path_len, now
        if path_len > 0:
            self.lost_at = None
            return
        self.lost_at = self.lost_lens[committed_len] = now
        if len(self.lost_lens) > NUM_REMEMBERED:
            del self.lost_lens[next(iter(self.lost_lens))]

    def on_hints(self, now: float, path_len: int, base_len: int, *, is_waited: bool) -> None:
        """Takes hints that follow the first `base_len` tokens, at `now`; the primary path is `path_len` long.

        is_waited: whether the target is waiting for hints of any session.
        """
        self.has_received = True
        has_grown = path_len > self.path_len
        # Either the draft started anew where the target had lost it, or it had foreseen the target's token
        # but the hints below it come only now.
        asked_at = self.lost_lens.pop(base_len, self.lost_at if has_grown else None)
        if asked_at is not None and now > asked_at and (is_waited or now - asked_at < self.first_s):
            self.first_s += self.smoothing * (min(now - asked_at, OUTLIER * self.first_s) - self.first_s)
        if not has_grown:
            return
        if self.lost_at is None and now > self.grown_at:
            gap = (now - self.grown_at) / (path_len - self.path_len)
            if is_waited or gap < self.gap_s:
                self.gap_s += self.smoothing * (min(gap, OUTLIER * self.gap_s) - self.gap_s)
        self.lost_at, self.grown_at, self.path_len = None, now, path_len

    def on_missed_hints(self, now: float) -> None:
        """Takes a wait that ended in vain: later arrivals are assumed until one comes sooner."""
        if self.lost_at is not None:
            # The machine may have paused once, so each wait raises the estimate by a bounded factor.
            late_s = min(max(self.first_s, now - self.lost_at), LATE_FACTOR_MAX * self.first_s)
            self.first_s = min(max(late_s, 1.2 * self.first_s), FIRST_S_MAX)
        else:
            self.gap_s = max(self.gap_s * 1.2, min(now - self.grown_at, LATE_FACTOR_MAX * self.gap_s))

    def arrival(self, num_hints: int, now: float) -> float:
        """Expected time at which the primary path is `num_hints` long; what is overdue is expected to take as long
        again."""
        if num_hints <= self.path_len:
            return now
        first = self.grown_at + self.gap_s if self.lost_at is None else self.lost_at + self.first_s
        if now > first:
            first = now + max(now - first, 0.25 * self.gap_s)
        return first + (num_hints - self.path_len - 1) * self.gap_s


def best_wait(
    timings: Sequence[HintTiming],
    chances: Sequence[Sequence[float]],
    limits: Sequence[int],
    cost: StepLine,
    now: float,
    wait_s_max: float,
    num_others: int = 0,
    usual_rate: float = 0.0,
) -> float:
    """Returns how long to wait for hints before the next step to maximize expected tokens per second; seconds.

    This is not the greatest rate of this step alone: a step with the one hint at hand may have a high rate and leave
    the next one with none. As in any renewal average, a wait pays when the tokens it adds exceed what its time usually
    yields: `usual_rate`, recent tokens per millisecond of the whole batch, or the rate of plain steps where that is
    higher.

    Candidates are now and the expected arrivals of the next hints. `limits[s]` bounds the hints fed for session s, and
    `chances[s][i]`, for i below that, is the probability that its hint i is accepted, given those before it.
    `num_others` sessions of the same step get no hints and wait all the same.
    """
    num_sessions = len(timings) + num_others
    usual_rate = max(usual_rate, num_sessions / cost.step_ms(num_sessions))
    # What each missing hint adds when it has arrived, in the order of arrival: one pass, however large the batch is.
    gained, num_fed = 0.0, num_sessions
    arrivals: list[tuple[float, float]] = []  # seconds from now, tokens
    for timing, own, limit in zip(timings, chances, limits, strict=True):
        worths = list(itertools.accumulate(own[:limit], operator.mul))
        num_there = min(timing.path_len, limit)
        gained += sum(worths[:num_there])
        num_fed += num_there
        arrivals += ((timing.arrival(n, now) - now, worths[n - 1]) for n in range(num_there + 1, limit + 1))
    best_s, best = 0.0, gained - usual_rate * cost.step_ms(num_fed)
    for wait_s, worth in sorted(arrivals):
        if wait_s > wait_s_max:
            break
        gained += worth
        num_fed += 1
        if (gain := gained - usual_rate * (wait_s * 1e3 + cost.step_ms(num_fed))) > best:
            best_s, best = max(wait_s, 0.0), gain
    return best_s
