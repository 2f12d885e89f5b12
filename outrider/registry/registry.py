"""Registry in Redis: live workers, reservations, journals of streams.

{or:POOL}:w:ID     hash: one worker's record; expires LEASE_S after its last heartbeat
{or:POOL}:leases   sorted set: worker ids by the end of their lease
{or:POOL}:events   stream: who joined, changed state, left or expired; the last thousand
{or:POOL}:joins    sorted set of one member: time, in µs, at which a process last joined; unique to the process
{or:POOL}:r:INC    sorted set of one worker process: reservations by their end
or:journal:ID      hash: a stream that another coordinator can continue (`coordinator.recovery.journal`)
or:response:ID     hash: a response that a client may refer to (`coordinator.service.stored_responses`)
{or:batch:ID}:...  a batch and the leases on its lines (`coordinator.batches.line_journal`); also or:batches:...
or:file:..., or:files:...  files of clients (`coordinator.batches.files`)
or:losses          hash: targets lost to which prompts (`coordinator.recovery.poison`), and when that was reported
{or:canary}:...    a share of traffic that is decoded otherwise (`outrider.canary.store`)
POOL is target or draft; all times are Redis' own clock's, in ms; the hash tag keeps a pool on one cluster slot

Invariants: a record is written and removed only by the process whose incarnation it carries; of two processes with one
id, the one that joined last owns the record. The registry defines that order; no worker's clock counts. Each worker
keeps its join time and sends it with every heartbeat, so that the order survives a Redis that lost everything. A
reservation is released by its caller or expires, so that a caller that dies leaks nothing.

Redis is not on the critical path: no call waits longer than twice the given timeout or is retried, and every caller can
go on when it raises RegistryUnavailable.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, cast

from redis.asyncio.client import Pipeline
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, AuthorizationError, NoScriptError, RedisError, ResponseError

from outrider.errors import RegistryUnavailable
from outrider.registry import own_lease, scripts
from outrider.registry.redis_connection import MAX_CONNECTIONS, close_redis, open_redis, without_password
from outrider.registry.worker_record import Pool, WorkerRecord

_log = logging.getLogger(__name__)

LEASE_S: Final = 6.0
HEARTBEAT_S: Final = LEASE_S / 3
RESERVATION_S: Final = 15.0
"""Life of a reservation unless it is renewed."""
RENEW_S: Final = RESERVATION_S / 3
LOSSES_S: Final = 3600.0
"""Life of facts about lost workers."""
LOSSES_MAX: Final = 2048
"""Most facts about lost workers that are told `once`, in about 200 KiB, and as many that are told `anew`."""
WORKERS_MAX: Final = 4096
"""Most workers of a pool that are read."""
ENDED_AT_ONCE_MAX: Final = 1000
"""Most workers whose lease has ended that one reading drops."""
FIELDS_MAX: Final = 128
"""Most fields of a worker's record; one with more is not read."""
_CALL_TIMEOUT_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.5
_TELL_EVERY_S: Final = 15.0
_REFUSALS: Final = (AuthenticationError, AuthorizationError, ResponseError)
"""Answers of a Redis that waiting does not change."""
START_TIMEOUT_S: Final = 5.0
"""The timeout while a process starts: it has no earlier data to go on with, so a slow answer is worth waiting for."""


class JournalWriter(NamedTuple):
    """Identity of the writer of a stream's journal: a replica, and the number of the stream there.

    Of two writers of one replica the larger number began later. Between replicas Redis' clock decides, with an error of
    the time that a call takes to arrive, because each sends how long ago it began.
    """

    replica: str
    number: int


@dataclass(frozen=True, slots=True)
class JournalUpdate:
    """The content of one write to a stream's journal."""

    writer: JournalWriter
    fields: Mapping[str, str]
    life_s: float  # life of the journal from now on
    age_s: float | None  # of the writer, where the fields replace the journal; None: they are added


class JournalWrite(IntEnum):
    """Result of a write to a stream's journal."""

    SUPERSEDED = 0  # another writer has the stream now
    WRITTEN = 1
    GONE = 2  # Redis lost it, or it expired: all of it has to be written again


@dataclass(frozen=True, slots=True)
class PoolView:
    """The state of one pool at one time."""

    workers: tuple[WorkerRecord, ...] = ()  # alive, ordered by id
    num_reserved: tuple[int, ...] = ()  # of each: current reservations
    last_event: str = "0-0"  # for `next_event`
    last_kind: str = ""  # of that event: joined, left, expired or a new state
    clock_ms: int = 0  # the registry's clock
    # Live workers whose record cannot be read: id and, if readable, incarnation.
    unreadable: frozenset[tuple[str, str]] = frozenset()


class RegistryCalls(Protocol):
    """Interface of the registry. `Registry` uses Redis; the simulation has a model of it. All methods raise
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
    async def write_journals(self, updates: Sequence[tuple[str, JournalUpdate]]) -> Sequence[JournalWrite]: ...
    async def read_journal(self, request_id: str) -> Mapping[str, str]: ...
    async def exchange_losses(self, once: Sequence[str], anew: Sequence[str]) -> Mapping[str, float]: ...


class Registry:
    """The registry over one Redis client. Calls fail fast: one attempt, then RegistryUnavailable."""

    def __init__(
        self,
        url: str,
        timeout_s: float = _CALL_TIMEOUT_S,
        *,
        lease_s: float = LEASE_S,
        reservation_s: float = RESERVATION_S,
    ) -> None:
        """`url` as for `outrider.registry.redis_connection`; connects on first use. Raises ConfigurationError."""
        self.address = without_password(url)
        self._timeout_s = timeout_s
        self._lease_ms = int(lease_s * 1000)
        self._reservation_ms = int(reservation_s * 1000)
        self._client = open_redis(url, timeout_s)
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._read = self.register_script(scripts.READ)
        self._reserve = self.register_script(scripts.RESERVE)
        self._renew = self.register_script(scripts.RENEW)
        self._write_journal = self.register_script(scripts.WRITE_JOURNAL)
        self._exchange_losses = self.register_script(scripts.EXCHANGE_LOSSES)

    async def ping(self) -> None:
        """Returns when Redis answers. Raises RegistryUnavailable, naming the address without its password."""
        await self.ask(self._client.ping())

    async def close(self) -> None:
        await close_redis(self._client)

    async def now_s(self) -> float:
        """Redis' clock, in seconds since 1970: hosts' clocks differ, and what they all judge needs one."""
        seconds, microseconds = await self.ask(self._client.time())
        return int(seconds) + int(microseconds) / 1e6

    async def join(self, pool: Pool) -> int:
        """The time, in µs, at which a worker process joins a pool; it must accompany every write. It is separate from
        writing, so that a first write that arrives late, or twice, does not change the order."""
        return int(await self.ask(own_lease.join(self._client, _prefix(pool))))

    async def write(self, record: WorkerRecord, joined_at_us: int = 0) -> bool:
        """Stores a record for the time of a lease. False when a process that joined later holds the id; a process
        without a join time yields to all others."""
        calls = own_lease.write(self._client, _prefix(record.pool), record, joined_at_us, self._lease_ms)
        return bool(await self.ask(calls))

    async def remove(self, record: WorkerRecord) -> bool:
        """Removes a record. False when it is gone or belongs to another incarnation."""
        return bool(await self.ask(own_lease.remove(self._client, _prefix(record.pool), record)))

    async def read(self, pool: Pool) -> PoolView:
        """Reads the pool's live workers. A record that cannot be read is logged and listed as unreadable."""
        prefix = _prefix(pool)
        arguments: list[str | int] = [prefix, ENDED_AT_ONCE_MAX, WORKERS_MAX, FIELDS_MAX]
        answer = await self.ask(self._read(keys=[f"{prefix}leases", f"{prefix}events"], args=arguments))
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
        events = await self.ask(self._client.xread({stream: after}, count=1, block=max(int(timeout_s * 1e3), 1)))
        return bool(events)

    async def reserve(self, pool: Pool, incarnations: Sequence[str], limits: Sequence[int], token: str) -> int | None:
        """Reserves a slot for RESERVATION_S at the first of these worker processes that has fewer reservations than its
        limit.

        Returns its index, None when all are full. Safe to repeat: a token takes at most one slot per worker.
        """
        keys = [f"{_prefix(pool)}r:{incarnation}" for incarnation in incarnations]
        arguments: list[str | int] = [token, self._reservation_ms, *limits]
        number = int(await self.ask(self._reserve(keys=keys, args=arguments)))
        return number - 1 if number else None

    async def renew(self, pool: Pool, incarnation: str, tokens: Sequence[str]) -> None:
        """Extends these reservations by another RESERVATION_S, and restores lost ones."""
        key = f"{_prefix(pool)}r:{incarnation}"
        arguments: list[str | int] = [self._reservation_ms, *tokens]
        await self.ask(self._renew(keys=[key], args=arguments))

    async def release(self, pool: Pool, incarnation: str, token: str) -> None:
        await self.ask(self._client.zrem(f"{_prefix(pool)}r:{incarnation}", token))

    async def write_journals(self, updates: Sequence[tuple[str, JournalUpdate]]) -> Sequence[JournalWrite]:
        """Sets fields of streams' journals (`coordinator.recovery.journal`), each with its request id, in one exchange
        with Redis: one for each stream took 40 % of a coordinator's time.

        They replace a journal unless another writer has begun since, or are added to what this writer has written. So
        a call can be repeated at any time, and no clock but Redis' own decides between replicas. If it raises, some may
        have been written.
        """
        try:
            answers = await self.ask(_answers(self._journal_calls(updates)))
        except RegistryUnavailable as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
            await self.ask(self._client.script_load(scripts.WRITE_JOURNAL))
            answers = await self.ask(_answers(self._journal_calls(updates)))
        return [JournalWrite(int(answer)) for answer in answers]

    def _journal_calls(self, updates: Sequence[tuple[str, JournalUpdate]]) -> Pipeline:
        calls = self._client.pipeline(transaction=False)
        for request_id, update in updates:
            age_ms: str | int = "" if update.age_s is None else int(update.age_s * 1000)
            arguments: list[str | int] = [*update.writer, int(update.life_s * 1000), age_ms]
            arguments += [part for pair in update.fields.items() for part in pair]
            # Not the script itself: a pipeline asks before each use whether Redis has it.
            calls.evalsha(self._write_journal.sha, 1, f"or:journal:{request_id}", *arguments)
        return calls

    async def read_journal(self, request_id: str) -> Mapping[str, str]:
        """Reads all fields of a journal; empty when there is none."""
        return cast("dict[str, str]", await self.ask(self._client.hgetall(f"or:journal:{request_id}")))

    async def write_response(self, name: str, fields: Mapping[str, str], life_s: float) -> None:
        """Stores a response for `life_s`, in place of an earlier one of its name."""
        key = f"or:response:{name}"
        calls = self._client.pipeline(transaction=True)
        calls.delete(key)
        calls.hset(key, items=[part for pair in fields.items() for part in pair])
        calls.pexpire(key, max(int(life_s * 1000), 1))
        await self.ask(calls.execute())

    async def read_response(self, name: str, *fields: str) -> list[str | None]:
        """Reads fields of a stored response; None for each that there is not."""
        return cast("list[str | None]", await self.ask(self._client.hmget(f"or:response:{name}", [*fields])))

    async def delete_responses(self, names: Sequence[str]) -> int:
        """Deletes stored responses, and returns how many there were."""
        return int(await self.ask(self._client.delete(*(f"or:response:{name}" for name in names))))

    async def exchange_losses(self, once: Sequence[str], anew: Sequence[str]) -> Mapping[str, float]:
        """Reports facts about lost workers, as arbitrary strings, and returns all facts of the last LOSSES_S with their
        age in seconds. Facts told `once` keep the first time, `anew` the latest."""
        arguments: list[str | int] = [int(LOSSES_S * 1000), LOSSES_MAX, len(once), *once, *anew]
        answer = await self.ask(self._exchange_losses(keys=["or:losses"], args=arguments))
        clock_ms, told = cast("tuple[str, list[str]]", answer)
        return {
            fact: max(int(clock_ms) - int(moment), 0) / 1e3 for fact, moment in zip(told[::2], told[1::2], strict=True)
        }

    def register_script(self, source: str) -> AsyncScript:
        """Registers a Lua script on this connection; pass the result of calling it to `ask`."""
        return self._client.register_script(source)

    async def delete(self, keys: Sequence[str]) -> None:
        """Removes keys of one cluster slot, if they exist."""
        await self.ask(self._client.delete(*keys))

    async def ask(self, reply: Any) -> Any:
        """Awaits a reply of Redis. Raises RegistryUnavailable."""
        task = asyncio.current_task()
        num_cancellations = task.cancelling() if task is not None else 0
        try:
            # Covers waiting for a connection, connecting and the answer. More calls at once than connections would be
            # an error.
            async with asyncio.timeout(2 * self._timeout_s), self._room:
                answer = await reply
        except (RedisError, OSError, TimeoutError) as error:
            why = str(error).partition(" : <")[0]  # without an answering Sentinel, redis-py appends its own objects
            raise RegistryUnavailable(
                f"Redis at {self.address} does not answer ({why or type(error).__name__}); "
                "start one there, or set OUTRIDER_REDIS_URL to one that runs "
                "(`outrider serve` without it starts its own)"
            ) from error
        finally:
            if asyncio.iscoroutine(reply):
                reply.close()  # it may not have been started
            # redis-py (8.1) swallows cancellations that arrive during its own work, which would leave a task that
            # nobody can end.
            if task is not None and task.cancelling() > num_cancellations:
                raise asyncio.CancelledError
        return answer


async def _answers(calls: Pipeline) -> list[Any]:
    """Sends the calls and returns their answers. Raises the first error among them; redis-py's own would repeat the
    call, which is a client's."""
    answers: list[Any] = await calls.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, RedisError):
            raise answer
    return answers


async def check_redis(url: str, wait_s: float = 0.0) -> None:
    """Returns when a Redis answers; waits for one for up to `wait_s`. Raises ConfigurationError for an invalid URL,
    RegistryUnavailable otherwise, at once where Redis refuses the password."""
    registry = Registry(url, START_TIMEOUT_S)
    give_up_at_s, told_at_s = time.monotonic() + wait_s, -math.inf
    try:
        while True:
            try:
                return await registry.ping()
            except RegistryUnavailable as error:
                now_s = time.monotonic()
                if now_s >= give_up_at_s or isinstance(error.__cause__, _REFUSALS):
                    raise
                if now_s - told_at_s >= _TELL_EVERY_S:
                    told_at_s = now_s
                    _log.warning("waiting for Redis, for %.0f s at most: %s", give_up_at_s - now_s, error.message)
            await asyncio.sleep(min(_ASK_AGAIN_S, max(give_up_at_s - now_s, 0.0)))
    finally:
        await registry.close()


def _prefix(pool: Pool) -> str:
    return f"{{or:{pool}}}:"
