"""Places at workers, taken in Redis so that replicas that know nothing of each other do not overrun one.

A place is asked for before a session is sent, in one call that goes down the list of workers in the order of
preference; it is given back when the session ends, and renewed while it runs, so that what a replica held when it died
is free again soon. Without Redis the first of the list is taken: the workers' own admission is the real limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Self

from outrider.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry import RENEW_S, RegistryCalls
from outrider.worker_record import Pool, WorkerRecord

_log = logging.getLogger(__name__)

AWAY_S: Final = 2.0
"""How long Redis is not asked after it has not answered."""
CANDIDATES_MAX: Final = 8
"""Workers asked for room at once. From the third on they come by load: where eight are full, few are not."""
_WAITING_RELEASES_MAX: Final = 4096

Place = tuple[Pool, str, str]
"""Pool, incarnation of the worker, token."""


class Reservations:
    """Of one replica; keeps what it holds while the context is open."""

    def __init__(
        self, registry: RegistryCalls | None, now_s: Callable[[], float], renew_s: float = RENEW_S
    ) -> None:
        """Without a registry there is nothing to reserve in, and the first worker is always taken."""
        self._registry = registry
        self._now_s = now_s
        self._renew_s = renew_s
        self._held: dict[Place, None] = {}
        self._released: dict[Place, None] = {}  # to be told
        self._has_released = asyncio.Event()
        self._away_until_s = 0.0
        self.on_released: Callable[[], None] = lambda: None
        """Called when a place at a worker is free for others."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_held(self) -> int:
        """Places of this replica's sessions."""
        return len(self._held)

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(
                keep_going(self._keep_renewing, "renewing reservations"), name="reservations"
            ),
            asyncio.create_task(keep_going(self._keep_releasing, "releasing reservations"), name="releases"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._tasks)
        await self._release_all()

    async def take(
        self, pool: Pool, workers: Sequence[WorkerRecord], token: str, limits: Sequence[int] | None = None
    ) -> WorkerRecord | None:
        """A place at the first of these workers that has room; None when all are full. To be given back with
        `give_back`, whatever happens. `limits`: places of each, all that it has unless given."""
        if self._registry is None or not workers:
            return workers[0] if workers else None
        index: int | None = 0
        if self._now_s() >= self._away_until_s:
            asked = workers[:CANDIDATES_MAX]
            incarnations = [worker.incarnation for worker in asked]
            if limits is None:
                limits = [worker.max_num_seqs + worker.max_num_waiting for worker in asked]
            try:
                index = await self._registry.reserve(pool, incarnations, limits[: len(asked)], token)
            except (RegistryUnavailable, asyncio.CancelledError) as error:
                for incarnation in incarnations:  # it may have been taken all the same, at any of them
                    self._release((pool, incarnation, token))
                if isinstance(error, asyncio.CancelledError):
                    raise
                self._miss(error)
        if index is None:
            return None
        place = pool, workers[index].incarnation, token
        self._held[place] = None
        self._released.pop(place, None)
        return workers[index]

    def give_back(self, worker: WorkerRecord, token: str) -> None:
        """The session has ended."""
        if self._registry is None:
            self.on_released()
            return
        place = worker.pool, worker.incarnation, token
        self._held.pop(place, None)
        self._release(place)

    def _release(self, place: Place) -> None:
        if len(self._released) < _WAITING_RELEASES_MAX:  # beyond it they end by themselves
            self._released[place] = None
            self._has_released.set()

    async def _keep_releasing(self) -> None:
        while True:
            await self._has_released.wait()
            self._has_released.clear()
            if not await self._release_all():
                await asyncio.sleep(AWAY_S)
                self._has_released.set()

    async def _release_all(self) -> bool:
        """False when Redis does not answer; what is left then is told later, or ends by itself."""
        while self._released:
            place = next(iter(self._released))
            assert self._registry is not None
            try:
                await self._registry.release(*place)
            except RegistryUnavailable as error:
                self._miss(error)
                self.on_released()  # as far as this replica knows
                return False
            self._released.pop(place, None)
            self.on_released()
        return True

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            by_worker: dict[tuple[Pool, str], list[str]] = {}
            for pool, incarnation, token in self._held:
                by_worker.setdefault((pool, incarnation), []).append(token)
            for (pool, incarnation), tokens in by_worker.items():
                assert self._registry is not None
                try:
                    await self._registry.renew(pool, incarnation, tokens)
                except RegistryUnavailable as error:
                    self._miss(error)
                    break
                # Those that were given back meanwhile have come back to life.
                for token in tokens:
                    if (pool, incarnation, token) not in self._held:
                        self._release((pool, incarnation, token))

    def _miss(self, error: RegistryUnavailable) -> None:
        if self._now_s() >= self._away_until_s:
            _log.warning("workers are chosen without reserving: %s", error.message)
        self._away_until_s = self._now_s() + AWAY_S
