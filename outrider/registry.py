"""Who is alive, and who has room: what the processes tell each other in Redis.

    {or:POOL}:w:ID     hash: one worker's record; expires LEASE_S after its last heartbeat
    {or:POOL}:leases   sorted set: worker ids by the moment their lease ends
    {or:POOL}:events   stream: who joined, changed state, left or expired; the last thousand
    {or:POOL}:joined   the moment, in µs, at which a run of a worker last joined the pool; no two runs have the same
    {or:POOL}:r:INC    sorted set of one run of a worker: reservations by the moment they end
    or:journal:ID      hash: a stream that another coordinator can go on with (`coordinator.journal`)
    or:losses          hash: which target workers were lost to which prompts (`coordinator.poison`), when it was told
    {or:canary}:...    a share of traffic that is decoded otherwise (`outrider.canary.store`)
    POOL is target or draft; every moment is Redis' own clock's, in ms; the hash tag keeps a pool on one cluster slot

Invariants: a record is written and removed only by the process whose incarnation it carries; of two that live under
one id, the one that joined last has it. That order is the registry's: no worker's clock counts. Each worker keeps the
moment that it was given and shows it with every heartbeat, so that the order outlasts a Redis that lost everything. A
reservation ends with its caller or by itself, so that a caller that dies
leaks nothing.

Redis is not on the critical path: no call waits longer than twice the given timeout or is tried again, and whoever
calls has something to go by when it raises RegistryUnavailable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, cast

from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from outrider.errors import RegistryUnavailable
from outrider.redis_connection import CLOCK_LUA, MAX_CONNECTIONS, close_redis, open_redis, without_password
from outrider.worker_record import Pool, WorkerRecord

_log = logging.getLogger(__name__)

LEASE_S: Final = 6.0
HEARTBEAT_S: Final = LEASE_S / 3
RESERVATION_S: Final = 15.0
"""How long a reservation lasts unless it is renewed."""
RENEW_S: Final = RESERVATION_S / 3
LOSSES_S: Final = 3600.0
"""Facts about lost workers are kept as long."""
LOSSES_MAX: Final = 2048
"""So many facts about lost workers are kept that are told once, in about 200 KiB, and as many that are told anew."""
_CALL_TIMEOUT_S: Final = 1.0
START_TIMEOUT_S: Final = 5.0
"""The timeout while a process starts: it has nothing to go by yet, so a slow answer is worth waiting for."""

_NOW: Final = f"""{CLOCK_LUA}local function tell(stream, kind, id, incarnation)
  redis.call('XADD', stream, 'MAXLEN', '~', 1000, '*', 'kind', kind, 'worker_id', id, 'incarnation', incarnation)
end
"""

# KEYS: joined. Returns this moment in µs, after that of everybody who has joined, whatever became of Redis' clock.
_JOIN: Final = """
local time = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[1]) or 0) or 0
local joined = math.max(time[1] * 1000000 + time[2], last + 1)
redis.call('SET', KEYS[1], string.format('%.0f', joined))
return joined
"""

# KEYS: hash, leases, events, joined. ARGV: worker id, incarnation, the moment in µs at which it joined, lease in ms,
# state, then field, value, ...
# Returns 1 when written, 0 when a process that joined later, or at the same time, holds the id.
_WRITE: Final = f"""{_NOW}
local holder, holders, state = unpack(redis.call('HMGET', KEYS[1], 'incarnation', 'joined_at_us', 'state'))
local joined = tonumber(ARGV[3])
if holder and holder ~= ARGV[2] and (tonumber(holders or 0) or 0) >= joined then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'joined_at_us', ARGV[3], unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[1])
if joined > (tonumber(redis.call('GET', KEYS[4]) or 0) or 0) then redis.call('SET', KEYS[4], ARGV[3]) end
if holder ~= ARGV[2] then tell(KEYS[3], 'joined', ARGV[1], ARGV[2])
elseif state ~= ARGV[5] then tell(KEYS[3], ARGV[5], ARGV[1], ARGV[2]) end
return 1
"""

# KEYS: hash, leases, events, reservations. ARGV: worker id, incarnation.
_REMOVE: Final = f"""{_NOW}
redis.call('DEL', KEYS[4])
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
tell(KEYS[3], 'left', ARGV[1], ARGV[2])
return 1
"""

# KEYS: leases, events. ARGV: the pool's prefix. Drops workers whose lease has ended. Returns the time in ms, the id of
# the last event and its kind, then for each live worker its id, the number of its reservations and a flat field-value
# list.
_READ: Final = f"""{_NOW}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('ZREM', KEYS[1], id)
  local incarnation = redis.call('HGET', ARGV[1] .. 'w:' .. id, 'incarnation')
  redis.call('DEL', ARGV[1] .. 'w:' .. id)
  tell(KEYS[2], 'expired', id, incarnation or '')
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local found = {{now, last[1] and last[1][1] or '0-0', last[1] and last[1][2][2] or ''}}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local record = redis.call('HGETALL', ARGV[1] .. 'w:' .. id)
  if #record > 0 then
    local incarnation = redis.call('HGET', ARGV[1] .. 'w:' .. id, 'incarnation') or ''
    found[#found + 1] = id
    found[#found + 1] = redis.call('ZCOUNT', ARGV[1] .. 'r:' .. incarnation, '(' .. now, '+inf')
    found[#found + 1] = record
  end
end
return found
"""

# KEYS: reservations of workers, the preferred one first. ARGV: caller's token, life in ms, then for each worker how
# many it takes. Returns the number of the first one that has room, which is then taken; 0 when none has.
_RESERVE: Final = f"""{_NOW}
for i, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  if redis.call('ZSCORE', key, ARGV[1]) or redis.call('ZCARD', key) < tonumber(ARGV[2 + i]) then
    redis.call('ZADD', key, now + ARGV[2], ARGV[1])
    redis.call('PEXPIRE', key, 2 * ARGV[2])
    return i
  end
end
return 0
"""

# KEYS: reservations of one worker. ARGV: life in ms, then tokens, which are there afterwards whether they were or not:
# their sessions run.
_RENEW: Final = f"""{_NOW}
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1])
return 1
"""

# KEYS: a stream's journal. ARGV: its writer's replica and number there, life in ms, then how many ms ago the writer
# began or nothing, then field, value, ...
# With the time it is all that the writer has: it replaces what is there, or returns 0 where another writer has begun
# since. Without, it adds, or returns 0 where the entry is another writer's, 2 where it is gone.
_WRITE_JOURNAL: Final = f"""{_NOW}
local replica, number, begun = unpack(redis.call('HMGET', KEYS[1], 'replica', 'number', 'begun_ms'))
if ARGV[4] ~= '' then
  local mine = now - ARGV[4]
  if replica == ARGV[1] then
    if tonumber(number) > tonumber(ARGV[2]) then return 0 end
  -- Not later than now: the clock may have been set back.
  elseif replica and math.min(tonumber(begun or 0) or 0, now) > mine then return 0 end
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'replica', ARGV[1], 'number', ARGV[2], 'begun_ms', string.format('%.0f', mine))
elseif not replica then return 2
elseif replica ~= ARGV[1] or number ~= ARGV[2] then return 0 end
if #ARGV > 4 then redis.call('HSET', KEYS[1], unpack(ARGV, 5)) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


# KEYS: losses. ARGV: life of a fact in ms, the most facts, how many of those that follow keep the moment at which they
# were told first, facts. Returns now, and fact, moment, ...
_EXCHANGE_LOSSES: Final = f"""{_NOW}
local said = redis.call('HGETALL', KEYS[1])
for i = 1, #said, 2 do
  local at = tonumber(said[i + 1])
  if not at or math.abs(now - at) > tonumber(ARGV[1]) then redis.call('HDEL', KEYS[1], said[i]) end
end
local moment = string.format('%.0f', now)
for i = 4, #ARGV do
  local is_once = i < 4 + ARGV[3]
  local has_room = redis.call('HLEN', KEYS[1]) < ARGV[2] * (is_once and 1 or 2)
  local is_known = redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1
  if is_known and not is_once or not is_known and has_room then redis.call('HSET', KEYS[1], ARGV[i], moment) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {{moment, redis.call('HGETALL', KEYS[1])}}
"""


class JournalWriter(NamedTuple):
    """Who writes to a stream's journal: a replica, which numbers the streams that it begins.

    Of two writers of one replica the larger number began later. Of two replicas' Redis' clock decides, with an error of
    the time that a call takes to arrive, for each says with it how long ago it began.
    """

    replica: str
    number: int


@dataclass(frozen=True, slots=True)
class JournalUpdate:
    """What one call writes to a stream's journal."""

    writer: JournalWriter
    fields: Mapping[str, str]
    life_s: float  # for which the journal lasts from now on
    age_s: float | None  # of the writer, where the fields replace what is there; None: they are added to it


class JournalWrite(IntEnum):
    """What became of a write to a stream's journal."""

    SUPERSEDED = 0  # another writer has the stream now
    WRITTEN = 1
    GONE = 2  # Redis lost it, or it expired: all of it has to be written again


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool as of one moment."""

    workers: tuple[WorkerRecord, ...] = ()  # alive, in order of their ids
    num_reserved: tuple[int, ...] = ()  # of each: reservations that have not ended
    last_event: str = "0-0"  # to wait for the next one after
    last_kind: str = ""  # of that event: joined, left, expired or a new state
    clock_ms: int = 0  # what the registry's clock showed
    # Workers whose lease lasts and whose record cannot be read: id and, as far as that can be read, incarnation.
    unreadable: frozenset[tuple[str, str]] = frozenset()


class RegistryCalls(Protocol):
    """What the registry is asked. `Registry` asks Redis; the simulation has a model of it. All raise
    RegistryUnavailable, and nothing else."""

    async def join(self, pool: Pool) -> int: ...
    async def write(self, record: WorkerRecord, joined_at_us: int = 0) -> bool: ...
    async def remove(self, record: WorkerRecord) -> bool: ...
    async def read(self, pool: Pool) -> PoolView: ...
    async def next_event(self, pool: Pool, after: str, timeout_s: float) -> bool: ...
    async def reserve(
        self, pool: Pool, incarnations: Sequence[str], limits: Sequence[int], token: str
    ) -> int | None: ...
    async def renew(self, pool: Pool, incarnation: str, tokens: Sequence[str]) -> None: ...
    async def release(self, pool: Pool, incarnation: str, token: str) -> None: ...
    async def write_journal(self, request_id: str, update: JournalUpdate) -> JournalWrite: ...
    async def read_journal(self, request_id: str) -> Mapping[str, str]: ...
    async def exchange_losses(self, once: Sequence[str], anew: Sequence[str]) -> Mapping[str, float]: ...


class Registry:
    """The Redis connection. Calls fail fast: one attempt, RegistryUnavailable."""

    def __init__(
        self,
        url: str,
        timeout_s: float = _CALL_TIMEOUT_S,
        *,
        lease_s: float = LEASE_S,
        reservation_s: float = RESERVATION_S,
    ) -> None:
        """`url` as `outrider.redis_connection` takes it; connects on first use. Raises ConfigurationError."""
        self.address = without_password(url)
        self._timeout_s = timeout_s
        self._lease_ms = int(lease_s * 1000)
        self._reservation_ms = int(reservation_s * 1000)
        self._client = open_redis(url, timeout_s)
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._join = self.register_script(_JOIN)
        self._write = self.register_script(_WRITE)
        self._remove = self.register_script(_REMOVE)
        self._read = self.register_script(_READ)
        self._reserve = self.register_script(_RESERVE)
        self._renew = self.register_script(_RENEW)
        self._write_journal = self.register_script(_WRITE_JOURNAL)
        self._exchange_losses = self.register_script(_EXCHANGE_LOSSES)

    async def ping(self) -> None:
        """Returns when Redis answers. Raises RegistryUnavailable, naming the address without its password."""
        await self.ask(self._client.ping())

    async def close(self) -> None:
        """Gives the connections back."""
        await close_redis(self._client)

    async def join(self, pool: Pool) -> int:
        """The moment, in µs, at which a run of a worker joins a pool, to be shown with all that it writes. Asked apart
        from writing: a first write that arrives late, or twice, changes nothing about who came last."""
        return int(await self.ask(self._join(keys=[f"{_prefix(pool)}joined"])))

    async def write(self, record: WorkerRecord, joined_at_us: int = 0) -> bool:
        """Stores a record for the time of a lease. False when a process that joined later holds the id; a run that has
        not joined stands back for everybody."""
        prefix = _prefix(record.pool)
        stored = [part for pair in record.to_fields().items() for part in pair]
        arguments: list[str | int] = [
            record.worker_id,
            record.incarnation,
            joined_at_us,
            self._lease_ms,
            record.state,
            *stored,
        ]
        keys = [f"{prefix}{name}" for name in (f"w:{record.worker_id}", "leases", "events", "joined")]
        return bool(await self.ask(self._write(keys=keys, args=arguments)))

    async def remove(self, record: WorkerRecord) -> bool:
        """Removes a record. False when it is gone or belongs to another incarnation."""
        prefix = _prefix(record.pool)
        keys = [
            f"{prefix}w:{record.worker_id}",
            f"{prefix}leases",
            f"{prefix}events",
            f"{prefix}r:{record.incarnation}",
        ]
        return bool(await self.ask(self._remove(keys=keys, args=[record.worker_id, record.incarnation])))

    async def read(self, pool: Pool) -> PoolView:
        """The pool's live workers. A record that cannot be read is logged, and named among those."""
        prefix = _prefix(pool)
        answer = await self.ask(self._read(keys=[f"{prefix}leases", f"{prefix}events"], args=[prefix]))
        clock_ms, last_event, last_kind, *rows = cast("list[Any]", answer)
        found: list[tuple[WorkerRecord, int]] = []
        unreadable = set()
        for worker_id, num_reserved, row in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            stored = dict(zip(row[::2], row[1::2], strict=True))
            try:
                record = WorkerRecord.from_fields(stored)
                if (record.pool, record.worker_id) != (pool, worker_id):
                    raise ValueError(f"it is that of {record.pool} worker {record.worker_id}")
            except ValueError as error:
                _log.warning("ignoring the record of %s worker %s: %s", pool, worker_id, error)
                unreadable.add((worker_id, stored.get("incarnation", "")))
            else:
                found.append((record, num_reserved))
        found.sort(key=lambda each: each[0].worker_id)
        records, counts = tuple(record for record, _ in found), tuple(num for _, num in found)
        return PoolView(records, counts, last_event, last_kind, clock_ms, frozenset(unreadable))

    async def next_event(self, pool: Pool, after: str, timeout_s: float) -> bool:
        """Waits until the pool's members change. False when they did not within `timeout_s`, which should stay below
        this connection's own timeout."""
        stream = f"{_prefix(pool)}events"
        news = await self.ask(
            self._client.xread({stream: after}, count=1, block=max(int(timeout_s * 1e3), 1))
        )
        return bool(news)

    async def reserve(
        self, pool: Pool, incarnations: Sequence[str], limits: Sequence[int], token: str
    ) -> int | None:
        """Takes a place for RESERVATION_S at the first of these runs of workers that holds fewer than its limit.

        Returns its index, None when all are full. Safe to repeat: a token takes one place at most per worker.
        """
        keys = [f"{_prefix(pool)}r:{incarnation}" for incarnation in incarnations]
        arguments: list[str | int] = [token, self._reservation_ms, *limits]
        number = int(await self.ask(self._reserve(keys=keys, args=arguments)))
        return number - 1 if number else None

    async def renew(self, pool: Pool, incarnation: str, tokens: Sequence[str]) -> None:
        """Has these reservations last for another RESERVATION_S, also those that were lost."""
        key = f"{_prefix(pool)}r:{incarnation}"
        arguments: list[str | int] = [self._reservation_ms, *tokens]
        await self.ask(self._renew(keys=[key], args=arguments))

    async def release(self, pool: Pool, incarnation: str, token: str) -> None:
        """Gives a place back."""
        await self.ask(self._client.zrem(f"{_prefix(pool)}r:{incarnation}", token))

    async def write_journal(self, request_id: str, update: JournalUpdate) -> JournalWrite:
        """Sets fields of a stream's journal (`coordinator.journal`).

        They replace what is there unless another writer has begun since, or are added to what this writer has written.
        So a call can be repeated at any time, and no clock but Redis' own decides between replicas.
        """
        age_ms: str | int = "" if update.age_s is None else int(update.age_s * 1000)
        arguments: list[str | int] = [*update.writer, int(update.life_s * 1000), age_ms]
        arguments += [part for pair in update.fields.items() for part in pair]
        key = f"or:journal:{request_id}"
        return JournalWrite(int(await self.ask(self._write_journal(keys=[key], args=arguments))))

    async def read_journal(self, request_id: str) -> Mapping[str, str]:
        """All of it; empty when there is none."""
        return cast("dict[str, str]", await self.ask(self._client.hgetall(f"or:journal:{request_id}")))

    async def exchange_losses(self, once: Sequence[str], anew: Sequence[str]) -> Mapping[str, float]:
        """Tells facts about lost workers, in whatever words, and returns all that were told in the last LOSSES_S, by
        whomever: how many seconds ago. Facts told `once` keep the first moment, `anew` the latest."""
        arguments: list[str | int] = [int(LOSSES_S * 1000), LOSSES_MAX, len(once), *once, *anew]
        answer = await self.ask(self._exchange_losses(keys=["or:losses"], args=arguments))
        clock_ms, told = cast("tuple[str, list[str]]", answer)
        return {
            fact: max(int(clock_ms) - int(moment), 0) / 1e3
            for fact, moment in zip(told[::2], told[1::2], strict=True)
        }

    def register_script(self, source: str) -> AsyncScript:
        """A Lua script on this connection; `ask` for what calling it returns."""
        return self._client.register_script(source)

    async def delete(self, keys: Sequence[str]) -> None:
        """Removes keys of one cluster slot, those that there are."""
        await self.ask(self._client.delete(*keys))

    async def ask(self, reply: Any) -> Any:
        """Awaits a reply of Redis. Raises RegistryUnavailable."""
        task = asyncio.current_task()
        num_cancellations = task.cancelling() if task is not None else 0
        try:
            # For a connection, for connecting and for the answer. More calls at once than connections are an error.
            async with asyncio.timeout(2 * self._timeout_s), self._room:
                answer = await reply
        except (RedisError, OSError, TimeoutError) as error:
            why = str(error).partition(" : <")[
                0
            ]  # where no Sentinel answers, redis-py goes on with its own objects
            raise RegistryUnavailable(
                f"Redis at {self.address} does not answer ({why or type(error).__name__}); "
                "start one there, or set OUTRIDER_REDIS_URL to one that runs "
                "(`outrider serve` without it starts its own)"
            ) from error
        finally:
            if asyncio.iscoroutine(reply):
                reply.close()  # it may not have been begun
            # redis-py (8.1) swallows cancellations that meet its own work; a task that nobody can end is the price.
            if task is not None and task.cancelling() > num_cancellations:
                raise asyncio.CancelledError
        return answer


async def check_redis(url: str) -> None:
    """Returns when a Redis answers. Raises ConfigurationError for what is no URL of one, RegistryUnavailable."""
    registry = Registry(url, START_TIMEOUT_S)
    try:
        await registry.ping()
    finally:
        await registry.close()


def _prefix(pool: Pool) -> str:
    return f"{{or:{pool}}}:"
