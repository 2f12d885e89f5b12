"""Assigns requests of one replica to the arms of a canary and sums their results for the next exchange. Pure.

A request takes part unless it sets itself how much to speculate (`speculation.enabled`, `always` or
`num_speculative_tokens`). Its setting is honoured in both arms, so it would not distinguish them. Which draft
workers it may use is still decided here. Requests of other models than the plan's have nothing to do with it.

The last known plan applies until its own end, whether or not Redis answers. Then every request is control.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from coordinator.intake.generation_request import GenerationSpec
from coordinator.request.choices import RequestFinished
from outrider.canary.plan import ANY_DRAFT, ArmName, Assignment, Canary, CanaryState, DraftChoice
from outrider.canary.statistics import ArmStatistics, Count, RequestFigures
from outrider.canary.store import Batch, CanaryView
from outrider.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, Overloaded, SlowReader

_NO_CANARY: Final = CanaryView(0)


class CanaryDesk:
    """State of one replica in a canary. Times are seconds of its own monotonic clock."""

    def __init__(self, sender: str) -> None:
        """`sender` names this run of this replica, uniquely among all."""
        self._sender = sender
        self._view = _NO_CANARY
        self._clock_offset_ms = 0.0  # Redis' clock minus ours
        self._own = {arm: ArmStatistics() for arm in ArmName}  # not sent yet
        self._sent: Batch | None = None  # sent, not confirmed
        self._num_batches = 0

    @property
    def canary(self) -> Canary | None:
        """The last canary known."""
        return self._view.canary

    def clock_ms(self, now_s: float) -> float:
        """Estimates the time of Redis' clock, ms."""
        return now_s * 1000 + self._clock_offset_ms

    def share(self, now_s: float) -> float:
        """The share of canary keys whose requests get the canary's arm, 0 to 1."""
        return 0.0 if self.canary is None else self.canary.share_at(self.clock_ms(now_s))

    def assign(self, spec: GenerationSpec, now_s: float) -> GenerationSpec:
        """Assigns a request to an arm and applies that arm's change to it."""
        canary = self.canary
        if canary is None or canary.plan.model not in ("", spec.model):
            return spec
        clock_ms, request = self.clock_ms(now_s), spec.request
        key = request.canary_key or request.request_id
        arm = canary.arm_at(key, clock_ms) if takes_part(spec) else None
        spec = dataclasses.replace(spec, drafts=_drafts(canary, arm))
        if arm is None:
            return spec
        plan, is_compared = canary.plan, canary.state is not CanaryState.PROMOTED
        assignment = Assignment(plan.canary_id, arm, plan.group_of(key), is_compared)
        spec = dataclasses.replace(spec, assignment=assignment)
        if arm is ArmName.CONTROL:
            return spec
        change = plan.change
        speculation = dataclasses.replace(
            request.speculation,
            enabled=change.speculates,
            is_plain=not change.speculates,
            num_speculative_tokens=change.num_speculative_tokens,
        )
        return dataclasses.replace(spec, request=dataclasses.replace(request, speculation=speculation))

    def statistics_of(self, assignment: Assignment) -> ArmStatistics:
        """Returns the sums to add to an arm's results now; they are discarded if that canary has ended."""
        is_counted = self._is_current(assignment.canary_id) and assignment.is_compared
        return self._own[assignment.arm] if is_counted else ArmStatistics()

    def take(self) -> Batch | None:
        """Returns the results to send: an unconfirmed batch again, or else the new ones."""
        canary = self.canary
        if self._sent is None and canary is not None and any(arm.sums for arm in self._own.values()):
            self._num_batches += 1
            sums = {arm: statistics.sums for arm, statistics in self._own.items()}
            self._sent = Batch(canary.plan.canary_id, self._sender, self._num_batches, sums)
            self._own = {arm: ArmStatistics() for arm in ArmName}
        return self._sent

    def learn(self, view: CanaryView, now_s: float) -> None:
        """Confirms the sent batch and stores the view of all replicas together."""
        self._sent = None
        if view.canary is None or not self._is_current(view.canary.plan.canary_id):
            self._own = {arm: ArmStatistics() for arm in ArmName}
        self._view, self._clock_offset_ms = view, view.clock_ms - now_s * 1000

    def _is_current(self, canary_id: str) -> bool:
        return self.canary is not None and self.canary.plan.canary_id == canary_id


def takes_part(spec: GenerationSpec) -> bool:
    """Whether the request leaves to the service how much to speculate."""
    speculation = spec.request.speculation
    is_open = speculation.enabled and not speculation.is_plain and not speculation.is_always
    return is_open and speculation.num_speculative_tokens == 0


def _drafts(canary: Canary, arm: ArmName | None) -> DraftChoice:
    """Restricts the draft model that a canary names to the canary's arm, also before it begins and after it is aborted.
    Once it is promoted, every request uses that draft model and no other."""
    name = canary.plan.change.draft_model
    if not name:
        return ANY_DRAFT
    is_theirs = arm is ArmName.CANARY or canary.state is CanaryState.PROMOTED
    return DraftChoice(name, is_excluded=not is_theirs)


def count_of(error: BaseException) -> Count:
    """Classifies the error that ended an unfinished request."""
    # A cancellation, a closed generator, or a client that did not read.
    if not isinstance(error, Exception) or isinstance(error, SlowReader):
        return Count.LEFT
    if isinstance(error, DeadlineExceeded):
        return Count.LATE
    is_refused = isinstance(error, InvalidRequest | NotFound | Conflict | Overloaded)
    return Count.REFUSED if is_refused else Count.FAILED


def figures_of(finished: RequestFinished) -> RequestFigures:
    """Computes the figures of a finished request over all its sequences."""
    times, counts = finished.times_json, finished.counts
    return RequestFigures(
        ttft_ms=times["time_to_first_token_ms"],
        tpot_ms=times["time_per_output_token_ms"],
        e2e_ms=finished.times.generation_ms,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_draft_tokens=counts.num_accepted_draft_tokens,
    )
