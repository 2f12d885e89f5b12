"""Keeps one worker's entry in the registry alive as long as the worker lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Final, Self

from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import HEARTBEAT_S, RegistryCalls
from outrider.registry.worker_record import WorkerLoad, WorkerRecord, WorkerState

_log = logging.getLogger(__name__)

_BACKOFF_MIN_S: Final = 0.2
_BACKOFF_MAX_S: Final = 2.0


class WorkerLease:
    """Keeps one worker in the registry as long as the context is open.

    async with WorkerLease(registry, record, load=lambda: WorkerLoad(num_running, num_waiting)):
        await serve()

    Entering writes the record once and does not fail when Redis is away: a task writes it every `heartbeat_s`
    from then on, or as soon as Redis is back. Leaving removes it.
    """

    def __init__(
        self,
        registry: RegistryCalls,
        record: WorkerRecord,
        load: Callable[[], WorkerLoad],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`load` is called on the event loop and must not block."""
        self._registry = registry
        self._record = record
        self._load = load
        self._heartbeat_s = heartbeat_s
        self.is_published = False  # the record was written at least once
        self._joined_at_us = 0  # from the registry; 0: not yet
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # A process that joined later has the id; this one waits for it to leave.
        self.is_superseded = False

    def set_state(self, state: WorkerState) -> None:
        """Publishes a new state with an immediate heartbeat; used to announce draining."""
        if state != self._record.state:
            self._record = replace(self._record, state=state)
            self._wake.set()

    async def __aenter__(self) -> Self:
        name = f"lease of {self._record.worker_id}"
        await self._try_beat()
        self._task = asyncio.create_task(keep_going(self._keep, f"the {name}"), name=name)
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        with contextlib.suppress(RegistryUnavailable):  # the lease expires by itself
            await self._registry.remove(self._record)

    async def _keep(self) -> None:
        backoff_s = _BACKOFF_MIN_S
        is_written = self.is_published
        while True:
            if is_written:
                wait_s, backoff_s = self._heartbeat_s, _BACKOFF_MIN_S
            else:
                wait_s, backoff_s = backoff_s * random.uniform(0.5, 1.0), min(2 * backoff_s, _BACKOFF_MAX_S)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that coincides with the event.
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            self._wake.clear()
            is_written = await self._try_beat()

    async def _try_beat(self) -> bool:
        """Sends one heartbeat. False when it did not arrive; the caller retries soon."""
        record = replace(self._record, **asdict(self._load()))
        try:
            if not self._joined_at_us:
                self._joined_at_us = await self._registry.join(record.pool)
            is_ours = await self._registry.write(record, self._joined_at_us)
        except RegistryUnavailable as error:
            _log.warning("worker %s is not announced: %s", record.worker_id, error.message)
            return False
        self.is_published |= is_ours
        if self.is_superseded == is_ours:
            self.is_superseded = not is_ours
            if is_ours:
                _log.info("worker id %s belongs to this process again", record.worker_id)
            else:
                _log.error(
                    "worker id %s belongs to a process that joined later; this one is not announced",
                    record.worker_id,
                )
        return True
