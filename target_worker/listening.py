"""Whether to listen to draft workers, learned from what it gains. Pure.

Even hints that are never verified cost something: they are read, kept and answered, and steps wait for them. What that
amounts to no model tells well, so it is measured: for every size of batch the worker compares its speed while sessions
listen with its speed while they do not, trying the other way for a few steps now and then, ever more rarely while the
answer stays the same, no longer than it takes to see that it is worse, and never again before what earlier trials lost
is a hundredth of the steps since. While listening does not clearly pay, all sessions rest: their draft workers are told
to pause. A session whose own hints hardly ever hold rests by itself.

Speeds are relative to what plain decoding of the same batch costs, as fitted over plain steps alone (`StepCost`), so
that sizes and contexts that change meanwhile do not matter. Nothing here looks at a hint's token or probability
(invariant I4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from target_worker.step_cost import StepCost

NUM_TRIAL_STEPS = 42
"""Steps of a trial of the other way that count, at the most."""
NUM_TRIAL_STEPS_MAX = 128
"""Of a trial in all. Draft workers that are woken have to catch up with many texts, and what they cost meanwhile says
nothing about what they are worth; for half of these steps they are given time."""
NUM_SETTLING_STEPS = 6
"""After a change, which do not count either."""
NUM_STEADY_STEPS = 96
NUM_STEADY_STEPS_MAX = 4096
"""Steps between trials, doubled whenever a trial confirms the present way."""
NUM_FIRST_STEPS = 8
"""Plain steps that a worker starts with, to have something to compare with."""
CLEARLY = 0.85
"""Of the other way's last known speed: a present way that has fallen below this is put to trial at once."""
WORTHWHILE = 1.04
"""Of the plain speed: what listening has to reach. Differences below it are within what a trial can tell, and a draft
worker has better things to do."""
NUM_LOOK_STEPS = 8
"""Of a trial, after which it ends as soon as it is clear that it does not pay."""
NUM_STANDARD_ERRORS = 2.5
"""What is clear: by so much, as the trial's steps scatter. It is looked at after every step, hence more than two."""
TRIAL_SHARE = 0.01
"""Of all steps: what trials may lose."""
OLD_NEWS = 0.25
"""Of the weight of what was seen of a way before the present trial of it."""
NUM_KNOWN_STEPS = 24
"""Seen of a way, after which no single step counts more than three usual ones."""
NUM_JUDGED_STEPS = 24
"""Of a session that listens, before its own hints are judged."""
MIN_WORTH = 0.05
"""Tokens a step that a session's hints must gain, what it costs to verify them subtracted."""
NUM_RESTED_STEPS = 64
NUM_RESTED_STEPS_MAX = 1024


@dataclass(slots=True)
class DecayedMean:
    decay: float
    total: float = 0.0
    weight: float = 0.0

    def observe(self, value: float) -> None:
        self.total = self.total * self.decay + value
        self.weight = self.weight * self.decay + 1.0

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


class Listeners(NamedTuple):
    """Of the sessions of a step that have a draft worker."""

    listening: float  # share
    hearing: float  # share that listens, and has heard something since it does


@dataclass(slots=True)
class Regime:
    """One size of batch: what is done now, and what is known of both ways."""

    is_listening: bool = True  # now, which in a trial is the other way
    in_trial: bool = False
    num_steps: int = 0  # since the last change
    num_steady: int = NUM_STEADY_STEPS
    num_steps_in_all: int = 0
    num_lost: float = 0.0  # of them, by trials
    num_lost_now: float = 0.0  # by the present one
    trial: list[float] = field(default_factory=list)  # speeds seen in the present one
    listening: DecayedMean = field(default_factory=lambda: DecayedMean(0.98))
    plain: DecayedMean = field(default_factory=lambda: DecayedMean(0.98))

    @property
    def means_to_listen(self) -> bool:
        """What is done when no trial is under way."""
        return self.is_listening != self.in_trial

    def is_as_meant(self, listeners: Listeners) -> bool:
        """Whether a step says something about what is done now. One in which sessions listen to draft workers that have
        not caught up does not, unless that takes them very long."""
        if not self.is_listening:
            return listeners.listening == 0.0
        share = listeners.hearing if self.num_steps < NUM_TRIAL_STEPS_MAX // 2 else listeners.listening
        return share >= 0.5

    def observe(self, speed: float, *, is_as_meant: bool) -> None:
        """One step: its speed, and whether sessions listened, or rested, as they are to."""
        self.num_steps += 1
        self.num_steps_in_all += 1
        own, other = self.listening, self.plain
        if not self.is_listening:
            own, other = other, own
        if self.num_steps > NUM_SETTLING_STEPS and is_as_meant:
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
            self.num_steps >= NUM_STEADY_STEPS and other.weight > 0.0 and own.mean < CLEARLY * other.mean
        ):
            self._begin_trial(other)

    def _begin_trial(self, other: DecayedMean) -> None:
        """What was known of the other way counts little beside what is seen now."""
        other.total, other.weight = other.total * OLD_NEWS, other.weight * OLD_NEWS
        self.in_trial, self.is_listening, self.num_steps = True, not self.is_listening, 0
        self.trial.clear()
        self.num_lost_now = 0.0

    def _is_clearly_slower(self) -> bool:
        """Whether the trial need not go on."""
        if len(self.trial) < NUM_LOOK_STEPS:
            return False
        tipping_point = (
            self.plain.mean * WORTHWHILE if self.is_listening else self.listening.mean / WORTHWHILE
        )
        num_steps, mean = len(self.trial), sum(self.trial) / len(self.trial)
        # Not `statistics`, whose exact fractions take tens of microseconds between two steps.
        variance = sum((speed - mean) ** 2 for speed in self.trial) / (num_steps - 1)
        return mean + NUM_STANDARD_ERRORS * math.sqrt(variance / num_steps) < tipping_point

    def _decide(self) -> None:
        is_better = self.listening.mean > WORTHWHILE * self.plain.mean
        is_confirmed = is_better != self.is_listening  # the trial was of the other way
        self.num_steady = min(2 * self.num_steady, NUM_STEADY_STEPS_MAX) if is_confirmed else NUM_STEADY_STEPS
        self.in_trial = False
        self.num_lost += max(self.num_lost_now, 0.0)
        if is_better != self.is_listening:
            self.is_listening, self.num_steps = is_better, 0


@dataclass(slots=True)
class SessionListening:
    """One session's part."""

    is_resting: bool = False
    num_steps: int = 0  # since it began to listen
    num_steps_left: int = 0  # of a rest of its own
    num_rested: int = NUM_RESTED_STEPS  # how long its next one lasts
    worth: DecayedMean = field(default_factory=lambda: DecayedMean(0.95))

    def turn(self, *, may_listen: bool) -> bool:
        """After every step: whether it rests from now on follows from its own rest and from what its batch may do.

        True when that has changed.
        """
        self.num_steps_left = max(self.num_steps_left - 1, 0)
        is_resting = not may_listen or self.num_steps_left > 0
        if is_resting == self.is_resting:
            return False
        self.is_resting = is_resting
        self.num_steps, self.worth = 0, DecayedMean(self.worth.decay)
        return True


class ListeningPolicy:
    """All sessions of one worker. After a step: `judge` for each that listened, `observe` once, then every `turn`."""

    def __init__(self) -> None:
        self._regimes: dict[int, Regime] = {}
        self._plain_cost = StepCost()
        self._speed = DecayedMean(0.98)
        self._num_plain_steps = 0

    @property
    def speed(self) -> float | None:
        """Of late steps, over what plain decoding of the same batches costs; None until that is known."""
        return self._speed.mean if self._speed.weight else None

    def regime(self, num_running: int) -> Regime:
        """That of batches of about this size; sizes a factor of two apart have their own.

        A new one begins as the nearest that is known: what does not pay for few does not pay for many.
        """
        size = round(math.log2(max(num_running, 1)))
        if size not in self._regimes:
            nearest = min(self._regimes, key=lambda known: abs(known - size), default=None)
            is_listening = nearest is None or self._regimes[nearest].means_to_listen
            self._regimes[size] = Regime(is_listening)
        return self._regimes[size]

    def may_listen(self, num_running: int) -> bool:
        return self._num_plain_steps >= NUM_FIRST_STEPS and self.regime(num_running).is_listening

    def start(self, num_running: int) -> SessionListening:
        """A new session's state."""
        return SessionListening(is_resting=not self.may_listen(num_running))

    def judge(self, own: SessionListening, worth_tokens: float) -> None:
        """A step of a listening session: tokens that its hints gained less those that verifying them cost."""
        own.worth.observe(worth_tokens)
        own.num_steps += 1
        if own.num_steps >= NUM_JUDGED_STEPS and own.worth.mean < MIN_WORTH:
            own.is_resting, own.num_steps_left = True, own.num_rested
            own.num_rested = min(2 * own.num_rested, NUM_RESTED_STEPS_MAX)

    def observe(
        self,
        num_running: int,
        num_fed: int,
        num_committed: int,
        num_context: int,
        whole_ms: float,
        listeners: Listeners | None,
    ) -> None:
        """A step of `num_running` sessions that did nothing but decode.

        num_fed: tokens, hints included; num_committed: tokens in all; num_context: tokens in the KV; whole_ms: from the
        end of the step before to its own, waits included; listeners: None when no session has a draft worker.
        """
        if listeners is None or listeners.listening == 0.0:
            self._plain_cost.observe(num_fed, whole_ms, num_context)
            self._num_plain_steps += 1
        if self._num_plain_steps < NUM_FIRST_STEPS:
            return
        plain_ms = self._plain_cost.line(num_context).step_ms(num_running)
        speed = (num_committed / num_running) * (plain_ms / whole_ms)
        self._speed.observe(speed)
        if listeners is not None:
            regime = self.regime(num_running)
            regime.observe(speed, is_as_meant=regime.is_as_meant(listeners))
