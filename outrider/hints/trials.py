"""Chooses between two ways of doing the same by their measured speed. Pure.

Now and then the other way is tried for a few steps. Trials become rarer while their result stays the same, end as soon
as they are clearly slower, and start only when earlier trials have lost at most 1 % of the steps since.
"""

from __future__ import annotations

import math

from outrider.concurrency.decayed_mean import DecayedMean

NUM_TRIAL_STEPS = 42
"""Most steps of a trial that count."""
NUM_TRIAL_STEPS_MAX = 128
"""Most steps of a trial in all. Draft workers that resume have to catch up with many sequences, and their cost
meanwhile says nothing about their worth; half of these steps are allowed for that."""
NUM_SETTLING_STEPS = 6
"""Steps after a change that do not count."""
NUM_STEADY_STEPS = 96
NUM_STEADY_STEPS_MAX = 4096
"""Steps between trials, doubled whenever a trial confirms the current way."""
TRIAL_AT_SHARE = 0.85
"""Share of the other way's last known speed below which the current way is put on trial at once."""
NUM_LOOK_STEPS = 8
"""Steps after which a trial may end early because it is clearly slower."""
NUM_STANDARD_ERRORS = 2.5
"""Standard errors that count as clear. More than two, because it is tested after every step."""
TRIAL_SHARE = 0.01
"""Share of all steps that trials may lose."""
OLD_WEIGHT = 0.25
"""Weight, at the start of a trial, of what was measured of that way before."""
NUM_KNOWN_STEPS = 24
"""Steps of a way after which a single step counts at most three times the mean."""


class Trials:
    """Measurements of two ways, `on` and `off`, and which of them is taken now."""

    __slots__ = (
        *("is_on", "in_trial", "num_steps", "num_steady", "num_steps_in_all", "num_lost", "num_lost_now"),
        *("trial", "on", "off", "min_gain"),
    )

    def __init__(self, is_on: bool, *, min_gain: float, num_steady: int = NUM_STEADY_STEPS) -> None:
        """is_on: the way to begin with. min_gain: speed of `on`, relative to `off`, from which it is preferred.
        num_steady: steps before the first trial."""
        self.is_on = is_on  # now; during a trial the other way
        self.in_trial = False
        self.num_steps = 0  # since the last change
        self.num_steady = num_steady
        self.num_steps_in_all = 0
        self.num_lost = 0.0  # steps lost to trials
        self.num_lost_now = 0.0  # steps lost to the current trial
        self.trial: list[float] = []  # speeds measured in the current trial
        self.on, self.off = DecayedMean(0.98), DecayedMean(0.98)
        self.min_gain = min_gain

    @property
    def is_on_by_default(self) -> bool:
        """The way in use when no trial is under way."""
        return self.is_on != self.in_trial

    def observe(self, speed: float, *, is_representative: bool) -> None:
        """Takes one step: its speed, and whether its sessions followed the current way."""
        self.num_steps += 1
        self.num_steps_in_all += 1
        own, other = self.on, self.off
        if not self.is_on:
            own, other = other, own
        if self.num_steps > NUM_SETTLING_STEPS and is_representative:
            is_known = own.weight > NUM_KNOWN_STEPS and not self.in_trial
            own.observe(min(speed, 3.0 * own.mean) if is_known else speed)
            if self.in_trial:
                self.trial.append(speed)
        if self.in_trial:
            self.num_lost_now += 1.0 - speed / other.mean if other.mean else 0.0
            is_seen = len(self.trial) >= NUM_TRIAL_STEPS or self.num_steps >= NUM_TRIAL_STEPS_MAX
            if is_seen or self._is_clearly_slower():
                self._decide()
        elif (self.num_steps >= self.num_steady and self.num_lost <= TRIAL_SHARE * self.num_steps_in_all) or (
            self.num_steps >= NUM_STEADY_STEPS and other.weight > 0.0 and own.mean < TRIAL_AT_SHARE * other.mean
        ):
            self._begin_trial(other)

    def _begin_trial(self, other: DecayedMean) -> None:
        """Starts a trial and discounts what was measured of the other way before."""
        other.total, other.weight = other.total * OLD_WEIGHT, other.weight * OLD_WEIGHT
        self.in_trial, self.is_on, self.num_steps = True, not self.is_on, 0
        self.trial.clear()
        self.num_lost_now = 0.0

    def _is_clearly_slower(self) -> bool:
        """Whether the trial may end early."""
        if len(self.trial) < NUM_LOOK_STEPS:
            return False
        tipping_point = self.off.mean * self.min_gain if self.is_on else self.on.mean / self.min_gain
        num_steps, mean = len(self.trial), sum(self.trial) / len(self.trial)
        # Not `statistics`: its exact fractions take tens of microseconds between two steps.
        variance = sum((speed - mean) ** 2 for speed in self.trial) / (num_steps - 1)
        return mean + NUM_STANDARD_ERRORS * math.sqrt(variance / num_steps) < tipping_point

    def _decide(self) -> None:
        is_better = self.on.mean > self.min_gain * self.off.mean
        is_confirmed = is_better != self.is_on  # the trial was of the other way
        self.num_steady = min(2 * self.num_steady, NUM_STEADY_STEPS_MAX) if is_confirmed else NUM_STEADY_STEPS
        self.in_trial = False
        self.num_lost += max(self.num_lost_now, 0.0)
        if is_better != self.is_on:
            self.is_on, self.num_steps = is_better, 0
