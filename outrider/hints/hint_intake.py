"""Decides whether hints of draft workers are accepted, by measuring whether they pay. Pure.

Even hints that are never verified cost time: they are parsed, stored and answered, and steps wait for them. No model
predicts that cost well, so it is measured. For every size of batch the worker compares its speed while it accepts hints
with its speed while it does not. Now and then it tries the other way for a few steps. Trials become rarer while their
result stays the same, end as soon as they are clearly slower, and start only when earlier trials have lost at most 1 %
of the steps since. While accepting hints does not clearly pay, all sessions are paused and their draft workers are told
so. A session whose own hints are hardly ever accepted is paused alone.

Speeds are relative to the cost of plain decoding of the same batch, fitted over plain steps alone (`StepCost`), so that
changing batch sizes and contexts do not matter. Nothing here depends on a hint's token or probability (invariant I4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.concurrency.decayed_mean import DecayedMean
from outrider.hints.step_cost import StepCost

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
NUM_FIRST_STEPS = 8
"""Plain steps that a worker starts with, as a reference."""
TRIAL_AT_SHARE = 0.85
"""Share of the other way's last known speed below which the current way is put on trial at once."""
MIN_SPEEDUP = 1.04
"""Speed, relative to plain decoding, that accepting hints must reach. A trial cannot resolve smaller differences, and
draft workers serve other sessions better."""
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
NUM_JUDGED_STEPS = 24
"""Steps of an accepting session before its own hints are judged."""
MIN_WORTH = 0.05
"""Least tokens per step that a session's hints must gain, less the cost of verifying them."""
NUM_PAUSED_STEPS = 64
NUM_PAUSED_STEPS_MAX = 1024


class IntakeShares(NamedTuple):
    """Shares of a step's sessions, of those that have a draft worker."""

    accepting: float  # accepts hints
    receiving: float  # accepts hints and has received some since


@dataclass(slots=True)
class Regime:
    """Measurements and current way for one size of batch."""

    accepts_hints: bool = True  # now; during a trial the other way
    in_trial: bool = False
    num_steps: int = 0  # since the last change
    num_steady: int = NUM_STEADY_STEPS
    num_steps_in_all: int = 0
    num_lost: float = 0.0  # steps lost to trials
    num_lost_now: float = 0.0  # steps lost to the current trial
    trial: list[float] = field(default_factory=list)  # speeds measured in the current trial
    accepting: DecayedMean = field(default_factory=lambda: DecayedMean(0.98))
    plain: DecayedMean = field(default_factory=lambda: DecayedMean(0.98))

    @property
    def accepts_by_default(self) -> bool:
        """The way in use when no trial is under way."""
        return self.accepts_hints != self.in_trial

    def is_representative(self, shares: IntakeShares) -> bool:
        """Whether a step measures the current way. One that accepts hints from draft workers that have not caught up
        does not, unless catching up takes very long."""
        if not self.accepts_hints:
            return shares.accepting == 0.0
        share = shares.receiving if self.num_steps < NUM_TRIAL_STEPS_MAX // 2 else shares.accepting
        return share >= 0.5

    def observe(self, speed: float, *, is_representative: bool) -> None:
        """Takes one step: its speed, and whether its sessions followed the current way."""
        self.num_steps += 1
        self.num_steps_in_all += 1
        own, other = self.accepting, self.plain
        if not self.accepts_hints:
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
        self.in_trial, self.accepts_hints, self.num_steps = True, not self.accepts_hints, 0
        self.trial.clear()
        self.num_lost_now = 0.0

    def _is_clearly_slower(self) -> bool:
        """Whether the trial may end early."""
        if len(self.trial) < NUM_LOOK_STEPS:
            return False
        tipping_point = self.plain.mean * MIN_SPEEDUP if self.accepts_hints else self.accepting.mean / MIN_SPEEDUP
        num_steps, mean = len(self.trial), sum(self.trial) / len(self.trial)
        # Not `statistics`: its exact fractions take tens of microseconds between two steps.
        variance = sum((speed - mean) ** 2 for speed in self.trial) / (num_steps - 1)
        return mean + NUM_STANDARD_ERRORS * math.sqrt(variance / num_steps) < tipping_point

    def _decide(self) -> None:
        is_better = self.accepting.mean > MIN_SPEEDUP * self.plain.mean
        is_confirmed = is_better != self.accepts_hints  # the trial was of the other way
        self.num_steady = min(2 * self.num_steady, NUM_STEADY_STEPS_MAX) if is_confirmed else NUM_STEADY_STEPS
        self.in_trial = False
        self.num_lost += max(self.num_lost_now, 0.0)
        if is_better != self.accepts_hints:
            self.accepts_hints, self.num_steps = is_better, 0


@dataclass(slots=True)
class SessionIntake:
    """Pauses and judgement of one session."""

    is_paused: bool = False
    num_steps: int = 0  # since it last began to accept hints
    num_steps_left: int = 0  # of its own pause
    num_paused: int = NUM_PAUSED_STEPS  # length of its next pause
    worth: DecayedMean = field(default_factory=lambda: DecayedMean(0.95))

    def update(self, *, may_accept_hints: bool) -> bool:
        """Updates after a step whether the session is paused, by its own pause and by the batch's policy.

        Returns whether that has changed.
        """
        self.num_steps_left = max(self.num_steps_left - 1, 0)
        is_paused = not may_accept_hints or self.num_steps_left > 0
        if is_paused == self.is_paused:
            return False
        self.is_paused = is_paused
        self.num_steps, self.worth = 0, DecayedMean(self.worth.decay)
        return True


class IntakePolicy:
    """Policy for all sessions of a worker. After a step: `judge` each accepting session, `observe` once, then `update`
    each."""

    def __init__(self) -> None:
        self._regimes: dict[int, Regime] = {}
        self._plain_cost = StepCost()
        self._speed = DecayedMean(0.98)
        self._num_plain_steps = 0

    @property
    def speed(self) -> float | None:
        """Recent speed relative to plain decoding of the same batches; None while unknown."""
        return self._speed.mean if self._speed.weight else None

    def regime(self, num_running: int) -> Regime:
        """The regime of batches of about this size, rounded to a power of two.

        A new one starts as the nearest known one: what does not pay for few sessions does not pay for many.
        """
        size = round(math.log2(max(num_running, 1)))
        if size not in self._regimes:
            nearest = min(self._regimes, key=lambda known: abs(known - size), default=None)
            accepts_hints = nearest is None or self._regimes[nearest].accepts_by_default
            self._regimes[size] = Regime(accepts_hints)
        return self._regimes[size]

    def may_accept_hints(self, num_running: int) -> bool:
        """Whether sessions should accept hints at this number of running sessions."""
        return self._num_plain_steps >= NUM_FIRST_STEPS and self.regime(num_running).accepts_hints

    def start(self, num_running: int) -> SessionIntake:
        """Returns a new session's state."""
        return SessionIntake(is_paused=not self.may_accept_hints(num_running))

    def judge(self, own: SessionIntake, worth_tokens: float) -> None:
        """Takes a step of an accepting session: tokens its hints gained, less the cost of verifying them in tokens."""
        own.worth.observe(worth_tokens)
        own.num_steps += 1
        if own.num_steps >= NUM_JUDGED_STEPS and own.worth.mean < MIN_WORTH:
            own.is_paused, own.num_steps_left = True, own.num_paused
            own.num_paused = min(2 * own.num_paused, NUM_PAUSED_STEPS_MAX)

    def observe(
        self,
        num_running: int,
        num_fed: int,
        num_committed: int,
        num_context: int,
        whole_ms: float,
        shares: IntakeShares | None,
    ) -> None:
        """Takes a step of `num_running` sessions that only decoded.

        num_fed: tokens, hints included; num_committed: tokens in all; num_context: tokens in the KV; whole_ms: from the
        end of the step before to its own end, waits included; shares: None when no session has a draft worker.
        """
        if shares is None or shares.accepting == 0.0:
            self._plain_cost.observe(num_fed, whole_ms, num_context)
            self._num_plain_steps += 1
        if self._num_plain_steps < NUM_FIRST_STEPS:
            return
        plain_ms = self._plain_cost.line(num_context).step_ms(num_running)
        speed = (num_committed / num_running) * (plain_ms / whole_ms)
        self._speed.observe(speed)
        if shares is not None:
            regime = self.regime(num_running)
            regime.observe(speed, is_representative=regime.is_representative(shares))
