"""Synchronizes a replica's canary with the other replicas through Redis, every few seconds in the background.

One exchange sends the replica's results and reads those of all. The first replica to see a reason moves the canary on:
it begins when there is a draft worker of the model it waits for, and ends when its time is over. If the operator asked
for that, the rule promotes or aborts it.

No request waits for Redis. Without it the last plan applies until its end, and results are kept as a bounded number of
sums until they can be sent.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final, Self

from coordinator.canary.assignment import CanaryDesk
from coordinator.observability.metrics import CoordinatorMetrics
from outrider.canary.plan import CanaryState
from outrider.canary.rule import Verdict, judge
from outrider.canary.store import CanaryStore, CanaryView
from outrider.concurrency.background import end_tasks
from outrider.errors import RegistryUnavailable

_log = logging.getLogger(__name__)

SYNC_S: Final = 2.0
"""Time between exchanges; well below the lead time of a canary (`outrider.canary.plan.LEAD_MS`)."""


class CanaryKeeper:
    """Synchronizes the canary while the context is open. Entering does not wait for Redis: until the first answer there
    is no canary."""

    def __init__(
        self,
        store: CanaryStore,
        desk: CanaryDesk,
        metrics: CoordinatorMetrics,
        now_s: Callable[[], float],
        has_draft: Callable[[str], bool],
        sync_s: float = SYNC_S,
    ) -> None:
        """`now_s` is the clock of `desk`; `has_draft` tells whether a draft worker of a model is live."""
        self._store = store
        self._desk = desk
        self._metrics = metrics
        self._now_s = now_s
        self._has_draft = has_draft
        self._sync_s = sync_s
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_degraded = False  # the last attempt failed

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep(), name="canary")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        # A draining replica sends its results, after the batch that was in flight when the task ended.
        while not self.is_degraded and self._desk.take() is not None:
            await self.sync()

    def hurry(self) -> None:
        """Starts the next exchange at once."""
        self._is_due.set()

    async def sync(self) -> bool:
        """Makes one exchange and decides the canary. False if Redis does not answer or on a bug of ours; nothing is
        lost then, and nothing raises."""
        try:
            view = await self._exchange()
            if await self._move_on(view):
                await self._exchange()
            self.is_degraded = False
        except Exception as error:  # a bug of ours must not end the task in silence
            if isinstance(error, RegistryUnavailable) and not self.is_degraded:
                _log.warning("continuing with the last known canary: %s", error.message)
            elif not self.is_degraded:
                _log.exception("continuing with the last known canary")
            self.is_degraded = True
        finally:
            self._metrics.canary_share.set(self._desk.share(self._now_s()))
        return not self.is_degraded

    async def _exchange(self) -> CanaryView:
        view = await self._store.exchange(self._desk.take())
        self._desk.learn(view, self._now_s())
        return view

    async def _move_on(self, view: CanaryView) -> bool:
        """Decides the canary if it is due. True if it was decided, here or by another replica meanwhile."""
        canary = view.canary
        if canary is None or canary.state in (CanaryState.PROMOTED, CanaryState.ABORTED):
            return False
        plan, is_out_of_time = canary.plan, view.clock_ms >= canary.ends_ms
        if canary.state is CanaryState.WAITING:
            name = plan.change.draft_model
            if self._has_draft(name):
                await self._store.decide(canary, CanaryState.RUNNING, f"there is a draft worker of {name}")
                return True
            if is_out_of_time:
                reason = f"no draft worker of {name} came in time"
                await self._store.decide(canary, CanaryState.ABORTED, reason)
            return is_out_of_time
        judgement = judge(plan, view.arms, is_out_of_time=is_out_of_time)
        reason = judgement.reason
        if plan.is_automatic and judgement.verdict is not Verdict.CONTINUE:
            is_promoted = judgement.verdict is Verdict.PROMOTE
        elif is_out_of_time:
            is_promoted = False
            if judgement.verdict is Verdict.PROMOTE:
                reason = "its time was over before anybody promoted it, as was recommended"
        else:
            return False
        state = CanaryState.PROMOTED if is_promoted else CanaryState.ABORTED
        if await self._store.decide(canary, state, reason):
            _log.warning("canary %s is %s: %s", plan.canary_id, state, reason)
        return True

    async def _keep(self) -> None:
        while True:
            self._is_due.clear()
            await self.sync()
            try:
                # Jitter keeps replicas that started together from asking together.
                async with asyncio.timeout(self._sync_s * random.uniform(0.75, 1.25)):
                    await self._is_due.wait()
            except TimeoutError:
                continue
