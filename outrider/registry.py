"""Who is alive: worker leases in Redis, and the coordinator's snapshot of them.

    {or:POOL}:w:ID   hash with one worker's record; expires 6 s after its last heartbeat
    {or:POOL}:ids    set of the pool's worker ids; those whose hash has expired are dropped on reading

The hash tag keeps a pool on one cluster slot, so the scripts below may touch all of it. Invariant: a record
is written and removed only by the process whose incarnation it carries; a newer claim of the same id wins.

Redis is not on the critical path. A lease keeps trying while Redis is away and never raises into its worker;
a directory keeps its last snapshot and says that it is `degraded`. No call here waits longer than a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Self, cast
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from outrider.errors import RegistryUnavailable
from outrider.worker_record import Pool, Snapshot, WorkerRecord, WorkerState

__all__ = ["Pool", "Registry", "Snapshot", "WorkerDirectory", "WorkerLease", "WorkerRecord", "WorkerState"]

_log = logging.getLogger(__name__)

LEASE_S: Final = 6.0
HEARTBEAT_S: Final = LEASE_S / 3
REFRESH_S: Final = 0.5
_CALL_TIMEOUT_S: Final = 1.0
_BACKOFF_MIN_S: Final = 0.2
_BACKOFF_MAX_S: Final = 2.0

# KEYS: hash, ids. ARGV: mode, worker id, incarnation, lease in ms, then field, value, ... Returns 1 when
# written, 0 when another incarnation holds the id. A "claim" comes from a process that just started and takes
# it over.
_WRITE: Final = """
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if ARGV[1] ~= 'claim' and holder and holder ~= ARGV[3] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[2])
return 1
"""

# KEYS: hash, ids. ARGV: worker id, incarnation.
_REMOVE: Final = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
"""

# KEYS: ids. ARGV: prefix of the hashes' keys. Returns one flat field-value list per live worker.
_READ: Final = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('HGETALL', ARGV[1] .. id)
  if #record == 0 then redis.call('SREM', KEYS[1], id) else found[#found + 1] = record end
end
return found
"""


class Registry:
    """The Redis connection. Calls fail fast: one attempt, at most a second, RegistryUnavailable."""

    def __init__(self, url: str) -> None:
        """`url` as redis-py takes it: redis://[[user]:password@]host:port/db, rediss:// or unix://.

        Raises ValueError when it is not one. Connects on first use.
        """
        self.address = _without_password(url)
        self._client = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_CALL_TIMEOUT_S,
            socket_connect_timeout=_CALL_TIMEOUT_S,
            health_check_interval=15,
            retry=Retry(NoBackoff(), 0),  # the default sleeps through ten attempts
            max_connections=8,
        )
        self._write = self.register_script(_WRITE)
        self._remove = self.register_script(_REMOVE)
        self._read = self.register_script(_READ)

    async def ping(self) -> None:
        """Returns when Redis answers. Raises RegistryUnavailable, naming the address without its password."""
        await self.ask(self._client.ping())

    async def close(self) -> None:
        """Gives the connections back."""
        await self._client.aclose()

    async def write(self, record: WorkerRecord, *, is_claim: bool) -> bool:
        """Stores a record for LEASE_S. False when another incarnation holds the id and this is no claim."""
        stored = [part for pair in record.to_fields().items() for part in pair]
        mode = "claim" if is_claim else "heartbeat"
        arguments: list[str | int] = [
            mode,
            record.worker_id,
            record.incarnation,
            int(LEASE_S * 1000),
            *stored,
        ]
        return bool(await self.ask(self._write(keys=_keys(record), args=arguments)))

    async def remove(self, record: WorkerRecord) -> bool:
        """Removes a record. False when it is gone or belongs to another incarnation."""
        arguments = [record.worker_id, record.incarnation]
        return bool(await self.ask(self._remove(keys=_keys(record), args=arguments)))

    async def read(self, pool: Pool) -> tuple[WorkerRecord, ...]:
        """The pool's live workers in order of their ids. A record that cannot be read is logged and left out."""
        rows = await self.ask(self._read(keys=[f"{{or:{pool}}}:ids"], args=[f"{{or:{pool}}}:w:"]))
        records = []
        for row in cast("list[list[str]]", rows):
            stored = dict(zip(row[::2], row[1::2], strict=True))
            try:
                records.append(WorkerRecord.from_fields(stored))
            except ValueError as error:
                _log.warning("ignoring the record of %s worker %s: %s", pool, stored.get("worker_id"), error)
        return tuple(sorted(records, key=lambda record: record.worker_id))

    def register_script(self, source: str) -> AsyncScript:
        """A Lua script on this connection; `ask` for what calling it returns."""
        return self._client.register_script(source)

    async def ask(self, reply: Any) -> Any:
        """Awaits a reply of Redis, two seconds at the most. Raises RegistryUnavailable."""
        task = asyncio.current_task()
        num_cancellations = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(2 * _CALL_TIMEOUT_S):  # connecting and asking
                answer = await reply
        except (RedisError, OSError, TimeoutError) as error:
            raise RegistryUnavailable(
                f"Redis at {self.address} does not answer ({str(error) or type(error).__name__}); "
                "start one there, or set OUTRIDER_REDIS_URL to one that runs "
                "(`outrider serve` without it starts its own)"
            ) from error
        finally:
            # redis-py (8.1) swallows cancellations that meet its own work; a task that nobody can end is the price.
            if task is not None and task.cancelling() > num_cancellations:
                raise asyncio.CancelledError
        return answer


class WorkerLease:
    """Keeps one worker in the registry for as long as the context is open.

        async with WorkerLease(registry, record, load=lambda: (num_running, num_waiting)):
            await serve()

    Entering writes the record once and does not fail when Redis is away: a task writes it every HEARTBEAT_S
    from then on, or as soon as Redis is back. Leaving removes it.
    """

    def __init__(self, registry: Registry, record: WorkerRecord, load: Callable[[], tuple[int, int]]) -> None:
        """`load` returns (num_running, num_waiting); it is called on the event loop and must not block."""
        self._registry = registry
        self._record = record
        self._load = load
        self._has_claimed = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # A newer process claimed the id; this one stays out of the registry for good.
        self.is_superseded = False

    @property
    def is_published(self) -> bool:
        """Whether the record has been in the registry at least once."""
        return self._has_claimed

    def set_state(self, state: WorkerState) -> None:
        """Publishes a new state with the next heartbeat, which is at once. Draining is announced so."""
        self._record = replace(self._record, state=state)
        self._wake.set()

    async def __aenter__(self) -> Self:
        await self._try_beat()
        self._task = asyncio.create_task(self._keep(), name=f"lease of {self._record.worker_id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(RegistryUnavailable):  # the lease runs out by itself
            await self._registry.remove(self._record)

    async def _keep(self) -> None:
        backoff_s = _BACKOFF_MIN_S
        is_written = self._has_claimed
        while not self.is_superseded:
            if is_written:
                wait_s, backoff_s = HEARTBEAT_S, _BACKOFF_MIN_S
            else:
                wait_s, backoff_s = backoff_s * random.uniform(0.5, 1.0), min(2 * backoff_s, _BACKOFF_MAX_S)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that meets the event being set.
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            self._wake.clear()
            is_written = await self._try_beat()

    async def _try_beat(self) -> bool:
        """One heartbeat. False when it did not arrive; the caller tries again."""
        num_running, num_waiting = self._load()
        record = replace(self._record, num_running=num_running, num_waiting=num_waiting)
        try:
            is_ours = await self._registry.write(record, is_claim=not self._has_claimed)
        except RegistryUnavailable as error:
            _log.warning("worker %s is not announced: %s", record.worker_id, error.message)
            return False
        self._has_claimed = True
        if not is_ours:
            self.is_superseded = True
            _log.error("worker id %s was taken over; this process is no longer announced", record.worker_id)
        return is_ours


class WorkerDirectory:
    """The snapshot that requests are routed by, kept fresh by a task while the context is open.

    A Redis that comes back may have lost everything. Workers known from before stay in the snapshot until
    each has had a lease's time to announce itself again.
    """

    def __init__(self, registry: Registry, refresh_s: float = REFRESH_S) -> None:
        self._registry = registry
        self._refresh_s = refresh_s
        self._task: asyncio.Task[None] | None = None
        self._trusted_until_s = 0.0  # on the event loop's clock: how long records from before an outage count
        self.snapshot = Snapshot(degraded=True)

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._task = asyncio.create_task(self._keep(), name="worker directory")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def refresh(self) -> Snapshot:
        """Looks now. With Redis away the snapshot stays as it was, flagged degraded; never raises."""
        try:
            targets = await self._registry.read("target")
            drafts = await self._registry.read("draft")
        except RegistryUnavailable as error:
            if not self.snapshot.degraded:
                _log.warning("serving from the last snapshot: %s", error.message)
            self.snapshot = replace(self.snapshot, degraded=True)
        else:
            now_s = asyncio.get_running_loop().time()
            if self.snapshot.degraded:
                self._trusted_until_s = now_s + LEASE_S
            if now_s < self._trusted_until_s:
                targets = _with_missing(targets, self.snapshot.targets)
                drafts = _with_missing(drafts, self.snapshot.drafts)
            self.snapshot = Snapshot(targets, drafts)
        return self.snapshot

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.refresh()


def _with_missing(
    records: tuple[WorkerRecord, ...], known: tuple[WorkerRecord, ...]
) -> tuple[WorkerRecord, ...]:
    """The records, and those known from before whose worker is not among them."""
    present = {record.worker_id for record in records}
    return (*records, *(record for record in known if record.worker_id not in present))


def _keys(record: WorkerRecord) -> list[str]:
    return [f"{{or:{record.pool}}}:w:{record.worker_id}", f"{{or:{record.pool}}}:ids"]


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
