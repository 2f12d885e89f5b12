"""How many hints to verify, and how long to wait for them. Pure.

Both questions are answered from measurements: what a step costs by the number of tokens fed, how often a session's
hints were accepted, when its hints tend to arrive. In greedy and coupled mode the draft model's confidence in a hint
counts as well. Under rejection sampling nothing looks at a hint's own token or probability, so the answer does not bias
it (invariant I4): stopping early at hints that look unlikely makes likely tokens likelier.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from target_worker.step_cost import StepLine


def allot(gains: Sequence[Sequence[float]], cost: StepLine, budget: int) -> list[int]:
    """Hints to feed per session, so that expected tokens per millisecond are greatest over the whole batch.

    `gains[s][i]` is the chance that hints 0 to i of session s hold, which is how many tokens hint i is worth; it never
    rises along a session. A hint costs one more token fed, and is taken as long as it beats the batch's rate without
    it. At most `budget` in all.
    """
    fixed_ms, token_ms = cost
    counts = [0] * len(gains)
    tokens = float(len(gains))
    step_ms = fixed_ms + token_ms * len(gains)
    # Of equal gains the earlier in its session comes first: none can be fed without those before it.
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
"""Waits are far shorter than this; a larger estimate would only take longer to be proved wrong."""
HOPE = 0.8
OUTLIER = 4.0
DOUBT = 1.5
"""Factors for times: where a session starts from what was usual; what one late arrival, or none, counts at most."""
NUM_REMEMBERED = 16
"""Commits that answers are still expected to: an answer is far sooner than so many steps."""


@dataclass(slots=True)
class HintTiming:
    """When one session's hints arrive, learned from when they did; seconds on the shell's clock.

    A draft worker says which text its hints follow. So its answer to a commit is known as such even when the target
    has gone on meanwhile. That only bounds how soon hints would come if they were waited for: steps and commits without
    pause keep the workers' cores and their links busy, and answers that nobody waits for come later.
    """

    first_s: float = 0.001  # from losing the cursor to the first hint below the new one
    gap_s: float = 0.0003  # between one more hint on the primary path and the next
    lost_at: float | None = None
    grown_at: float = 0.0  # the primary path's last change
    path_len: int = 0
    lost_lens: dict[int, float] = field(
        default_factory=dict
    )  # lengths committed without hints below, and when
    has_heard: bool = False  # anything yet; a draft worker that has to read the text first is not waited for
    smoothing: float = 0.2

    def fresh(self, now: float) -> HintTiming:
        """For a session whose tree is empty from now on: what was learned is where it starts from, in good hope.

        Hope that proves wrong costs a few waits. Without it one slow hour would be believed in for ever: where hints
        are not waited for, nothing shows that they would be sooner.
        """
        return HintTiming(HOPE * self.first_s, HOPE * self.gap_s, lost_at=now, grown_at=now)

    def learn_from(self, other: HintTiming) -> None:
        """Moves a little towards another session's times."""
        share = 0.5 * self.smoothing
        self.first_s += share * (other.first_s - self.first_s)
        self.gap_s += share * (other.gap_s - self.gap_s)

    def on_commit(self, now: float, path_len: int, committed_len: int) -> None:
        """The cursor has moved; `path_len` hints are still below it."""
        self.path_len, self.grown_at = path_len, now
        if path_len > 0:
            self.lost_at = None
            return
        self.lost_at = self.lost_lens[committed_len] = now
        if len(self.lost_lens) > NUM_REMEMBERED:
            del self.lost_lens[next(iter(self.lost_lens))]

    def on_hints(self, now: float, path_len: int, base_len: int, *, is_waited: bool) -> None:
        """Hints that follow the first `base_len` tokens arrived at `now`; the primary path is `path_len` long.

        is_waited: whether the target waits for hints, of this session or of others.
        """
        self.has_heard = True
        has_grown = path_len > self.path_len
        # Either the draft began anew where the target had lost it, or it had foreseen the target's token in time, but
        # the hints below it are only coming now.
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

    def on_disappointment(self, now: float) -> None:
        """A wait ended without what it was for: believe in later arrivals until one proves otherwise."""
        if self.lost_at is not None:
            # Perhaps the machine only paused for once: not more than so much later at a time.
            late_s = min(max(self.first_s, now - self.lost_at), DOUBT * self.first_s)
            self.first_s = min(max(late_s, 1.2 * self.first_s), FIRST_S_MAX)
        else:
            self.gap_s = max(self.gap_s * 1.2, min(now - self.grown_at, DOUBT * self.gap_s))

    def arrival(self, num_hints: int, now: float) -> float:
        """When the primary path should be `num_hints` long; what is overdue is expected to take as long again."""
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
    """How long to wait for hints before the next step, so that expected tokens per second are greatest; seconds.

    That is not the greatest rate of this step alone: a step with the one hint that is there may be quick for what it
    gives, and leaves the next one with none. As in any average over renewals, a wait pays when the tokens that it adds
    are more than the time that it takes gives usually: `usual_rate`, tokens per millisecond of the whole batch lately,
    or that of plain steps where it is more.

    Candidates are now and the expected arrivals of the next hints. `limits[s]` bounds the hints fed for session s, and
    `chances[s][i]`, for i below that, is the chance that its hint i holds, given those before it.
    `num_others` sessions of the same step get no hints, and wait all the same.
    """
    fixed_ms, token_ms = cost
    # worth[s][n]: tokens to expect of session s with n hints.
    worth = [
        list(itertools.accumulate(itertools.accumulate(own, operator.mul), initial=1.0)) for own in chances
    ]

    num_sessions = len(timings) + num_others
    usual_rate = max(usual_rate, num_sessions / cost.step_ms(num_sessions))
    # Of each session, when the hints come that it has not got and may be fed; in rising order.
    arrivals = [
        [timing.arrival(num_hints, now) for num_hints in range(timing.path_len + 1, limit + 1)]
        for timing, limit in zip(timings, limits, strict=True)
    ]

    def gain_after(wait: float) -> float:
        tokens, num_fed = float(num_others), num_others
        for timing, own, limit, times in zip(timings, worth, limits, arrivals, strict=True):
            num_hints = min(timing.path_len + bisect_right(times, now + wait), limit)
            tokens += own[num_hints]
            num_fed += num_hints + 1
        return tokens - usual_rate * (wait * 1e3 + fixed_ms + token_ms * num_fed)

    waits = {0.0}
    for times in arrivals:
        waits.update(wait for at in times if 0.0 < (wait := at - now) <= wait_s_max)
    return max(sorted(waits), key=gain_after)
