"""Runs some of the canary's requests again without speculation and compares the outputs token by token.

Only greedy and seeded requests of one sequence are audited: speculation may not change their tokens (invariant I2). An
audit runs after the answer is complete, one at a time, with the lowest priority in every queue. A request that finds
`WAITING_MAX` audits waiting is not audited. `outrider.audit` has the vocabulary and the verdicts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Self

from coordinator.canary.assignment import CanaryDesk
from coordinator.intake.generation_request import PRIORITY_MAX, GenerationSpec
from coordinator.output.sequence_output import OutputItem, SequenceFinished
from coordinator.output.text_output import VisibleOutput
from coordinator.request.environment import Environment
from coordinator.request.sequence_runner import SequenceRunner
from outrider.audit import Run, Verdict, compare, judge
from outrider.canary.plan import ANY_DRAFT, Assignment
from outrider.canary.statistics import Count
from outrider.concurrency.background import end_tasks
from outrider.errors import OutriderError
from outrider.objective import NO_OBJECTIVE
from outrider.observability.tracing import NO_SPAN
from protos.outrider.v1 import common_pb2

_log = logging.getLogger(__name__)

WAITING_MAX: Final = 16
_TENANT: Final = "canary audit"  # its fair share of the targets is separate from that of clients
_NUM_REPLAYS: Final = 2
REPEATABLE: Final = (common_pb2.DECODING_MODE_GREEDY, common_pb2.DECODING_MODE_COUPLED)
_COUNTS: Final = {
    Verdict.IDENTICAL: (Count.AUDITED,),
    Verdict.DIVERGED: (Count.AUDITED, Count.DIVERGED),
    Verdict.UNSTABLE: (Count.AUDITED, Count.UNSTABLE),
    Verdict.FAILED: (Count.UNAUDITED,),
}


@dataclass(frozen=True, slots=True)
class Audit:
    """An answered request of the canary's arm, to be audited."""

    spec: GenerationSpec
    assignment: Assignment
    answer: Run


class CanaryAuditor:
    """Audits requests of one replica while the context is open."""

    def __init__(self, environment: Environment, desk: CanaryDesk, on_divergence: Callable[[], None]) -> None:
        self._environment = environment
        self._desk = desk
        self._on_divergence = on_divergence
        self._waiting: asyncio.Queue[Audit] = asyncio.Queue(WAITING_MAX)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)

    def offer(self, audit: Audit) -> None:
        """Queues an audit; a full queue counts it as failed."""
        if self._task is None:  # started with the first audit
            self._task = asyncio.create_task(self._keep(), name="canary audits")
        try:
            self._waiting.put_nowait(audit)
        except asyncio.QueueFull:
            self._count(audit, Verdict.FAILED)

    async def _keep(self) -> None:
        while True:
            audit = await self._waiting.get()
            canary = self._desk.canary
            if canary is not None and canary.plan.canary_id == audit.assignment.canary_id:
                self._count(audit, await self._verdict(audit))

    def _count(self, audit: Audit, verdict: Verdict) -> None:
        for count in _COUNTS[verdict]:
            self._desk.statistics_of(audit.assignment).count(count)
        if verdict is Verdict.DIVERGED:
            self._environment.metrics.canary_divergences.inc()
            self._on_divergence()

    async def _verdict(self, audit: Audit) -> Verdict:
        request_id = audit.spec.request.request_id
        try:
            plain = await self._run(audit.spec)
            divergence = compare(plain, audit.answer)
            if divergence is None:
                return Verdict.IDENTICAL
            verdict = judge(plain, divergence, [await self._run(audit.spec) for _ in range(_NUM_REPLAYS)])
            # Only the position: the output is the client's.
            _log.error(
                "request %s of canary %s is %s: it differs from plain decoding at output token %d",
                request_id,
                audit.assignment.canary_id,
                verdict,
                divergence.position,
            )
            return verdict
        except OutriderError as error:
            _log.info("request %s is not audited: %s", request_id, error.message)
            return Verdict.FAILED
        except Exception:  # a bug of ours must not end all audits in silence
            _log.exception("request %s is not audited", request_id)
            return Verdict.FAILED

    async def _run(self, spec: GenerationSpec) -> Run:
        """Runs a request without speculation. Raises what SequenceRunner.run raises."""
        items: list[OutputItem] = []

        async def keep(item: OutputItem) -> None:
            items.append(item)

        await SequenceRunner(self._environment, plain_spec(spec), self._environment.now_s()).run(keep)
        return run_of(items)


def plain_spec(spec: GenerationSpec) -> GenerationSpec:
    """Copies a request without speculation, for the audit's tenant at the lowest priority. It has no span, because that
    of the answer has ended."""
    request = spec.request
    speculation = dataclasses.replace(request.speculation, enabled=False, is_plain=True, num_speculative_tokens=0)
    request = dataclasses.replace(
        request, speculation=speculation, priority=PRIORITY_MAX, tenant=_TENANT, canary_key=""
    )
    return dataclasses.replace(
        spec,
        request=request,
        span=NO_SPAN,
        assignment=None,
        drafts=ANY_DRAFT,
        is_background=True,
        objective=NO_OBJECTIVE,
        run=spec.run.again(),
    )


def run_of(items: Iterable[OutputItem]) -> Run:
    """Collects the output of one sequence, whose last item is its end."""
    token_ids: list[int] = []
    content = ""
    for item in items:
        if isinstance(item, VisibleOutput):
            token_ids += item.token_ids
            content += item.text
        elif isinstance(item, SequenceFinished):
            return Run(token_ids=tuple(token_ids), finish_reason=item.finish_reason, content=content + item.text)
    raise AssertionError("a sequence ended without a final item")
