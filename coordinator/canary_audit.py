"""Runs some of the canary's requests again without speculation, and compares what was said token by token.

Only greedy and seeded requests of one text: of these speculation may not change a token (design.md, I2). It happens
when the answer is out, one request at a time, behind everybody else in every queue; a request that finds
`WAITING_MAX` before it is not audited. `outrider.audit` has the vocabulary and the verdicts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Self

from coordinator.canary import CanaryDesk
from coordinator.environment import Environment
from coordinator.generation_request import PRIORITY_MAX, GenerationSpec
from coordinator.request_session import Finished, News, RequestSession
from coordinator.text_output import VisibleOutput
from outrider.audit import Run, Verdict, compare, judge
from outrider.background import end_tasks
from outrider.canary.plan import ANY_DRAFT, Assignment
from outrider.canary.statistics import Count
from outrider.errors import OutriderError
from outrider.tracing import NO_SPAN
from protos.outrider.v1 import common_pb2

_log = logging.getLogger(__name__)

WAITING_MAX: Final = 16
_TENANT: Final = "canary audit"
"""Its share of the targets is nobody else's."""
_NUM_REPLAYS: Final = 2
_REPEATABLE: Final = (common_pb2.DECODING_MODE_GREEDY, common_pb2.DECODING_MODE_COUPLED)
_COUNTS: Final = {
    Verdict.IDENTICAL: (Count.AUDITED,),
    Verdict.DIVERGED: (Count.AUDITED, Count.DIVERGED),
    Verdict.UNSTABLE: (Count.AUDITED, Count.UNSTABLE),
    Verdict.FAILED: (Count.UNAUDITED,),
}


@dataclass(frozen=True, slots=True)
class Audit:
    """A request that was answered in the canary's arm."""

    spec: GenerationSpec
    assignment: Assignment
    answer: Run


class CanaryAuditor:
    """Of one replica, while the context is open."""

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
        """Has it audited when its turn comes, where there is room."""
        if self._task is None:  # there is none where there is no canary
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
        for what in _COUNTS[verdict]:
            self._desk.statistics_of(audit.assignment).count(what)
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
            # The position alone: what was said is its client's.
            _log.error(
                "request %s of canary %s is %s: it differs from plain decoding at output token %d",
                *(request_id, audit.assignment.canary_id, verdict, divergence.position),
            )
            return verdict
        except OutriderError as error:
            _log.info("request %s is not audited: %s", request_id, error.message)
            return Verdict.FAILED
        except Exception:  # a bug of ours must not end all audits in silence
            _log.exception("request %s is not audited", request_id)
            return Verdict.FAILED

    async def _run(self, spec: GenerationSpec) -> Run:
        """Without speculation. Raises what RequestSession.run raises."""
        session = RequestSession(self._environment, plain_spec(spec), self._environment.now_s())
        async with aclosing(session.run()) as items:
            return run_of([item async for item in items])


def plain_spec(spec: GenerationSpec) -> GenerationSpec:
    """The same request without speculation, for nobody in particular and last in every queue. Its span is none: that of
    the answer has ended."""
    request = spec.request
    speculation = dataclasses.replace(
        request.speculation, enabled=False, is_plain=True, num_speculative_tokens=0
    )
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
        run=spec.run.again(),
    )


def can_be_audited(spec: GenerationSpec) -> bool:
    """As far as that is known before it has run."""
    return spec.num_candidates == 1 and spec.max_tokens > 0


def is_repeatable(finished: Finished) -> bool:
    """Whether running it again has to give the same text."""
    return finished.decoding_mode in _REPEATABLE


def run_of(items: Iterable[News]) -> Run:
    """What a client has read of one text, whose last item is its end."""
    token_ids: list[int] = []
    content = ""
    for item in items:
        if isinstance(item, VisibleOutput):
            token_ids += item.token_ids
            content += item.text
        elif isinstance(item, Finished):
            return Run(
                token_ids=tuple(token_ids), finish_reason=item.finish_reason, content=content + item.text
            )
    raise AssertionError("a text ended without its end")
