"""Fallback: a state machine that decides whether one request speculates.

Pure: counts of target steps, the time between them and events of the draft go in, actions for the session come out.

| state       | trigger         | next        | actions                                     |
|-------------|-----------------|-------------|---------------------------------------------|
| SPECULATING | LOW_ACCEPTANCE  | PAUSED      | detach, stop accepting hints                |
| SPECULATING | STARVED         | PAUSED      | detach, stop accepting hints                |
| SPECULATING | NO_DRAFT        | PAUSED      |                                             |
| PAUSED      | PAUSE_OVER      | PROBING     | start accepting hints, attach               |
| PROBING     | HIGH_ACCEPTANCE | SPECULATING |                                             |
| PROBING     | LOW_ACCEPTANCE  | PAUSED      | detach, stop accepting hints; twice as long |
| PROBING     | SLOWER          | PAUSED      | detach, stop accepting hints; twice as long |
| PROBING     | STARVED         | PAUSED      | detach, stop accepting hints; twice as long |
| PROBING     | NO_DRAFT        | PAUSED      | twice as long                               |

A request begins in any of these states, depending on earlier ones (`coordinator.speculation.priors`). One that begins
PAUSED has no draft worker, and the target does not accept hints for it.

Acceptance is measured over hints that were *decided*, position by position (`outrider.hints.acceptance`). The expected
extra tokens per step, beyond the step's own, are compared with two bounds. These are given as flat rates: 0.2 means
0.2 + 0.04 + … = 0.25 tokens and 0.3 means 0.43, so for a draft that is equally good at every position they bound its
rate. (Accepted over all verified hints would give 0.16 for a draft with blocks of six and every second guess right,
which doubles the speed.) Counts decay by 5 % per step, a memory of about twenty steps: with ten, chance alone paused a
draft at 0.4 within 200 steps in 70 % of requests.

Branches are verified beside the path, and no branch says anything of the path's next position. So they do not count as
decided hints; the tokens that they bring are added as they were.

Cost is measured between a probe and the pause right before it, where the comparison is fair: a probe fails if its
tokens come more slowly than the pause's, however many hints are accepted. The target itself decides whether accepting
hints pays for the batch as a whole. While it has paused, steps have no hints through no fault of the draft worker,
which keeps a slot and computes nothing: such steps are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from coordinator.speculation.priors import NOTHING, Evidence, StartingMode
from outrider.concurrency.decayed_mean import DecayedMean
from outrider.hints.acceptance import BlockAcceptance, extra_tokens_at


class FallbackState(Enum):
    """State of one request's speculation. DISABLED is the state of a request that asked for none."""

    SPECULATING = auto()
    PAUSED = auto()
    PROBING = auto()
    DISABLED = auto()


class Trigger(Enum):
    """Cause of a change of state, derived from steps; only NO_DRAFT is reported by the session."""

    LOW_ACCEPTANCE = auto()
    HIGH_ACCEPTANCE = auto()
    SLOWER = auto()
    STARVED = auto()
    NO_DRAFT = auto()
    PAUSE_OVER = auto()


class FallbackAction(Enum):
    """Action that the session must take, in the order given."""

    ATTACH = auto()  # to any draft worker
    DETACH = auto()  # frees the draft slot
    START_ACCEPTING_HINTS = auto()  # the target accepts hints: SetSpeculation(enabled=true)
    STOP_ACCEPTING_HINTS = auto()


class IllegalTransition(RuntimeError):
    """A trigger that the state it met does not allow: our own bug. The state is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackPolicy:
    """Bounds of the state machine. Rates are per decided hint, 0 to 1; lengths are committed tokens; steps are target
    steps."""

    pause_below: float = 0.2  # in the extra tokens that this rate at every position gives
    resume_above: float = 0.3
    slower_below: float = 0.9  # tokens a second while probing, relative to the pause before it
    judge_after_spec_steps: int = 8
    kept_after_spec_steps: int = 32  # not paused by then, a request counts as worth it
    probe_spec_steps: int = 8
    starved_after_steps: int = 128  # steps in a row without a hint; longer than the draft's prefill
    decay: float = 0.95  # factor of earlier counts at each step
    pause_min_tokens: int = 64
    pause_max_tokens: int = 512
    pause_tokens: float = field(init=False)  # extra tokens per step at `pause_below`
    resume_tokens: float = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.pause_below <= self.resume_above <= 1:
            raise ValueError("need 0 <= pause_below <= resume_above <= 1")
        # Computed once, for every step of every request needs them.
        object.__setattr__(self, "pause_tokens", extra_tokens_at(self.pause_below))
        object.__setattr__(self, "resume_tokens", extra_tokens_at(self.resume_above))
        if not 0 < self.decay <= 1 or not 1 <= self.pause_min_tokens <= self.pause_max_tokens:
            raise ValueError("need 0 < decay <= 1 and 1 <= pause_min_tokens <= pause_max_tokens")


ALWAYS = FallbackPolicy(pause_below=0.0, resume_above=0.0, slower_below=0.0)
"""Policy of a request that asks for speculation whatever it costs. It is paused only while no draft worker sends
hints."""

_S, _T, _A = FallbackState, Trigger, FallbackAction
_GIVE_UP: Final = (_A.DETACH, _A.STOP_ACCEPTING_HINTS)
_TRANSITIONS: Final = MappingProxyType({
    (_S.SPECULATING, _T.LOW_ACCEPTANCE): (_S.PAUSED, _GIVE_UP),
    (_S.SPECULATING, _T.STARVED): (_S.PAUSED, _GIVE_UP),
    (_S.SPECULATING, _T.NO_DRAFT): (_S.PAUSED, ()),
    (_S.PAUSED, _T.PAUSE_OVER): (_S.PROBING, (_A.START_ACCEPTING_HINTS, _A.ATTACH)),
    (_S.PROBING, _T.HIGH_ACCEPTANCE): (_S.SPECULATING, ()),
    (_S.PROBING, _T.LOW_ACCEPTANCE): (_S.PAUSED, _GIVE_UP),
    (_S.PROBING, _T.SLOWER): (_S.PAUSED, _GIVE_UP),
    (_S.PROBING, _T.STARVED): (_S.PAUSED, _GIVE_UP),
    (_S.PROBING, _T.NO_DRAFT): (_S.PAUSED, ()),
})  # fmt: skip


_VERDICTS: Final = frozenset({_T.LOW_ACCEPTANCE, _T.SLOWER, _T.HIGH_ACCEPTANCE})


@dataclass(slots=True)
class _Pace:
    """Recent tokens per second."""

    tokens: DecayedMean  # over seconds
    num_steps: int = 0

    def observe(self, num_tokens: int, gap_s: float) -> None:
        self.num_steps += 1
        self.tokens.observe(num_tokens, gap_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Decayed rate; None before enough steps."""
        return self.tokens.mean if self.num_steps >= _PACE_STEPS_MIN and self.tokens.weight else None


_PACE_STEPS_MIN: Final = 8
_PAUSE_PACE_DECAY: Final = 0.95  # a memory of about twenty steps: earlier ones had another load


class FallbackController:
    """Controller of one request: call `start` once per session, `on_step` for each target step, and `on_no_draft`."""

    def __init__(
        self,
        policy: FallbackPolicy,
        *,
        is_enabled: bool,
        starting_mode: StartingMode = StartingMode.SPECULATING,
    ) -> None:
        self._policy = policy
        self._pause_tokens = policy.pause_min_tokens
        self._is_worth_it: bool | None = None  # the first verdict
        self._num_steps, self._num_decided, self._num_accepted = 0, 0, 0  # since the request began
        self._pause_pace = _Pace(DecayedMean(_PAUSE_PACE_DECAY))
        self.state = FallbackState[starting_mode.name] if is_enabled else FallbackState.DISABLED
        self.last_trigger: Trigger | None = None
        self._reset_counts()

    @property
    def accepts_hints(self) -> bool:
        """Whether the target should verify hints in this state."""
        return self.state in (FallbackState.SPECULATING, FallbackState.PROBING)

    @property
    def extra_tokens(self) -> float:
        """Expected tokens per step beyond its own, from recent acceptance; 0 before the first hint."""
        return self._blocks.extra_tokens + self._of_branches.mean

    @property
    def evidence(self) -> Evidence:
        """The evidence for later requests, so far."""
        if not self._num_steps:
            return NOTHING
        is_worth_it = self._is_worth_it
        # A request that was never paused also has a verdict, once there were enough steps.
        if is_worth_it is None and self._num_steps >= self._policy.judge_after_spec_steps:
            is_worth_it = True if self.state is FallbackState.SPECULATING else None
        return Evidence(
            num_judged=float(is_worth_it is not None),
            num_paused=float(is_worth_it is False),
            num_steps=self._num_steps,
            num_decided=self._num_decided,
            num_accepted=self._num_accepted,
        )

    def start(self) -> tuple[FallbackAction, ...]:
        """Returns the actions at the start of a session at a target, the first one and every replay."""
        self._steps_without_hints = 0
        return (FallbackAction.ATTACH,) if self.accepts_hints else ()

    def on_step(
        self,
        num_tokens: int,
        num_draft_tokens: int,
        num_accepted: int,
        num_branches: int = 0,
        num_accepted_branches: int = 0,
        *,
        gap_s: float | None = None,
        is_paused: bool = False,
    ) -> tuple[FallbackAction, ...]:
        """Takes one step's counts: tokens committed, hints verified, hints accepted, and of both those beside the
        draft's likeliest path.

        `gap_s` is the time since the step before, None for the first. `is_paused`: the target has paused hints for all
        requests, by its own choice.
        """
        if self.state is FallbackState.DISABLED:
            return ()
        if self.state is FallbackState.PAUSED:
            self._paused_tokens += num_tokens
            if gap_s is not None:
                self._pause_pace.observe(num_tokens, gap_s)
            return self.handle(Trigger.PAUSE_OVER) if self._paused_tokens >= self._pause_tokens else ()
        if is_paused:
            self._steps_without_hints = 0
            return ()
        self._count(num_draft_tokens, num_accepted, num_branches, num_accepted_branches)
        if num_draft_tokens and gap_s is not None:
            self._probe_pace.observe(num_tokens, gap_s)
        trigger = self._judge()
        return () if trigger is None else self.handle(trigger)

    def on_no_draft(self) -> tuple[FallbackAction, ...]:
        """Reports that no draft worker takes the session, or that the last one is lost."""
        return self.handle(Trigger.NO_DRAFT)

    def handle(self, trigger: Trigger) -> tuple[FallbackAction, ...]:
        """Moves along the table. Raises IllegalTransition, changing nothing, if the table has no entry."""
        entry = _TRANSITIONS.get((self.state, trigger))
        if entry is None:
            raise IllegalTransition(f"{trigger.name} is not allowed in state {self.state.name}")
        before, (self.state, actions) = self.state, entry
        self.last_trigger = trigger
        if self._is_worth_it is None and trigger in _VERDICTS:
            self._is_worth_it = trigger is Trigger.HIGH_ACCEPTANCE
        if before is FallbackState.PROBING:
            failed = self.state is FallbackState.PAUSED
            longer = min(2 * self._pause_tokens, self._policy.pause_max_tokens)
            self._pause_tokens = longer if failed else self._policy.pause_min_tokens
        if self.state is FallbackState.PAUSED:
            self._pause_pace = _Pace(DecayedMean(_PAUSE_PACE_DECAY))
        if self.state is not FallbackState.SPECULATING:
            self._reset_counts()
        return actions

    def _reset_counts(self) -> None:
        self._blocks = BlockAcceptance.of_what_is_seen(self._policy.decay)
        self._of_branches = DecayedMean(self._policy.decay)  # tokens per step
        self._probe_pace = _Pace(DecayedMean(1.0))
        self._num_spec_steps = 0
        self._steps_without_hints = 0
        self._paused_tokens = 0

    def _count(self, num_draft_tokens: int, num_accepted: int, num_branches: int, num_accepted_branches: int) -> None:
        if num_draft_tokens == 0:
            self._steps_without_hints += 1
            return
        self._steps_without_hints = 0
        self._num_spec_steps += 1
        self._of_branches.observe(num_accepted_branches)
        num_on_path, num_accepted_on_path = num_draft_tokens - num_branches, num_accepted - num_accepted_branches
        self._blocks.observe(num_accepted_on_path, num_on_path)
        self._num_steps += 1
        self._num_decided += min(num_accepted_on_path + 1, num_on_path)
        self._num_accepted += num_accepted_on_path
        if self._is_worth_it is None and self._num_steps > self._policy.kept_after_spec_steps:
            self._is_worth_it = True

    def _judge(self) -> Trigger | None:
        policy = self._policy
        if self._steps_without_hints >= policy.starved_after_steps:
            return Trigger.STARVED
        if self.state is FallbackState.SPECULATING:
            is_known = self._num_spec_steps >= policy.judge_after_spec_steps
            return Trigger.LOW_ACCEPTANCE if is_known and self.extra_tokens < policy.pause_tokens else None
        if self._num_spec_steps < policy.probe_spec_steps:
            return None
        if self.extra_tokens < policy.resume_tokens:
            return Trigger.LOW_ACCEPTANCE
        return Trigger.SLOWER if self._is_slower() else Trigger.HIGH_ACCEPTANCE

    def _is_slower(self) -> bool:
        before, now = self._pause_pace.tokens_per_s, self._probe_pace.tokens_per_s
        return before is not None and now is not None and now < self._policy.slower_below * before
