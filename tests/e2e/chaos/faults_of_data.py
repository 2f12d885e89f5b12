"""Data that is not what it was: other weights under a known name, damaged journals, damaged records of workers."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final, cast

import psutil
import redis
import redis.asyncio

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from outrider.registry.worker_record import WorkerRecord
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.client import Client
from tests.e2e.chaos.corruption import damage
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fault import Fault, WorkerFault
from tests.e2e.chaos.fleet import SETTLED_S, Fleet, Worker
from tests.e2e.chaos.load import NotReproducible
from tests.e2e.chaos.other_weights import write_changed
from tests.e2e.chaos.verdict import Right

EVERY_S: Final = 0.2
SEEN_S_MAX: Final = 30.0
DRAIN_S_MAX: Final = 60.0  # for the longest answer, on a busy machine
_OTHER: Final = "target-other"
_ROOMY: Final[Mapping[str, object]] = {"max_num_seqs": 12, "kv_cache_gib": 0.1}
# KEYS: a hash. ARGV: a field, and its new value; no value removes it. What is gone meanwhile stays gone.
_SET: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if #ARGV == 1 then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return 1
"""


class _Corrupted(Fault):
    """Fields of hashes in Redis are damaged: bytes at random, a part of what was there, or nothing."""

    seconds: ClassVar[tuple[float, float]]

    async def damage(self, client: redis.asyncio.Redis, keys: Sequence[bytes]) -> int:
        """Damages one field of each hash. Returns the number of damaged fields."""
        num_damaged = 0
        for key in keys:
            if fields := cast("dict[bytes, bytes]", await client.hgetall(key)):
                name, value = damage(fields, self.rng)
                arguments = [name] if value is None else [name, value]
                num_damaged += int(await client.eval(_SET, 1, key, *arguments))
        return num_damaged


class JournalCorrupted(_Corrupted):
    """Fields of the journals of running streams are damaged, and of what is told of lost targets; then the replica of
    some of these streams is killed.

    Clients come back, and get their own text or an explicit refusal.
    """

    name, part, costs = "journal corrupted, replica SIGKILL", "coordinator", Costs.CONNECTIONS
    seconds = 1.0, 4.0

    async def run(self, worker: Worker | None) -> None:
        seconds, num_damaged = self.rng.uniform(*self.seconds), 0
        async with redis.asyncio.Redis.from_url(self.fleet.redis.url, socket_timeout=5.0) as client:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                with suppress(redis.RedisError):  # another fault has it
                    keys = sorted([key async for key in client.scan_iter("or:journal:*", count=1000)])
                    some = self.rng.sample(keys, min(len(keys), 20))
                    num_damaged += await self.damage(client, [*some, b"or:losses"])
                await asyncio.sleep(EVERY_S)
            self.rng.choice(self.fleet.replicas()).kill()
        self.describe(f"{num_damaged} fields", seconds)
        await asyncio.sleep(1.0)  # until it is missed


class WorkerRecordsCorrupted(_Corrupted):
    """Fields of workers' records in the registry are damaged, or name another worker's address; one target is spared.

    Heartbeats put them right. Fewer sequences can run meanwhile.
    """

    name, part, costs = "worker records corrupted", "redis", Costs.CAPACITY
    seconds = 5.0, 12.0

    async def run(self, worker: Worker | None) -> None:
        seconds, counts = self.rng.uniform(*self.seconds), [0, 0]
        spared = self.rng.choice(self.fleet.of_role("target")).name
        names = [each.name for each in self.fleet.workers.values() if each.name != spared]
        async with redis.asyncio.Redis.from_url(self.fleet.redis.url, socket_timeout=5.0) as client:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                name, other = self.rng.choice(names), self.rng.choice(names)
                key = f"{{or:{self.fleet.workers[name].role}}}:w:{name}".encode()
                with suppress(redis.RedisError):
                    if self.rng.random() < 0.3 and other != name:
                        address = self.fleet.workers[other].link.address
                        counts[1] += await self._move(client, key, address)
                    else:
                        counts[0] += await self.damage(client, [key])
                await asyncio.sleep(EVERY_S)
        self.describe(f"{counts[0]} fields, {counts[1]} addresses, not {spared}", seconds)

    async def _move(self, client: redis.asyncio.Redis, key: bytes, address: str) -> int:
        """Has a record name another address, in good order otherwise. Returns 1, 0 where there is no such record."""
        stored = {
            bytes(name).decode(errors="replace"): bytes(value).decode(errors="replace")
            for name, value in cast("dict[bytes, bytes]", await client.hgetall(key)).items()
        }
        try:
            moved = replace(WorkerRecord.from_fields(stored), address=address).to_fields()
        except ValueError:  # it is damaged, or gone
            return 0
        return min([
            int(await client.eval(_SET, 1, key, name, moved[name])) for name in ("address", "check")
        ])  # fmt: skip


class _Joins(Fault):
    """A worker with another version of a model joins under the same name for a while, and leaves or dies."""

    seconds: ClassVar[tuple[float, float]] = (4.0, 12.0)
    model: ClassVar[Path]

    @classmethod
    @asynccontextmanager
    async def changed_model(cls) -> AsyncIterator[Path]:
        """The other version, on disk for as long as the context is open."""
        with tempfile.TemporaryDirectory(prefix="other-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            yield await asyncio.to_thread(write_changed, cls.model, Path(folder))

    @classmethod
    def why_not(cls) -> str | None:
        return None if cls.model.is_dir() else "the demo pair is not in this checkout"


class OtherTarget(_Joins, WorkerFault):
    """A target with other weights joins under the same model's name, and another target is killed meanwhile.

    An answer is all of the one weights' text or all of the other's: sequences of the target that died go on at equal
    ones alone. The newcomer finishes what it has before it goes; whoever loses it earlier, by another fault, has to ask
    anew.
    """

    needs_own_engine = True
    name, part, costs, model = "target of other weights", "target", Costs.CAPACITY, DEMO_TARGET
    rights: ClassVar[Mapping[str, Sequence[Right]]] = {}
    """The output of the other weights, by the cases' names."""

    @classmethod
    async def prepare(cls, fleet: Fleet, cases: Sequence[Case]) -> None:
        """Learns the output of a target with the other weights for every case, under a model name of its own."""
        async with cls.changed_model() as model:
            await fleet.add_worker("target", _OTHER, model, **_ROOMY, served_model_name=_OTHER)
            if (problem := await fleet.until_whole(SEEN_S_MAX)) is not None:
                raise NotReproducible(f"no coordinator serves other weights: {problem}")
            cls.rights = await _learn(fleet.client, cases)
            await fleet.retire(_OTHER)
            await asyncio.sleep(SETTLED_S)  # while two models are known, requests have to name one

    async def hit(self, worker: Worker) -> None:
        began_s, gone_s = time.monotonic(), float("inf")
        self.load.other_rights = lambda case, answer: (
            self.rights[case.name] if answer.ended_s >= began_s and answer.asked_s <= gone_s else None
        )
        try:
            async with self.changed_model() as model:
                await self._join(worker, model)
        finally:
            gone_s = time.monotonic()

    async def _join(self, worker: Worker, model: Path) -> None:
        """The newcomer comes and goes; `worker` is killed in between."""
        newcomer = await self.fleet.add_worker("target", _OTHER, model, drain_grace_s=DRAIN_S_MAX)
        try:
            await asyncio.sleep(self.rng.uniform(*self.seconds))
            self.describe(f"{worker.name} killed")
            self.fleet.send(worker, signal.SIGKILL)
            await asyncio.sleep(self.rng.uniform(*self.seconds))
            # Drained to its end, which whoever keeps it alive would take for a reason to start it again.
            pid = newcomer.pid
            self.fleet.send(newcomer, signal.SIGTERM)
            async with asyncio.timeout(DRAIN_S_MAX + 30.0):
                while psutil.pid_exists(pid):  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.1)
        finally:
            await self.fleet.retire(_OTHER)


async def _learn(client: Client, cases: Sequence[Case]) -> dict[str, tuple[Right, ...]]:
    """The output of the model of the other name, by the cases' names. Raises NotReproducible."""
    turns = asyncio.Semaphore(int(str(_ROOMY["max_num_seqs"])))

    async def ask(case: Case) -> tuple[str, tuple[Right, ...]]:
        named = replace(case, sampling=case.sampling | {"model": _OTHER})
        async with turns:
            answer = await client.ask(named, speculation="off")
        if answer.error is not None or not answer.is_complete:
            raise NotReproducible(f"{case.name}, other weights: {answer.error}")
        return case.name, answer.as_right()

    return dict(await asyncio.gather(*map(ask, cases)))


class OtherDraft(_Joins):
    """A draft worker with another version of the draft model joins for a while. It costs speed and nothing else."""

    name, part, costs, model = "draft of another version", "another draft", Costs.NOTHING, DEMO_DRAFT

    async def run(self, worker: Worker | None) -> None:
        name, seconds = "draft-other", self.rng.uniform(*self.seconds)
        async with self.changed_model() as model:
            await self.fleet.add_worker("draft", name, model=model)
            self.describe("joined and left", seconds)
            await asyncio.sleep(seconds)
            await self.fleet.retire(name)


FAULTS_OF_DATA: Final[tuple[type[Fault], ...]] = (
    JournalCorrupted, WorkerRecordsCorrupted, OtherTarget, OtherDraft,
)  # fmt: skip
