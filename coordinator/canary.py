"""One replica's part in a canary: which arm a request gets, and what came of it until the others are told. Pure.

A request takes part unless it says itself how much to speculate (`speculation.enabled`, `always` or
`num_speculative_tokens`): what it asks for is honoured in both arms, so it would tell nothing about either. Which
draft workers it may have is decided all the same.

The last plan that was heard of holds until its own end, whether or not Redis answers; then everybody is control.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from coordinator.choices import RequestFinished
from coordinator.generation_request import GenerationSpec
from coordinator.statistics import RequestTimes, SpeculationCounts, times_to_json
from outrider.canary.plan import ANY_DRAFT, ArmName, Assignment, Canary, CanaryState, DraftChoice
from outrider.canary.statistics import ArmStatistics, Count, RequestFigures
from outrider.canary.store import Batch, CanaryView
from outrider.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, Overloaded, SlowReader

_NO_CANARY: Final = CanaryView(0)


class CanaryDesk:
    """Of one replica. Times are seconds of its own monotonic clock."""

    def __init__(self, sender: str) -> None:
        """`sender` names the replica, this run of it, among all."""
        self._sender = sender
        self._view = _NO_CANARY
        self._clock_offset_ms = 0.0  # Redis' clock less ours
        self._own = {arm: ArmStatistics() for arm in ArmName}  # not on its way yet
        self._sent: Batch | None = None  # on its way, or lost there
        self._num_batches = 0

    @property
    def canary(self) -> Canary | None:
        """The last one heard of."""
        return self._view.canary

    @property
    def view(self) -> CanaryView:
        """What all replicas knew at the last exchange."""
        return self._view

    def clock_ms(self, now_s: float) -> float:
        """Redis' clock, by ours."""
        return now_s * 1000 + self._clock_offset_ms

    def share(self, now_s: float) -> float:
        """Of the keys whose requests get the canary's arm."""
        return 0.0 if self.canary is None else self.canary.share_at(self.clock_ms(now_s))

    def place(self, spec: GenerationSpec, now_s: float) -> GenerationSpec:
        """The request as its arm has it."""
        canary = self.canary
        if canary is None:
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
        """Where to add what is new of the arm, now; what is added counts for nothing where that canary is no more."""
        is_counted = self._is_current(assignment.canary_id) and assignment.is_compared
        return self._own[assignment.arm] if is_counted else ArmStatistics()

    def take(self) -> Batch | None:
        """What the others have to hear of: again what was lost on its way, or else what is new."""
        canary = self.canary
        if self._sent is None and canary is not None and any(arm.sums for arm in self._own.values()):
            self._num_batches += 1
            sums = {arm: statistics.sums for arm, statistics in self._own.items()}
            self._sent = Batch(canary.plan.canary_id, self._sender, self._num_batches, sums)
            self._own = {arm: ArmStatistics() for arm in ArmName}
        return self._sent

    def learn(self, view: CanaryView, now_s: float) -> None:
        """What was sent has arrived, and this is what all replicas together know."""
        self._sent = None
        if view.canary is None or not self._is_current(view.canary.plan.canary_id):
            self._own = {arm: ArmStatistics() for arm in ArmName}
        self._view, self._clock_offset_ms = view, view.clock_ms - now_s * 1000

    def _is_current(self, canary_id: str) -> bool:
        return self.canary is not None and self.canary.plan.canary_id == canary_id


def takes_part(spec: GenerationSpec) -> bool:
    """Whether the request leaves it to us how much to speculate."""
    speculation = spec.request.speculation
    is_open = speculation.enabled and not speculation.is_plain and not speculation.is_always
    return is_open and speculation.num_speculative_tokens == 0


def _drafts(canary: Canary, arm: ArmName | None) -> DraftChoice:
    """Only the canary's arm has the draft workers that a canary names, before it begins and after it was given up too;
    once it is promoted everybody has them and no others."""
    name = canary.plan.change.draft_model
    if not name:
        return ANY_DRAFT
    is_theirs = arm is ArmName.CANARY or canary.state is CanaryState.PROMOTED
    return DraftChoice(name, is_excluded=not is_theirs)


def count_of(error: BaseException) -> Count:
    """What a request counts as that did not finish."""
    # A cancellation, a generator that was closed, or a client that did not read.
    if not isinstance(error, Exception) or isinstance(error, SlowReader):
        return Count.LEFT
    if isinstance(error, DeadlineExceeded):
        return Count.LATE
    return (
        Count.REFUSED
        if isinstance(error, InvalidRequest | NotFound | Conflict | Overloaded)
        else Count.FAILED
    )


def figures_of(finished: RequestFinished) -> RequestFigures:
    """Of a request, whatever the number of its texts."""
    candidates = finished.candidates
    times = times_to_json([(each.times, each.num_output_tokens) for each in candidates])
    counts = SpeculationCounts.merged([each.counts for each in candidates])
    return RequestFigures(
        ttft_ms=times["time_to_first_token_ms"],
        tpot_ms=times["time_per_output_token_ms"],
        e2e_ms=RequestTimes.merged([each.times for each in candidates]).generation_ms,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_draft_tokens=counts.num_accepted_draft_tokens,
    )
