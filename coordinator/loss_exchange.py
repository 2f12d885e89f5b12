"""Replicas tell each other which targets were lost, and to which prompts (`coordinator.poison`), by way of Redis.

A client whose request brings targets down sends it again, and comes to another replica. What one knows all have to
know, or the same prompt costs as many workers again at each of them, and what it cost elsewhere looks like chance.

Redis is not on the critical path: where it does not answer at once, a replica goes by what it knows by itself.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from coordinator.poison import TOLD_ANEW, Fact, PoisonRecord
from outrider.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry import RegistryCalls

REFRESH_S: Final = 1.0
"""What others have told is heard as often, at least."""
UNTOLD_MAX: Final = 512
"""Facts that wait for a registry that does not answer, the latest ones."""


class LossExchange:
    """One replica's part. Times are in seconds on `now_s`."""

    def __init__(
        self, registry: RegistryCalls | None, record: PoisonRecord, now_s: Callable[[], float]
    ) -> None:
        """Nothing is told or heard without a registry."""
        self._registry = registry
        self._record = record
        self._now_s = now_s
        self._untold: list[Fact] = []
        self._asked_s = -math.inf
        self._has_news = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(keep_going(self._keep, "the exchange of losses"), name="losses")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)

    def tell_soon(self) -> None:
        """The record has changed."""
        self._has_news.set()

    async def refresh(self, max_age_s: float) -> None:
        """Returns when what others told is known as of `max_age_s` ago, or the registry was asked in vain since."""
        if self._registry is None:
            return
        async with self._lock:
            if self._now_s() - self._asked_s >= max_age_s:
                await self._exchange(self._registry)

    async def _exchange(self, registry: RegistryCalls) -> None:
        self._has_news.clear()
        told = [*self._untold, *self._record.take_news()][-UNTOLD_MAX:]
        self._untold = told
        try:
            ages_s = await registry.exchange_losses(
                [json.dumps(fact) for fact in told if fact[0] not in TOLD_ANEW],
                [json.dumps(fact) for fact in told if fact[0] in TOLD_ANEW],
            )
        except RegistryUnavailable:
            return
        finally:
            self._asked_s = self._now_s()
        self._untold = []
        facts = dict[Fact, float]()
        for text, age_s in ages_s.items():
            with suppress(ValueError, TypeError):  # what is damaged says nothing
                facts[tuple(map(str, json.loads(text)))] = self._asked_s - age_s
        self._record.hear(facts, self._asked_s)

    async def _keep(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._has_news.wait()
            await self.refresh(0.0)
