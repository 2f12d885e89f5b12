"""Slots at workers, reserved in Redis so that replicas do not overrun a worker.

A slot is reserved before a session is sent, by one call that tries the workers in order of preference. It is given back
when the session ends and renewed while it runs, so the slots of a replica that died are soon free. Without Redis the
first worker is taken: the workers' own admission is the real limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Self

from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import RENEW_S, RegistryCalls
from outrider.registry.worker_record import Pool, WorkerRecord

_log = logging.getLogger(__name__)

AWAY_S: Final = 2.0
"""Pause before Redis is asked again after it did not answer."""
CANDIDATES_MAX: Final = 8
"""Most workers asked for a slot at once. From the third on they come by load: if eight are full, few are not."""
_WAITING_RELEASES_MAX: Final = 4096

Reservation = tuple[Pool, str, str]
"""A reservation's key: pool, incarnation of the worker, token."""


class Reservations:
    """Reservations of one replica, renewed while the context is open."""

    def __init__(self, registry: RegistryCalls | None, now_s: Callable[[], float], renew_s: float = RENEW_S) -> None:
        """Without a registry nothing is reserved, and the first worker is always taken."""
        self._registry = registry
        self._now_s = now_s
        self._renew_s = renew_s
        self._held: dict[Reservation, None] = {}
        self._released: dict[Reservation, None] = {}  # not yet released in Redis
        self._has_released = asyncio.Event()
        self._away_until_s = 0.0
        self.on_released: Callable[[], None] = lambda: None
        """Called when a slot at a worker is free for others."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_held(self) -> int:
        """Number of slots reserved for this replica's sessions."""
        return len(self._held)

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(keep_going(self._keep_renewing, "renewing reservations"), name="reservations"),
            asyncio.create_task(keep_going(self._keep_releasing, "releasing reservations"), name="releases"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._tasks)
        await self._release_all()

    async def take(
        self, pool: Pool, workers: Sequence[WorkerRecord], token: str, limits: Sequence[int] | None = None
    ) -> WorkerRecord | None:
        """Reserves a slot at the first of these workers that has one; None if all are full. The caller always gives it
        back with `give_back`. `limits`: slots of each worker, by default all that it has."""
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
                for incarnation in incarnations:  # one of them may have reserved it all the same
                    self._release((pool, incarnation, token))
                if isinstance(error, asyncio.CancelledError):
                    raise
                self._miss(error)
        if index is None:
            return None
        reservation = pool, workers[index].incarnation, token
        self._held[reservation] = None
        self._released.pop(reservation, None)
        return workers[index]

    def give_back(self, worker: WorkerRecord, token: str) -> None:
        """Releases the slot of a session that has ended."""
        if self._registry is None:
            self.on_released()
            return
        reservation = worker.pool, worker.incarnation, token
        self._held.pop(reservation, None)
        self._release(reservation)

    def _release(self, reservation: Reservation) -> None:
        if len(self._released) < _WAITING_RELEASES_MAX:  # beyond it they expire
            self._released[reservation] = None
            self._has_released.set()

    async def _keep_releasing(self) -> None:
        while True:
            await self._has_released.wait()
            self._has_released.clear()
            if not await self._release_all():
                await asyncio.sleep(AWAY_S)
                self._has_released.set()

    async def _release_all(self) -> bool:
        """Releases what is due in Redis. False if Redis does not answer; the rest is released later, or expires."""
        while self._released:
            reservation = next(iter(self._released))
            assert self._registry is not None
            try:
                await self._registry.release(*reservation)
            except RegistryUnavailable as error:
                self._miss(error)
                self.on_released()  # as far as this replica knows
                return False
            self._released.pop(reservation, None)
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
                # The renewal has revived reservations that were given back meanwhile.
                for token in tokens:
                    if (pool, incarnation, token) not in self._held:
                        self._release((pool, incarnation, token))

    def _miss(self, error: RegistryUnavailable) -> None:
        if self._now_s() >= self._away_until_s:
            _log.warning("workers are chosen without reservations: %s", error.message)
        self._away_until_s = self._now_s() + AWAY_S
