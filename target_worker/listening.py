"""Whether to listen to a session's draft worker, learned from what listening gained and what it cost. Pure.

Even hints that are never verified cost something: they are read, kept and answered, and steps wait for them. A session
whose listening loses time rests: its draft worker is told to pause, and the target decodes plainly. What it is worth
depends on the load as much as on the draft, so the worker keeps one estimate per doubling of the batch, from which a
new session starts; a session's own experience comes on top. While an estimate says that listening does not pay, it is
tried again now and then, within a budget of steps: the price of finding out is bounded too.

Nothing here looks at a hint's token or probability (invariant I4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_TRIAL_STEPS = 16
"""Steps that a session listens before it is judged."""
TRIAL_SHARE = 0.02
"""Of a session's steps, spent on trials while listening is believed not to pay."""
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


@dataclass(slots=True)
class SessionListening:
    """One session's part: whether it rests, and what its steps with an open ear were worth, in tokens."""

    is_resting: bool = False
    num_steps_left: int = NUM_TRIAL_STEPS  # of the trial, or of the rest
    num_rested: int = NUM_RESTED_STEPS  # how long the next rest lasts
    num_trials: int = 0
    worth: DecayedMean = field(default_factory=lambda: DecayedMean(0.92))


class ListeningPolicy:
    """All sessions of one worker. A step calls `observe` for those that listened, then `turn`."""

    def __init__(self) -> None:
        self._worth: dict[int, DecayedMean] = {}  # by load, in tokens per listening session and step
        self._credit = 0.0  # steps that trials may still take

    def worth(self, num_running: int) -> DecayedMean:
        """The estimate for batches of this size, doublings apart."""
        return self._worth.setdefault(num_running.bit_length(), DecayedMean(0.995))

    def pays(self, num_running: int) -> bool:
        """True as long as too little is known."""
        worth = self.worth(num_running)
        return worth.weight < NUM_TRIAL_STEPS or worth.mean > 0.0

    def start(self, num_running: int) -> SessionListening:
        """A new session's state."""
        return SessionListening(is_resting=not self.pays(num_running))

    def observe(self, own: SessionListening, num_running: int, worth_tokens: float) -> None:
        """One step of a listening session: tokens that its hints gained less what they cost, as tokens."""
        self.worth(num_running).observe(worth_tokens)
        own.worth.observe(worth_tokens)
        own.num_steps_left -= 1
        if own.num_steps_left > 0 or own.worth.mean > 0.0:
            return
        own.is_resting = True
        own.num_steps_left = 0
        if self.pays(num_running):  # others gain: it is this session's text, or its draft worker
            own.num_steps_left = own.num_rested
            own.num_rested = min(2 * own.num_rested, NUM_RESTED_STEPS_MAX)

    def turn(self, candidates: Sequence[SessionListening], num_running: int) -> list[SessionListening]:
        """After a step: which of the sessions with a draft worker listen again from now on."""
        resting = [own for own in candidates if own.is_resting]
        for own in resting:
            own.num_steps_left -= 1
        if self.pays(num_running):
            woken = [own for own in resting if own.num_steps_left <= 0]
        else:
            self._credit = min(self._credit + TRIAL_SHARE * len(candidates), 2.0 * NUM_TRIAL_STEPS)
            woken = []
            if resting and self._credit >= NUM_TRIAL_STEPS:
                self._credit -= NUM_TRIAL_STEPS
                woken = [min(resting, key=lambda own: own.num_trials)]
        for own in woken:
            own.is_resting = False
            own.num_steps_left = NUM_TRIAL_STEPS
            own.num_trials += 1
            own.worth = DecayedMean(own.worth.decay)
        return woken
