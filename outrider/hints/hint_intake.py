"""Decides whether hints of draft workers are accepted, by measuring whether they pay. Pure.

Even hints that are never verified cost time: they are parsed, stored and answered, and steps wait for them. No model
predicts that cost well, so it is measured. For every size of batch the worker compares its speed while it accepts hints
with its speed while it does not (`Trials`). While accepting hints does not clearly pay, all sessions are paused and
their draft workers are told so. A session whose own hints are hardly ever accepted is paused alone.

Speeds are relative to the cost of plain decoding of the same batch, fitted over plain steps alone (`StepCost`), so that
changing batch sizes and contexts do not matter. Nothing here depends on a hint's token or probability (invariant I4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.concurrency.decayed_mean import DecayedMean
from outrider.hints.step_cost import StepCost
from outrider.hints.trials import NUM_TRIAL_STEPS_MAX, Trials

NUM_FIRST_STEPS = 8
"""Plain steps that a worker starts with, as a reference."""
MIN_SPEEDUP = 1.04
"""Speed, relative to plain decoding, that accepting hints must reach. A trial cannot resolve smaller differences, and
draft workers serve other sessions better."""
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


class Regime(Trials):
    """Whether hints are accepted for one size of batch; on: accepting, off: plain decoding."""

    def __init__(self, accepts_hints: bool = True) -> None:
        super().__init__(accepts_hints, min_gain=MIN_SPEEDUP)

    @property
    def accepts_hints(self) -> bool:
        """Whether hints are accepted now; during a trial the other way."""
        return self.is_on

    @property
    def accepts_by_default(self) -> bool:
        """The way in use when no trial is under way."""
        return self.is_on_by_default

    @property
    def accepting(self) -> DecayedMean:
        return self.on

    @property
    def plain(self) -> DecayedMean:
        return self.off

    def is_representative(self, shares: IntakeShares) -> bool:
        """Whether a step measures the current way. One that accepts hints from draft workers that have not caught up
        does not, unless catching up takes very long."""
        if not self.accepts_hints:
            return shares.accepting == 0.0
        share = shares.receiving if self.num_steps < NUM_TRIAL_STEPS_MAX // 2 else shares.accepting
        return share >= 0.5


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
