"""Decides about a canary: promote it, end it, or continue. Pure.

| guard         | passed                                           | broken, so that the canary is ended      |
|---------------|--------------------------------------------------|------------------------------------------|
| divergences   | none; some were audited, if any were to be       | any, at once                             |
| requests      | `requests_min` of each arm have finished         |                                          |
| failures      | rate above control's by at most `failure_margin` | more than by chance on the canary's side |
| departures    | the same of requests out of time, or left        | the same                                 |
| TPOT, TTFT    | mean certainly below control's × (1 + `margin`)  | certainly above                          |
| the objective | mean certainly below control's                   | certainly above: it cannot be promoted   |

It is promoted when every guard has passed, and ended when one is broken or time is over. *Certainly* holds for all
times at once: replicas evaluate every few seconds and the operator at will, so the bounds are confidence sequences
(`outrider.canary.intervals`). Failures, departures and the two times share `alpha`, 25 % each, which bounds the
probability of any wrong decision: ending an arm that is as good as control, or promoting one that is no better (with
`Objective.NONE`: one that is worse by the margin). Times are those of finished requests: an arm whose slow requests
never finish would look fast, which is why departures are a guard.

Assumption: keys are independent, because arms are drawn by key. Requests of one key may resemble each other, so the
number of keys counts and how evenly they send: with few keys, or one that sends most of the traffic, times stay
undecided. For failures and departures each group of keys counts once, in the arm where it first had one; once all have,
only the rates are left, and they only prevent promotion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.canary.intervals import DEGREES_MIN, Interval, contrast_bounds, imbalance_evidence
from outrider.canary.plan import ArmName, CanaryPlan, Objective, Rule
from outrider.canary.statistics import ArmStatistics, Count, Figure, Loss

_NUM_COMPARISONS: Final = 4  # TPOT, TTFT, failures, departures
_WORDS: Final = {Loss.FAILURES: "fail", Loss.DEPARTURES: "run out of time or are left"}


class Verdict(StrEnum):
    CONTINUE = "continue"
    PROMOTE = "promote"
    ABORT = "abort"


class Standing(StrEnum):
    """The result of one guard."""

    PASSED = "passed"
    OPEN = "open"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Guard:
    """One condition of the rule, and whether it is met."""

    name: str
    standing: Standing
    text: str  # the finding, for people


@dataclass(frozen=True, slots=True)
class Judgement:
    """The decision of the rule at one moment, and the guards that it rests on."""

    verdict: Verdict
    guards: tuple[Guard, ...]
    is_out_of_time: bool = False

    @property
    def reason(self) -> str:
        """The reason of the verdict, in one line."""
        broken = [guard.text for guard in self.guards if guard.standing is Standing.BROKEN]
        if broken:
            return "; ".join(broken)
        if self.verdict is Verdict.PROMOTE:
            return "every guard has passed"
        opened = ", ".join(guard.name for guard in self.guards if guard.standing is Standing.OPEN)
        return f"undecided when its time was over; open: {opened}" if self.is_out_of_time else f"open: {opened}"


def judge(plan: CanaryPlan, arms: Mapping[ArmName, ArmStatistics], *, is_out_of_time: bool) -> Judgement:
    """Returns the verdict on the data so far. `is_out_of_time`: there will be no more."""
    control, canary = arms[ArmName.CONTROL], arms[ArmName.CANARY]
    rule = plan.rule
    guards = [_divergences(canary, plan), _requests(control, canary, rule)]
    guards += [_losses(loss, control, canary, plan) for loss in Loss]
    for figure in (Figure.TPOT, Figure.TTFT):
        guards.append(_figure(figure, control, canary, rule, is_objective=False))
    if rule.objective is not Objective.NONE:
        guards.append(_figure(Figure(rule.objective.value), control, canary, rule, is_objective=True))
    standings = {guard.standing for guard in guards}
    if Standing.BROKEN in standings:
        verdict = Verdict.ABORT
    elif standings == {Standing.PASSED}:
        verdict = Verdict.PROMOTE
    else:
        verdict = Verdict.ABORT if is_out_of_time else Verdict.CONTINUE
    return Judgement(verdict, tuple(guards), is_out_of_time)


def _divergences(canary: ArmStatistics, plan: CanaryPlan) -> Guard:
    num, num_audited = canary.num(Count.DIVERGED), canary.num(Count.AUDITED)
    text = f"{num} of {num_audited} audited requests have another output without speculation"
    if num:
        return Guard("divergences", Standing.BROKEN, text)
    if plan.audit_share and not num_audited:
        text = "no greedy or seeded request has been audited, as was asked for"
        return Guard("divergences", Standing.OPEN, text)
    return Guard("divergences", Standing.PASSED, text)


def _requests(control: ArmStatistics, canary: ArmStatistics, rule: Rule) -> Guard:
    nums = [arm.num(Count.FINISHED) for arm in (control, canary)]
    text = f"{nums[0]} and {nums[1]} requests have finished; {rule.requests_min} of each arm are needed"
    return Guard("requests", Standing.PASSED if min(nums) >= rule.requests_min else Standing.OPEN, text)


def _losses(loss: Loss, control: ArmStatistics, canary: ArmStatistics, plan: CanaryPlan) -> Guard:
    num, num_control = canary.num_first(loss), control.num_first(loss)
    num_all, rate, rate_of_control = num + num_control, canary.loss_rate(loss), control.loss_rate(loss)
    evidence = imbalance_evidence(num, num_all, plan.share)
    standing = Standing.PASSED
    if num > plan.share * num_all and evidence >= math.log(_NUM_COMPARISONS / plan.rule.alpha):
        standing = Standing.BROKEN
    elif rate > rate_of_control + plan.rule.failure_margin:
        standing = Standing.OPEN
    text = f"{rate:.2%} of the canary's requests {_WORDS[loss]}, {rate_of_control:.2%} of control's"
    if num_all:
        text += f"; of {num_all} groups of keys the canary's were the first in {num}"
    return Guard(loss, standing, text)


def _figure(figure: Figure, control: ArmStatistics, canary: ArmStatistics, rule: Rule, *, is_objective: bool) -> Guard:
    arm, other = canary.mean(figure), control.mean(figure)
    name = figure.upper()
    factor = 1.0 if is_objective else 1 + rule.margin
    limit = "control's" if factor == 1 else f"control's × {factor:g}"
    guard_name = f"{name} better" if is_objective else f"{name} no worse"
    if min(arm.whole, other.whole) < rule.requests_min:
        return Guard(guard_name, Standing.OPEN, f"too few requests to compare {name}")
    if min(arm.degrees, other.degrees) < DEGREES_MIN:
        return Guard(guard_name, Standing.OPEN, f"too few keys to compare {name}, or too few that send most of them")
    bounds = contrast_bounds(arm, other, factor, rule.alpha / _NUM_COMPARISONS)
    standing = _standing(bounds)
    found = {
        Standing.PASSED: "is certainly below",
        Standing.OPEN: "cannot be told from",
        Standing.BROKEN: "is certainly above",
    }[standing]
    text = f"mean {name} {found} {limit}: {arm.value:.4g} ms beside {factor * other.value:.4g} ms"
    return Guard(guard_name, standing, text)


def _standing(bounds: Interval) -> Standing:
    if bounds.high is not None and bounds.high < 0:
        return Standing.PASSED
    return Standing.BROKEN if bounds.low is not None and bounds.low > 0 else Standing.OPEN
