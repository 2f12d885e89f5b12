"""Keeps a replica's canary in step with the others' through Redis, every few seconds and beside the requests.

One exchange hands over what the replica has seen and reads what all have. Whichever replica comes first moves the
canary on: it begins when there is a draft worker of the model it waits for, ends when its time is over, and, where
the operator asked for that, is promoted or given up as the rule says.

Redis is not on the critical path. Without it the last plan holds until its end, and what is seen is kept, as sums of
bounded number, until it can be told.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final, Self

from coordinator.canary import CanaryDesk
from coordinator.metrics import CoordinatorMetrics
from outrider.background import end_tasks
from outrider.canary.plan import CanaryState
from outrider.canary.rule import Verdict, judge
from outrider.canary.store import CanaryStore, CanaryView
from outrider.errors import RegistryUnavailable

_log = logging.getLogger(__name__)

SYNC_S: Final = 2.0
"""Well below the lead that a canary begins with (`outrider.canary.plan.LEAD_MS`)."""


class CanaryKeeper:
    """While the context is open. Entering does not wait for Redis: until the first answer there is no canary."""

    def __init__(
        self,
        store: CanaryStore,
        desk: CanaryDesk,
        metrics: CoordinatorMetrics,
        now_s: Callable[[], float],
        has_draft: Callable[[str], bool],
        sync_s: float = SYNC_S,
    ) -> None:
        """`now_s` is the clock that the desk is told; `has_draft` says whether a draft worker of a model is live."""
        self._store = store
        self._desk = desk
        self._metrics = metrics
        self._now_s = now_s
        self._has_draft = has_draft
        self._sync_s = sync_s
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_degraded = False  # the last attempt failed

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep(), name="canary")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        # A replica that leaves hands over what it has seen, after what was on its way when the task was ended.
        while not self.is_degraded and self._desk.take() is not None:
            await self.sync()

    def hurry(self) -> None:
        """Has the next exchange come at once."""
        self._has_news.set()

    async def sync(self) -> bool:
        """One exchange, and what follows from it. False when Redis does not answer, or for a bug of ours; nothing is
        lost then, and nothing raises."""
        try:
            view = await self._exchange()
            if await self._move_on(view):
                await self._exchange()
        except RegistryUnavailable as error:
            if not self.is_degraded:
                _log.warning("going by the canary known so far: %s", error.message)
            self.is_degraded = True
            return False
        except Exception:  # a bug of ours must not end the task in silence
            if not self.is_degraded:
                _log.exception("going by the canary known so far")
            self.is_degraded = True
            return False
        finally:
            self._metrics.canary_share.set(self._desk.share(self._now_s()))
        self.is_degraded = False
        return True

    async def _exchange(self) -> CanaryView:
        view = await self._store.exchange(self._desk.take())
        self._desk.learn(view, self._now_s())
        return view

    async def _move_on(self, view: CanaryView) -> bool:
        """Whether something was decided, here or by another replica at the same moment."""
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
            self._has_news.clear()
            await self.sync()
            try:
                # Replicas that started together need not ask together for ever.
                async with asyncio.timeout(self._sync_s * random.uniform(0.75, 1.25)):
                    await self._has_news.wait()
            except TimeoutError:
                continue
