"""Whether speculation pays for one request: speculating → paused → probing → speculating.

Pure: counts of target steps and news of the draft go in, actions for the session come out.

| state       | trigger         | next        | actions                                   |
|-------------|-----------------|-------------|-------------------------------------------|
| SPECULATING | LOW_ACCEPTANCE  | PAUSED      | detach, stop listening                    |
| SPECULATING | STARVED         | PAUSED      | detach, stop listening                    |
| SPECULATING | NO_DRAFT        | PAUSED      |                                           |
| PAUSED      | PAUSE_OVER      | PROBING     | start listening, attach                   |
| PROBING     | HIGH_ACCEPTANCE | SPECULATING |                                           |
| PROBING     | LOW_ACCEPTANCE  | PAUSED      | detach, stop listening; twice as long     |
| PROBING     | STARVED         | PAUSED      | detach, stop listening; twice as long     |
| PROBING     | NO_DRAFT        | PAUSED      | twice as long                             |

What is measured is the acceptance of hints that were *decided*: each step decides its accepted hints and at
most one rejected one, the rest of the block was never looked at. (Accepted over all verified hints would call
a draft with blocks of six at 0.16 hopeless although it doubles the speed: that is what one right guess in two
looks like.) A rate a promises 1 + a + a² + … tokens a step, so below 0.2 a draft brings at most a quarter;
0.3 to resume keeps a request from swinging. Both counts decay by a tenth per step, a memory of about ten
steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final


class FallbackState(Enum):
    """DISABLED is where a request stays that asked for no speculation."""

    SPECULATING = auto()
    PAUSED = auto()
    PROBING = auto()
    DISABLED = auto()


class Trigger(Enum):
    """What moves the state; derived from counts except NO_DRAFT, which the session reports."""

    LOW_ACCEPTANCE = auto()
    HIGH_ACCEPTANCE = auto()
    STARVED = auto()
    NO_DRAFT = auto()
    PAUSE_OVER = auto()


class FallbackAction(Enum):
    """What the session has to do, in the order given."""

    ATTACH = auto()  # to a draft worker, any
    DETACH = auto()  # frees the draft slot
    START_LISTENING = auto()  # SetSpeculation(enabled=true) at the target
    STOP_LISTENING = auto()


class IllegalTransition(RuntimeError):
    """A trigger that has no meaning in the state it met: our own bug. The state is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackPolicy:
    """The numbers. Rates are per decided hint, 0 to 1; lengths are committed tokens; steps are target steps."""

    pause_below: float = 0.2
    resume_above: float = 0.3
    judge_after_spec_steps: int = 8
    probe_spec_steps: int = 8
    starved_after_steps: int = 128  # steps in a row without a hint; the draft's prefill must fit in
    decay: float = 0.9  # what a step leaves of the counts before it
    pause_min_tokens: int = 64
    pause_max_tokens: int = 512

    def __post_init__(self) -> None:
        if not 0 <= self.pause_below <= self.resume_above <= 1:
            raise ValueError("need 0 <= pause_below <= resume_above <= 1")
        if not 0 < self.decay <= 1 or not 1 <= self.pause_min_tokens <= self.pause_max_tokens:
            raise ValueError("need 0 < decay <= 1 and 1 <= pause_min_tokens <= pause_max_tokens")


_S, _T, _A = FallbackState, Trigger, FallbackAction
_GIVE_UP: Final = (_A.DETACH, _A.STOP_LISTENING)
_TRANSITIONS: Final = MappingProxyType({
    (_S.SPECULATING, _T.LOW_ACCEPTANCE): (_S.PAUSED, _GIVE_UP),
    (_S.SPECULATING, _T.STARVED): (_S.PAUSED, _GIVE_UP),
    (_S.SPECULATING, _T.NO_DRAFT): (_S.PAUSED, ()),
    (_S.PAUSED, _T.PAUSE_OVER): (_S.PROBING, (_A.START_LISTENING, _A.ATTACH)),
    (_S.PROBING, _T.HIGH_ACCEPTANCE): (_S.SPECULATING, ()),
    (_S.PROBING, _T.LOW_ACCEPTANCE): (_S.PAUSED, _GIVE_UP),
    (_S.PROBING, _T.STARVED): (_S.PAUSED, _GIVE_UP),
    (_S.PROBING, _T.NO_DRAFT): (_S.PAUSED, ()),
})  # fmt: skip


class FallbackController:
    """One request's controller. `start` once, then `on_step` per target step and `on_no_draft` when it
    happens."""

    def __init__(self, policy: FallbackPolicy, *, is_enabled: bool) -> None:
        self._policy = policy
        self._pause_tokens = policy.pause_min_tokens
        self.state = FallbackState.SPECULATING if is_enabled else FallbackState.DISABLED
        self._reset_counts()

    @property
    def is_listening(self) -> bool:
        """Whether the target should verify hints in this state."""
        return self.state in (FallbackState.SPECULATING, FallbackState.PROBING)

    @property
    def acceptance(self) -> float:
        """Accepted share of the hints decided lately; 0 before the first."""
        return self._accepted / self._decided if self._decided else 0.0

    def start(self) -> tuple[FallbackAction, ...]:
        """Actions with which a session at a target begins, the first one and every replay."""
        self._steps_without_hints = 0
        return (FallbackAction.ATTACH,) if self.is_listening else ()

    def on_step(
        self, num_tokens: int, num_draft_tokens: int, num_accepted: int
    ) -> tuple[FallbackAction, ...]:
        """Takes one step's counts: tokens committed, hints verified, hints accepted."""
        if self.state is FallbackState.DISABLED:
            return ()
        if self.state is FallbackState.PAUSED:
            self._paused_tokens += num_tokens
            return self.handle(Trigger.PAUSE_OVER) if self._paused_tokens >= self._pause_tokens else ()
        self._count(num_draft_tokens, num_accepted)
        trigger = self._judge()
        return () if trigger is None else self.handle(trigger)

    def on_no_draft(self) -> tuple[FallbackAction, ...]:
        """No draft worker would take the session, or the last one is lost."""
        return self.handle(Trigger.NO_DRAFT)

    def handle(self, trigger: Trigger) -> tuple[FallbackAction, ...]:
        """Moves along the table. Raises IllegalTransition, changing nothing, where the table has no entry."""
        entry = _TRANSITIONS.get((self.state, trigger))
        if entry is None:
            raise IllegalTransition(f"{trigger.name} means nothing in state {self.state.name}")
        before, (self.state, actions) = self.state, entry
        if before is FallbackState.PROBING:
            failed = self.state is FallbackState.PAUSED
            longer = min(2 * self._pause_tokens, self._policy.pause_max_tokens)
            self._pause_tokens = longer if failed else self._policy.pause_min_tokens
        if self.state is not FallbackState.SPECULATING:
            self._reset_counts()
        return actions

    def _reset_counts(self) -> None:
        self._accepted = 0.0
        self._decided = 0.0
        self._num_spec_steps = 0
        self._steps_without_hints = 0
        self._paused_tokens = 0

    def _count(self, num_draft_tokens: int, num_accepted: int) -> None:
        if num_draft_tokens == 0:
            self._steps_without_hints += 1
            return
        self._steps_without_hints = 0
        self._num_spec_steps += 1
        num_decided = min(num_accepted + 1, num_draft_tokens)
        self._accepted = self._accepted * self._policy.decay + num_accepted
        self._decided = self._decided * self._policy.decay + num_decided

    def _judge(self) -> Trigger | None:
        policy = self._policy
        if self._steps_without_hints >= policy.starved_after_steps:
            return Trigger.STARVED
        if self.state is FallbackState.SPECULATING:
            is_known = self._num_spec_steps >= policy.judge_after_spec_steps
            return Trigger.LOW_ACCEPTANCE if is_known and self.acceptance < policy.pause_below else None
        if self._num_spec_steps < policy.probe_spec_steps:
            return None
        return Trigger.HIGH_ACCEPTANCE if self.acceptance >= policy.resume_above else Trigger.LOW_ACCEPTANCE
