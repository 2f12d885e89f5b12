"""Directory of both worker pools: a snapshot of the registry, from which requests are routed without a call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Final, Self

from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import LEASE_S, PoolView, RegistryCalls
from outrider.registry.worker_record import POOLS, Pool, Snapshot, WorkerRecord

_log = logging.getLogger(__name__)

REFRESH_S: Final = 0.5
JUMP_S: Final = 1.0
"""Smallest jump of Redis' clock; less is an adjustment. A lease that is renewed has at least four seconds left."""
NO_EVENT: Final = PoolView().last_event
DEPARTURES_MAX: Final = 64
"""Models whose last departure is remembered, the latest ones."""
FIRST_LOOK_S: Final = 10.0
"""Time for which opening a directory tries. A replica that knows no worker serves nobody; other replicas can."""
_SETTLE_S: Final = 0.02  # many members that change together are read once


class WorkerDirectory:
    """A snapshot kept fresh while the context is open: it is read whenever a pool's members change, and every REFRESH_S
    for the loads and for missed events. A record that becomes unreadable while its worker keeps its lease is damaged:
    the earlier one counts until the worker writes it anew.

    A Redis that comes back may have lost everything. Workers known before stay in the snapshot until each has had a
    lease's time to register again. A restart may be too short to be noticed: then there are no events although there
    were some. If Redis' clock jumps, valid leases may end. And if all leases of a pool end at once, the fault lies
    between Redis and its workers. In each case known workers stay for one lease.

    Opening it takes until both pools have been read, or `first_look_s`.
    """

    def __init__(
        self,
        registry: RegistryCalls,
        refresh_s: float = REFRESH_S,
        lease_s: float = LEASE_S,
        *,
        first_registry: RegistryCalls | None = None,
        first_look_s: float = FIRST_LOOK_S,
    ) -> None:
        """`first_registry` is the same registry with a longer timeout, for opening."""
        self._registry = registry
        self._first_registry = first_registry or registry
        self._first_look_s = first_look_s
        self._refresh_s = refresh_s
        self._lease_s = lease_s
        self._tasks: list[asyncio.Task[None]] = []
        self._views: dict[Pool, PoolView] = {}
        self._emptied_by: dict[Pool, str] = {}  # the event by which all leases had ended
        self._away: set[Pool] = set(POOLS)  # could not be read when last tried
        self._clock_behind_s: dict[Pool, float] = {}  # of Redis' clock behind ours, when last read
        self._trusted_until_s: dict[Pool, float] = {}  # on the loop's clock; records from before count until then
        # By pool and model, of those that have no worker left: who left last and why, and when.
        self._departed: dict[tuple[Pool, str], tuple[str, float]] = {}
        self.snapshot = Snapshot(degraded=True)

    async def __aenter__(self) -> Self:
        await self._look_first()
        self._tasks = [self._begin(pool) for pool in POOLS]
        return self

    def _begin(self, pool: Pool) -> asyncio.Task[None]:
        name = f"directory of {pool}s"
        work = keep_going(lambda: self._keep(pool), f"the {name}", lambda: self._note_away(pool), self._refresh_s)
        return asyncio.create_task(work, name=name)

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._tasks)

    async def _look_first(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._first_look_s
        while True:
            for pool in sorted(self._away):
                await self._look(pool, self._first_registry)
            if not self._away:
                return
            if loop.time() >= until_s:
                missing = " and ".join(f"{pool}s" for pool in sorted(self._away))
                _log.warning("no %s known at start: the registry has not answered", missing)
                return
            await asyncio.sleep(self._refresh_s)

    async def _look(self, pool: Pool, registry: RegistryCalls) -> None:
        asked_s = asyncio.get_running_loop().time()
        try:
            view = await registry.read(pool)
        except RegistryUnavailable as error:
            if not self.snapshot.degraded:
                _log.warning("serving from the last snapshot: %s", error.message)
            self._note_away(pool)
            return
        now_s = asyncio.get_running_loop().time()
        has_forgotten = pool in self._views and self._views[pool].last_event != view.last_event == NO_EVENT
        has_emptied = (
            not view.workers
            and bool(self._workers(pool))
            and view.last_kind == "expired"  # a worker that leaves deregisters
            and view.last_event != self._emptied_by.get(pool)
        )
        if has_emptied:
            self._emptied_by[pool] = view.last_event
        has_jumped = self._has_jumped(pool, view, asked_s, now_s)
        if pool in self._away or has_forgotten or has_emptied or has_jumped:
            self._away.discard(pool)
            self._trusted_until_s[pool] = now_s + self._lease_s if pool in self._views else now_s
        if now_s < self._trusted_until_s[pool]:
            view = replace(view, workers=_with_missing(view.workers, self._views[pool].workers))
        elif view.unreadable:
            damaged = [each for each in self._workers(pool) if (each.worker_id, each.incarnation) in view.unreadable]
            view = replace(view, workers=_with_missing(view.workers, tuple(damaged)))
        self._note_departures(pool, view, now_s)
        self._views[pool] = view
        self.snapshot = Snapshot(
            self._workers("target"),
            self._workers("draft"),
            degraded=bool(self._away),
            num_reserved={
                worker.incarnation: num_reserved
                for each in self._views.values()
                for worker, num_reserved in zip(each.workers, each.num_reserved, strict=False)
            },
        )

    def _note_away(self, pool: Pool) -> None:
        """Marks a pool as unreadable: its workers count for one more lease from the next successful read."""
        self._away.add(pool)
        self.snapshot = replace(self.snapshot, degraded=True)

    def _note_departures(self, pool: Pool, view: PoolView, now_s: float) -> None:
        present = {worker.worker_id for worker in view.workers}
        for worker in self._workers(pool):
            if worker.worker_id not in present:
                why = "its lease ran out" if view.last_kind == "expired" else "it left"
                self._departed.pop((pool, worker.model_name), None)
                self._departed[pool, worker.model_name] = f"{worker.worker_id}: {why}", now_s
                _log.warning("%s worker %s is gone: %s", pool, worker.worker_id, why)
        for worker in view.workers:
            self._departed.pop((pool, worker.model_name), None)
        while len(self._departed) > DEPARTURES_MAX:
            del self._departed[next(iter(self._departed))]

    def last_departure(self, pool: Pool, model: str | None = None) -> str:
        """The last worker of a model to leave its pool, if that has none of it left, with reason and age, in words;
        empty if none has left. Without a model: of any."""
        found = [
            departure
            for (its_pool, its_model), departure in self._departed.items()
            if its_pool == pool and model in (None, its_model)
        ]
        if not found:
            return ""
        departure, at_s = found[-1]
        return f"{departure} {asyncio.get_running_loop().time() - at_s:.0f} s ago"

    def _has_jumped(self, pool: Pool, view: PoolView, asked_s: float, now_s: float) -> bool:
        """Whether Redis' clock has moved differently from ours since the last look, by more than the call took."""
        behind_s = asked_s - view.clock_ms / 1e3
        before_s = self._clock_behind_s.get(pool, behind_s)
        self._clock_behind_s[pool] = behind_s
        return abs(behind_s - before_s) > JUMP_S + (now_s - asked_s)

    def _workers(self, pool: Pool) -> tuple[WorkerRecord, ...]:
        return self._views[pool].workers if pool in self._views else ()

    async def _keep(self, pool: Pool) -> None:
        while True:
            if pool in self._away:
                await asyncio.sleep(self._refresh_s)
            else:
                with contextlib.suppress(RegistryUnavailable):  # the next look fails as well
                    last_event = self._views[pool].last_event
                    await self._registry.next_event(pool, last_event, self._refresh_s)
                await asyncio.sleep(_SETTLE_S)
            await self._look(pool, self._registry)


def _with_missing(records: tuple[WorkerRecord, ...], known: tuple[WorkerRecord, ...]) -> tuple[WorkerRecord, ...]:
    """The records, and those known before of workers that are not among them."""
    present = {record.worker_id for record in records}
    return (*records, *(record for record in known if record.worker_id not in present))
