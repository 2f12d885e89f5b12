"""Observes one request of a canary from its first item to its end, and counts the result for its arm."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from coordinator.canary.assignment import CanaryDesk, count_of, figures_of
from coordinator.canary.audit import REPEATABLE, Audit, CanaryAuditor, run_of
from coordinator.intake.generation_request import GenerationSpec
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.output.sequence_output import OutputItem, SequenceFinished
from coordinator.request.choices import ChoiceOutput, RequestFinished
from outrider.canary.plan import ArmName, Assignment
from protos.outrider.v1 import common_pb2


async def observed(
    items: AsyncGenerator[ChoiceOutput | RequestFinished],
    spec: GenerationSpec,
    assignment: Assignment,
    desk: CanaryDesk,
    auditor: CanaryAuditor,
    metrics: CoordinatorMetrics,
) -> AsyncGenerator[ChoiceOutput | RequestFinished]:
    """Passes the items on and closes their source. The request is counted once, and audited if it is in the sample."""
    is_sampled = _is_sampled(spec, assignment, desk)
    kept: list[OutputItem] = []
    finished: RequestFinished | None = None
    try:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, RequestFinished):
                    finished = item
                elif is_sampled:
                    kept.append(item.item)
                yield item
    except BaseException as error:
        if finished is None:
            desk.statistics_of(assignment).lose(count_of(error), assignment.group)
        raise
    finally:
        metrics.canary_requests.labels(assignment.arm).inc()
        if finished is not None:
            desk.statistics_of(assignment).add(figures_of(finished), assignment.group)
            if is_sampled and _is_repeatable(finished.candidates[0]):
                auditor.offer(Audit(spec, assignment, run_of(kept)))


def _is_repeatable(finished: SequenceFinished) -> bool:
    """Whether the same request must give the same tokens again."""
    return finished.decoding_mode in REPEATABLE and finished.exactness != common_pb2.EXACTNESS_DISTRIBUTION


def _is_sampled(spec: GenerationSpec, assignment: Assignment, desk: CanaryDesk) -> bool:
    canary = desk.canary
    if canary is None or canary.plan.canary_id != assignment.canary_id:
        return False
    is_theirs = assignment.is_compared and assignment.arm is ArmName.CANARY
    return (
        is_theirs
        and spec.num_candidates == 1
        and spec.max_tokens > 0
        and canary.plan.is_audited(spec.request.request_id)
    )
