"""Decides for each step whether the model also runs on the cores of the draft workers beside it. Pure.

Only where an operator asks for it (`outrider serve --share-cores`, `--num-threads-beside-draft`): it is not shown to
gain where the coordinator and clients need time on the same cores.

On a machine of few cores a draft worker is idle for most of a large target's step, and its core could take part in the
step. Beside a small target it is busy all the time, and a step that waits for a thread on its core takes longer than
one without. No model predicts well which it is, so it is measured (`Trials`), for every size of batch and only in
steps whose sessions accept hints. Steps that read prompts, and those that wait for nobody's hints, take all cores.

Every output of a product is one sum in a fixed order, whichever thread computes it, so that nothing here changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from outrider.hints.hint_intake import IntakeShares
from outrider.hints.step_cost import StepCost
from outrider.hints.trials import Trials

MIN_GAIN = 1.02
"""Speed on all cores, relative to the own ones, from which these are shared: draft workers are better left alone."""
NUM_FIRST_STEPS = 32
"""Steps on the own cores before sharing is tried; later trials are as rare as others."""


class Decoding(Protocol):
    """A session, as far as the choice depends on it."""

    @property
    def num_pending(self) -> int:
        """Committed tokens without KV: more than one while its prompt is read."""

    def can_expect_hints(self) -> bool:
        """Whether a draft worker follows it and its hints are accepted."""


class CoreSharing:
    """Choice and measurements of one worker. Before a step: `choose`; after it: `observe`."""

    def __init__(self) -> None:
        self._apart, self._shared = StepCost(), StepCost()
        self._trials: dict[int, Trials] = {}
        self._is_hinted = False
        self.uses_all_cores = True  # the step that comes

    @property
    def cost(self) -> StepCost:
        """The cost of steps such as the one that comes."""
        return self._shared if self.uses_all_cores else self._apart

    def trials(self, num_running: int) -> Trials:
        """Those for batches of about this size, rounded to a power of two. New ones begin as the nearest known ones."""
        size = round(math.log2(max(num_running, 1)))
        if size not in self._trials:
            nearest = min(self._trials, key=lambda known: abs(known - size), default=None)
            is_on = nearest is not None and self._trials[nearest].is_on_by_default
            self._trials[size] = Trials(is_on, min_gain=MIN_GAIN, num_steady=NUM_FIRST_STEPS)
        return self._trials[size]

    def choose(self, sessions: Sequence[Decoding]) -> StepCost:
        """Chooses the cores of the step of these sessions that comes; returns what such steps cost."""
        only_decodes = all(session.num_pending == 1 for session in sessions)
        self._is_hinted = only_decodes and any(session.can_expect_hints() for session in sessions)
        self.uses_all_cores = not self._is_hinted or self.trials(len(sessions)).is_on
        return self.cost

    def observe(
        self, num_running: int, num_committed: int, num_context: int, whole_ms: float, shares: IntakeShares | None
    ) -> None:
        """Takes a step that only decoded: tokens committed by all sessions, tokens in the KV, the time from the end of
        the step before to its own end in milliseconds, and the shares of sessions whose draft workers had caught up;
        None where all accept hints at any cost."""
        if not self._is_hinted or self._apart.coefficients is None:
            return
        # Relative to plain decoding on the own cores: that is not learned anew while all are in use.
        plain_ms = self._apart.line(num_context).step_ms(num_running)
        speed = num_committed / num_running * plain_ms / whole_ms
        self.trials(num_running).observe(speed, is_representative=shares is None or shares.receiving >= 0.5)
