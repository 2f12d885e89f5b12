"""A Redis among the simulated processes, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from outrider.errors import RegistryUnavailable
from outrider.registry.registry import JournalUpdate, JournalWrite, JournalWriter, PoolView
from outrider.registry.worker_record import Pool, WorkerRecord
from tests.simulation.network import Network, Process
from tests.simulation.process import Host
from tests.simulation.registry import PoolModel, exchange_losses, write_journal, writer_of

REDIS: Final = "redis"
_REGISTRY_TIMEOUT_S: Final = 2.0


class Redis(Process):
    """A simulated Redis, empty at first."""

    def __init__(
        self,
        network: Network,
        host: Host,
        on_wrong: Callable[[str], None],
        on_journal: Callable[[str, int, int], None],
    ) -> None:
        """`on_journal` is told after each write what one tenant's streams by one coordinator take: whose, how many
        bytes, how many streams."""
        super().__init__(REDIS, network.loop, host)
        self._on_wrong, self._on_journal = on_wrong, on_journal
        self.pools: dict[Pool, PoolModel] = {"target": PoolModel(), "draft": PoolModel()}
        self.journal: dict[str, tuple[dict[str, str], float]] = {}  # fields, when they are gone
        self.losses: dict[str, float] = {}  # facts, when they were told
        # Of each stream's journal: writers that others followed.
        self._replaced: dict[str, set[JournalWriter]] = {}
        self._waiting: list[tuple[Pool, str, float, Callable[[Any], None]]] = []

    def empty(self) -> None:
        """FLUSHALL."""
        self.pools = {"target": PoolModel(), "draft": PoolModel()}
        self.journal.clear()
        self.losses.clear()

    def write_journal(self, request_id: str, update: JournalUpdate) -> JournalWrite:
        """Writes a stream's journal as the registry's script does."""
        stored = {id: each for id, (each, until_s) in self.journal.items() if until_s > self.now_s()}
        writer, before = update.writer, writer_of(stored.get(request_id))
        answer = write_journal(stored, request_id, update, self.now_s())
        if answer is JournalWrite.WRITTEN:
            replaced = self._replaced.setdefault(request_id, set())
            if before is not None and before != writer:
                if writer in replaced:
                    self._on_wrong(f"I9: {writer} took back the journal of {request_id}, which {before} had taken over")
                replaced.add(before)
            self.journal[request_id] = stored[request_id], self.now_s() + update.life_s
            self._tell_size(request_id, writer.replica, stored)
        return answer

    def _tell_size(self, request_id: str, replica: str, stored: Mapping[str, Mapping[str, str]]) -> None:
        """Reports the size and number of the tenant's streams that one coordinator process has written."""
        tenant = request_id.partition(":")[0]
        alike = [
            fields for id, fields in stored.items() if id.partition(":")[0] == tenant and fields["replica"] == replica
        ]
        num_bytes = sum(len(name) + len(value) for fields in alike for name, value in fields.items())
        self._on_journal(replica, num_bytes, len(alike))

    def read_journal(self, request_id: str) -> Mapping[str, str]:
        stored, until_s = self.journal.get(request_id, ({}, 0.0))
        return dict(stored) if until_s > self.now_s() else {}

    def ask(self, pool: Pool, work: Callable[[PoolModel, float], Any], reply: Callable[[Any], None]) -> None:
        model = self.pools[pool]
        held = {id: record for id, record in model.records.items() if model.leases[id] > self.now_s()}
        joined_at_us = dict(model.joined_at_us)
        reply(work(model, self.now_s()))
        for worker_id, before in held.items():
            after = model.records.get(worker_id, before)
            # Whichever started first: one that Redis had not heard of, or has forgotten, joins anew.
            has_joined_later = model.joined_at_us[worker_id] > joined_at_us[worker_id]
            if _life(after) < _life(before) and not has_joined_later:
                self._on_wrong(f"an earlier life of {worker_id} took its record back")
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self.wait(*each)

    def wait(self, pool: Pool, after: str, until_s: float, reply: Callable[[Any], None]) -> None:
        if str(len(self.pools[pool].events)) != after:
            reply(True)
        elif until_s > self.now_s():
            self._waiting.append((pool, after, until_s, reply))


def _life(record: WorkerRecord) -> int:
    return int(record.incarnation.partition("/")[2])


class RegistryClient:
    """`RegistryCalls` over the simulated network. What was asked may have been done though the answer is lost."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    async def join(self, pool: Pool) -> int:
        return int(await self._ask(pool, lambda model, now: model.join(now)))

    async def write(self, record: WorkerRecord, joined_at_us: int = 0) -> bool:
        return bool(await self._ask(record.pool, lambda pool, now: pool.write(record, joined_at_us, now)))

    async def remove(self, record: WorkerRecord) -> bool:
        return bool(await self._ask(record.pool, lambda pool, now: pool.remove(record, now)))

    async def read(self, pool: Pool) -> PoolView:
        return cast(PoolView, await self._ask(pool, lambda model, now: model.read(now)))

    async def next_event(self, pool: Pool, after: str, timeout_s: float) -> bool:
        def wait(redis: Redis, reply: Callable[[Any], None]) -> None:
            redis.wait(pool, after, redis.now_s() + timeout_s, reply)

        try:
            return bool(await self._question(wait, timeout_s))
        except RegistryUnavailable:
            return False

    async def reserve(self, pool: Pool, incarnations: Sequence[str], limits: Sequence[int], token: str) -> int | None:
        answer = await self._ask(pool, lambda model, now: model.reserve(incarnations, limits, token, now))
        return cast("int | None", answer)

    async def renew(self, pool: Pool, incarnation: str, tokens: Sequence[str]) -> None:
        await self._ask(pool, lambda model, now: model.renew(incarnation, tokens, now))

    async def release(self, pool: Pool, incarnation: str, token: str) -> None:
        await self._ask(pool, lambda model, now: model.release(incarnation, token))

    async def write_journals(self, updates: Sequence[tuple[str, JournalUpdate]]) -> Sequence[JournalWrite]:
        def write(redis: Redis, reply: Callable[[Any], None]) -> None:
            reply([redis.write_journal(request_id, update) for request_id, update in updates])

        return cast("Sequence[JournalWrite]", await self._question(write, _REGISTRY_TIMEOUT_S))

    async def read_journal(self, request_id: str) -> Mapping[str, str]:
        def read(redis: Redis, reply: Callable[[Any], None]) -> None:
            reply(redis.read_journal(request_id))

        return cast("dict[str, str]", await self._question(read, _REGISTRY_TIMEOUT_S))

    async def exchange_losses(self, once: Sequence[str], anew: Sequence[str]) -> Mapping[str, float]:
        def exchange(redis: Redis, reply: Callable[[Any], None]) -> None:
            reply(exchange_losses(redis.losses, once, anew, redis.now_s()))

        return cast("dict[str, float]", await self._question(exchange, _REGISTRY_TIMEOUT_S))

    async def _ask(self, pool: Pool, work: Callable[[PoolModel, float], Any]) -> Any:
        return await self._question(lambda redis, reply: redis.ask(pool, work, reply), _REGISTRY_TIMEOUT_S)

    async def _question(self, work: Callable[[Any, Callable[[Any], None]], None], timeout_s: float) -> Any:
        if not self._process.is_alive:
            raise RegistryUnavailable("this process is dead")
        try:
            return await self._network.ask(self._process, REDIS, work, timeout_s)
        except ConnectionError as error:
            raise RegistryUnavailable(str(error)) from error
