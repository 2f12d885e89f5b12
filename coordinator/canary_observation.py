"""Watches one request that got an arm of a canary, from its first item to its end, whatever that is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from coordinator.canary import CanaryDesk, count_of, figures_of
from coordinator.canary_audit import Audit, CanaryAuditor, can_be_audited, is_repeatable, run_of
from coordinator.choices import ChoiceNews, RequestFinished
from coordinator.generation_request import GenerationSpec
from coordinator.metrics import CoordinatorMetrics
from coordinator.request_session import News
from outrider.canary.plan import ArmName, Assignment


async def observed(
    items: AsyncGenerator[ChoiceNews | RequestFinished],
    spec: GenerationSpec,
    assignment: Assignment,
    desk: CanaryDesk,
    auditor: CanaryAuditor,
    metrics: CoordinatorMetrics,
) -> AsyncGenerator[ChoiceNews | RequestFinished]:
    """The same items; closes what they come from. The request is counted once, and audited if it is in the sample."""
    is_sampled = _is_sampled(spec, assignment, desk)
    kept: list[News] = []
    finished: RequestFinished | None = None
    try:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, RequestFinished):
                    finished = item
                elif is_sampled:
                    kept.append(item.news)
                yield item
    except BaseException as error:
        if finished is None:
            desk.statistics_of(assignment).lose(count_of(error), assignment.group)
        raise
    finally:
        metrics.canary_requests.labels(assignment.arm).inc()
        if finished is not None:
            desk.statistics_of(assignment).add(figures_of(finished), assignment.group)
            if is_sampled and is_repeatable(finished.candidates[0]):
                auditor.offer(Audit(spec, assignment, run_of(kept)))


def _is_sampled(spec: GenerationSpec, assignment: Assignment, desk: CanaryDesk) -> bool:
    canary = desk.canary
    if canary is None or canary.plan.canary_id != assignment.canary_id:
        return False
    is_theirs = assignment.is_compared and assignment.arm is ArmName.CANARY
    return is_theirs and can_be_audited(spec) and canary.plan.is_audited(spec.request.request_id)
