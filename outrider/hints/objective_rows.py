"""Shares out the rows of a step so that as many sessions as possible keep their objectives, then for most tokens. Pure.

The idea is AdaServe's (Li et al. 2501.12162): each session with an objective first gets the rows that bring it the
tokens it needs in this step, and what is left goes where it brings most tokens. There the number of rows is given. Here
a row makes the step longer for everybody by its measured cost, so the length of the step follows from the rows: it must
not exceed what the tightest session affords with the tokens that it expects. What is left is shared out as SmartSpec
does (Liu et al. 2406.14066) and as `speculation.allot` does without objectives: a row is fed while it beats the batch's
tokens per millisecond.

A session affords a step of `spare_ms + token_ms × expected tokens`. It is *on track* in a step that is no longer.
Without an objective it affords any, and nothing here tells it apart: where all are on track, the rows are those of
`allot`. Otherwise

1. the most sessions are kept on track, those that need fewest rows first, with the fewest rows that do it;
2. those that cannot be on track get the rows that help themselves: that bring more of their time than they take;
3. if there are none such, other rows follow in order of gain, as long as they pay and everybody in 1. stays on track.

What an objective can cost others is bounded: their hints, never their own tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from outrider.hints.speculation import allot
from outrider.hints.step_cost import StepLine


class StepBudget(NamedTuple):
    """The length of a step that a session affords, milliseconds."""

    spare_ms: float  # in any case; negative: it is behind
    token_ms: float  # for each token that it expects

    def ms(self, num_tokens: float) -> float:
        """Longest step for so many expected tokens."""
        return self.spare_ms + self.token_ms * num_tokens


UNLIMITED: Final = StepBudget(math.inf, 0.0)
"""The budget of a session without an objective."""


def allot_within(
    gains: Sequence[Sequence[float]], cost: StepLine, budget: int, limits: Sequence[StepBudget]
) -> list[int]:
    """Returns the hints to feed per session, as `allot`, within what sessions afford.

    `gains` and `budget` are those of `allot`; `limits[s]` is the budget of session s.
    """
    counts = allot(gains, cost, budget)
    if all(limit is UNLIMITED for limit in limits):
        return counts
    step_ms = cost.step_ms(len(gains) + sum(counts))
    if all(
        step_ms <= limit.ms(1.0 + sum(own[:count])) for own, count, limit in zip(gains, counts, limits, strict=True)
    ):
        return counts
    return _Rows(gains, cost, budget, limits).allot()


def time_left_ms(
    gains: Sequence[Sequence[float]], counts: Sequence[int], cost: StepLine, limits: Sequence[StepBudget]
) -> float:
    """Time by which the step with these hints may still grow, so that nobody on track is behind; 0.0 where somebody
    is."""
    step_ms = cost.step_ms(len(gains) + sum(counts))
    affords = (limit.ms(1.0 + sum(own[:count])) for own, count, limit in zip(gains, counts, limits, strict=True))
    return max(min(affords, default=math.inf) - step_ms, 0.0)


class _Rows:
    """Rows under way: `counts[s]` hints of session s."""

    def __init__(
        self, gains: Sequence[Sequence[float]], cost: StepLine, budget: int, limits: Sequence[StepBudget]
    ) -> None:
        self._gains, self._cost, self._limits = gains, cost, limits
        self._budget = min(budget, sum(map(len, gains)))
        self._counts = [0] * len(gains)
        self._tokens = [list(itertools.accumulate(own, initial=1.0)) for own in gains]  # [session][hints fed]
        self._bound = [s for s, limit in enumerate(limits) if not math.isinf(limit.spare_ms)]
        self._on_track: list[int] = []  # of these

    def allot(self) -> list[int]:
        self._on_track = self._most_on_track()
        self._raise()
        behind = [s for s in self._bound if s not in self._on_track]
        self._help(behind)
        if not behind:
            self._add_what_pays()
        return self._counts

    @property
    def _num_rows(self) -> int:
        return sum(self._counts)

    def _step_ms(self, num_rows: int) -> float:
        return self._cost.step_ms(len(self._gains) + num_rows)

    def _affords(self, s: int, num_hints: int) -> float:
        return self._limits[s].ms(self._tokens[s][num_hints])

    def _is_behind(self, s: int) -> bool:
        return self._step_ms(self._num_rows) > self._affords(s, self._counts[s])

    def _most_on_track(self) -> list[int]:
        """The most sessions that one step can keep on track, with the fewest rows that do.

        In a step of a given number of rows each session needs a number of its own, which only rises with the step's
        length: the most sessions are those that need fewest, as long as their rows are not more than the step has.
        """
        best: list[int] = []
        needs = dict.fromkeys(self._bound, 0)
        for num_rows in range(self._budget + 1):
            step_ms = self._step_ms(num_rows)
            for s in list(needs):
                while needs[s] < len(self._tokens[s]) and step_ms > self._affords(s, needs[s]):
                    needs[s] += 1
                if needs[s] == len(self._tokens[s]):
                    del needs[s]  # nor in any longer step
            if len(needs) <= len(best):
                break
            found, num_left = [], num_rows
            for s in sorted(needs, key=needs.__getitem__):
                num_left -= needs[s]
                if num_left < 0:
                    break
                found.append(s)
            best = max(best, found, key=len)
        return best

    def _raise(self) -> bool:
        """Feeds what brings all sessions that should be on track there: a row makes the step longer, and so may ask
        for others. Returns whether it succeeded."""
        while lacking := [s for s in self._on_track if self._is_behind(s)]:
            for s in lacking:
                if self._counts[s] == len(self._gains[s]) or self._num_rows >= self._budget:
                    return False
                self._counts[s] += 1
        return True

    def _help(self, behind: Sequence[int]) -> None:
        """Feeds rows of sessions that are behind, where a row brings its session more time than it takes."""
        rows = [
            (self._limits[s].token_ms * gain, -i, s) for s in behind for i, gain in enumerate(self._gains[s])
        ]  # fmt: skip
        for worth_ms, _, s in sorted(rows, reverse=True):
            if worth_ms <= self._cost.token_ms or self._num_rows >= self._budget:
                return
            self._counts[s] += 1
            if any(map(self._is_behind, self._on_track)):
                self._counts[s] -= 1
                return

    def _add_what_pays(self) -> None:
        """Feeds rows in the order of `speculation.allot`, and by the same measure, with those that keep the others on
        track."""
        rows = [(-gain, i, s) for s, own in enumerate(self._gains) for i, gain in enumerate(own)]
        may_raise = True
        for negative_gain, i, s in sorted(rows):
            if i != self._counts[s]:  # fed already, or one before it could not be
                continue
            before, rate = list(self._counts), self._rate()
            if -negative_gain <= rate * self._cost.token_ms or self._num_rows >= self._budget:
                return
            self._counts[s] += 1
            is_kept = self._raise() if may_raise else not any(map(self._is_behind, self._on_track))
            if not is_kept or self._rate() <= rate:
                self._counts = before
                may_raise = False  # a longer step would ask for no less

    def _rate(self) -> float:
        """Expected tokens of the batch per millisecond."""
        num_tokens = sum(own[count] for own, count in zip(self._tokens, self._counts, strict=True))
        return num_tokens / self._step_ms(self._num_rows)
