"""Exchange of lost targets, and of the prompts they had, between replicas through Redis
(`coordinator.recovery.poison`).

A client whose request brings targets down sends it again and reaches another replica. All replicas must know what one
knows; otherwise the same prompt costs as many workers at each of them, and losses elsewhere look like chance.

Redis is not on the critical path: if it does not answer at once, a replica relies on its own record.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from coordinator.recovery.poison import REPORTED_AGAIN, Fact, PoisonRecord
from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import RegistryCalls

REFRESH_S: Final = 1.0
"""Longest time between two reads of what others report."""
UNSENT_MAX: Final = 512
"""Facts kept while the registry does not answer, the latest ones."""


class LossExchange:
    """One replica's part of the exchange. Times are in seconds on `now_s`."""

    def __init__(self, registry: RegistryCalls | None, record: PoisonRecord, now_s: Callable[[], float]) -> None:
        """Without a registry nothing is exchanged."""
        self._registry = registry
        self._record = record
        self._now_s = now_s
        self._unsent: list[Fact] = []
        self._asked_s = -math.inf
        self._has_changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(keep_going(self._keep, "the exchange of losses"), name="losses")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)

    def share_soon(self) -> None:
        """Wakes the exchange: the record has changed."""
        self._has_changed.set()

    async def refresh(self, max_age_s: float) -> None:
        """Returns when others' reports are known as of `max_age_s` ago, or the registry has failed to answer since."""
        if self._registry is None:
            return
        async with self._lock:
            if self._now_s() - self._asked_s >= max_age_s:
                await self._exchange(self._registry)

    async def _exchange(self, registry: RegistryCalls) -> None:
        self._has_changed.clear()
        sent = [*self._unsent, *self._record.take_new_facts()][-UNSENT_MAX:]
        self._unsent = sent
        try:
            ages_s = await registry.exchange_losses(
                [json.dumps(fact) for fact in sent if fact[0] not in REPORTED_AGAIN],
                [json.dumps(fact) for fact in sent if fact[0] in REPORTED_AGAIN],
            )
        except RegistryUnavailable:
            return
        finally:
            self._asked_s = self._now_s()
        self._unsent = []
        facts = dict[Fact, float]()
        for text, age_s in ages_s.items():
            with suppress(ValueError, TypeError):  # damaged ones are ignored
                facts[tuple(map(str, json.loads(text)))] = self._asked_s - age_s
        self._record.merge(facts, self._asked_s)

    async def _keep(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._has_changed.wait()
            await self.refresh(0.0)
