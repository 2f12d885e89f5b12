"""The calls by which a worker joins its pool, renews its lease and leaves, in plain commands of Redis.

Whoever may run scripts can stop Redis for everybody: a script may run for ever, and meanwhile nobody else is answered.
So a worker's user in Redis may run none (`k8s/redis_users.sh` lists what it may), and these calls are transactions:
WATCH, reads, MULTI, writes, EXEC. Redis refuses EXEC if the watched record has changed since it was read, and the call
is made again. They also need nothing that somebody has to load into Redis first, or again after a restart.

`{or:POOL}:joins` is a sorted set with one member: the time, in µs, at which a worker process last joined the pool.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from outrider.registry.worker_record import WorkerRecord

TRIES_MAX: Final = 5
"""Most transactions of one call. Two processes with one id rarely write at the same moment; the next heartbeat tries
again."""
_EVENTS_MAX: Final = 1000
_LAST: Final = "last"


async def join(client: redis.asyncio.Redis, prefix: str) -> int:
    """Returns the time in µs, later than that of every earlier join, even if Redis' clock was set back."""
    seconds, microseconds = await client.time()
    async with client.pipeline(transaction=True) as calls:
        calls.zadd(f"{prefix}joins", {_LAST: int(seconds) * 1_000_000 + int(microseconds)}, gt=True)
        calls.zincrby(f"{prefix}joins", 1, _LAST)
        _, joined = await calls.execute()
    return int(joined)


async def write(
    client: redis.asyncio.Redis, prefix: str, record: WorkerRecord, joined_at_us: int, life_ms: int
) -> bool:
    """Stores a record; False when a process that joined later, or at the same time, holds the id."""
    key = f"{prefix}w:{record.worker_id}"

    async def prepare(calls: Pipeline) -> bool:
        holder, holder_joined, state = await calls.hmget(key, ["incarnation", "joined_at_us", "state"])
        if holder not in (None, record.incarnation) and _number(holder_joined) >= joined_at_us:
            return False
        seconds, microseconds = await calls.time()
        calls.multi()
        calls.delete(key)
        stored: dict[Any, Any] = {"joined_at_us": joined_at_us, **record.to_fields()}
        calls.hset(key, mapping=stored)
        calls.pexpire(key, life_ms)
        calls.zadd(f"{prefix}leases", {record.worker_id: int(seconds) * 1000 + int(microseconds) // 1000 + life_ms})
        # The order of joins survives a Redis that lost everything.
        calls.zadd(f"{prefix}joins", {_LAST: joined_at_us}, gt=True)
        if holder != record.incarnation:
            _tell(calls, prefix, "joined", record)
        elif state != record.state:
            _tell(calls, prefix, record.state, record)
        return True

    return await _transact(client, key, prepare)


async def remove(client: redis.asyncio.Redis, prefix: str, record: WorkerRecord) -> bool:
    """Removes a record and its process' reservations; False when the record is gone or another process'."""
    key = f"{prefix}w:{record.worker_id}"

    async def prepare(calls: Pipeline) -> bool:
        is_ours = await calls.hget(key, "incarnation") == record.incarnation
        calls.multi()
        calls.delete(f"{prefix}r:{record.incarnation}")
        if is_ours:
            calls.delete(key)
            calls.zrem(f"{prefix}leases", record.worker_id)
            _tell(calls, prefix, "left", record)
        return is_ours

    return await _transact(client, key, prepare)


async def _transact(client: redis.asyncio.Redis, key: str, prepare: Callable[[Pipeline], Awaitable[bool]]) -> bool:
    """Executes the commands that `prepare` queues after its reads, unless `key` has changed since: then it is asked
    again, up to TRIES_MAX times. Also where the connection was lost in between. Returns what it returned."""
    for num_left in reversed(range(TRIES_MAX)):
        async with client.pipeline(transaction=True) as calls:
            try:
                await calls.watch(key)
                result = await prepare(calls)
                if len(calls):
                    await calls.execute()
            except WatchError:
                if not num_left:
                    raise
            else:
                return result
    raise AssertionError


def _tell(calls: Pipeline, prefix: str, kind: str, record: WorkerRecord) -> None:
    fields: dict[Any, Any] = {"kind": kind, "worker_id": record.worker_id, "incarnation": record.incarnation}
    calls.xadd(f"{prefix}events", fields, maxlen=_EVENTS_MAX, approximate=True)


def _number(text: str | bytes | None) -> int:
    """A number that another process of the pool has written; 0 for anything else."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else 0
