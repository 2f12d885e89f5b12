"""The time that a session's service-level objective leaves the next step. Pure.

A session spends time and earns it with tokens: after its first token it has `tpot_ms` for each that follows. What it
has saved is its slack, and a part of that may be spent in each step, so that a late step, or a prompt beside it, does
not cost it the objective. One that is behind asks for steps that are a little shorter than its tokens pay for. One that
can no longer meet its objective asks for nothing (`step_budget`): the steps are left to those that can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from outrider.hints.objective_rows import UNLIMITED, StepBudget
from outrider.hints.step_cost import StepLine
from outrider.objective import NO_OBJECTIVE, Objective

PLANNED_SHARE: Final = 0.95
"""Share of an objective that is planned with. The rest is for errors of estimates, and for the way to the client."""
SPENT_SHARE: Final = 0.125
"""Share of the slack that one step may spend, or has to make up."""
HURRY_SHARE: Final = 0.2
"""Most by which steps of a session that is behind are to be shorter than its tokens pay for."""
BEST_SHARE: Final = 0.9
"""Share of the best expected time per token; a session that needs shorter ones is out of reach."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A session's objective, as its worker was told of it."""

    objective: Objective = NO_OBJECTIVE  # its time to first token counts from the session's arrival here
    spent_ms: float = 0.0  # since the first token, before the session came here
    owner: str = ""  # the tenant, or a digest of it


NO_AIM: Final = Aim()


class Progress(NamedTuple):
    """Progress of a session that decodes."""

    since_s: float  # its first token, or its arrival if there were tokens before
    num_tokens: int  # after the first one, those from elsewhere included
    num_left: int  # most that may follow


def step_budget(aim: Aim, progress: Progress, now: float, best_ms: float) -> StepBudget:
    """Returns what a session affords of the step that begins now.

    best_ms: least time per token that it can expect (`best_token_ms`).
    """
    tpot_ms = aim.objective.tpot_ms
    if math.isinf(tpot_ms):
        return UNLIMITED
    elapsed_ms = aim.spent_ms + 1e3 * (now - progress.since_s)
    left_ms = tpot_ms * (progress.num_tokens + progress.num_left) - elapsed_ms
    if left_ms < BEST_SHARE * best_ms * progress.num_left:
        return UNLIMITED
    planned_ms = PLANNED_SHARE * tpot_ms
    slack_ms = planned_ms * progress.num_tokens - elapsed_ms
    return StepBudget(max(SPENT_SHARE * slack_ms, -HURRY_SHARE * planned_ms), planned_ms)


def best_token_ms(gains: Sequence[float], line: StepLine, num_sessions: int) -> float:
    """Least expected time per token of a session, in steps of `num_sessions` in which it alone has hints.

    gains: probability that its hints up to each are all accepted, falling.
    """
    best_ms, num_tokens = line.step_ms(num_sessions), 1.0
    for num_hints, gain in enumerate(gains, 1):
        num_tokens += gain
        best_ms = min(best_ms, line.step_ms(num_sessions + num_hints) / num_tokens)
    return best_ms
