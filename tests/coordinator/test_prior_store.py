"""Replicas that share what they learned, on a real Redis, and on one that is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from coordinator.speculation import prior_store as store_module
from coordinator.speculation.prior_store import LIFE_S, PriorStore
from coordinator.speculation.priors import HALF_LIFE_S, Evidence, PriorKey, PriorTable, StartingMode
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import eventually

KEY = PriorKey("demo", "text/free/greedy")
BAD = Evidence(1, 1, 8, 9, 1)
VALUES, TIMES = "{or:priors}:values", "{or:priors}:times"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        await client.flushall()
        yield client


class Replica:
    """A table and its store; the clock stands still."""

    def __init__(self, url: str, sync_s: float = 60.0) -> None:
        self.registry = Registry(url)
        self.table = PriorTable()
        self.store = PriorStore(self.registry, self.table, lambda: 0.0, sync_s)

    def learn(self, evidence: Evidence, count: int = 1, key: PriorKey = KEY) -> None:
        for _ in range(count):
            self.table.record(key, evidence, 0.0)

    def knows(self, key: PriorKey = KEY) -> tuple[float, ...]:
        return self.table.evidence(key, 0.0)


@contextlib.asynccontextmanager
async def replicas(url: str, count: int = 2) -> AsyncIterator[list[Replica]]:
    made = [Replica(url) for _ in range(count)]
    yield made
    for each in made:
        await each.registry.close()


async def server_time_s(client: redis.asyncio.Redis) -> float:
    seconds, microseconds = await client.time()
    return float(seconds) + float(microseconds) / 1e6


class TestSharing:
    async def test_what_one_replica_learns_another_starts_by(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        async with replicas(redis_url) as (first, second):
            first.learn(BAD, 30)
            assert await first.store.sync()
            assert second.table.start(KEY, "r", 0.0) is StartingMode.SPECULATING
            assert await second.store.sync()
            assert second.table.start(KEY, "r", 0.0) is not StartingMode.SPECULATING

    async def test_lessons_of_all_replicas_add_up_whoever_writes_first(
        self, redis_url: str, client: redis.asyncio.Redis
    ) -> None:
        results = []
        for order in ([0, 1, 2], [2, 0, 1]):
            await client.flushall()
            async with replicas(redis_url, 3) as made:
                for number, replica in enumerate(made):
                    replica.learn(Evidence(number + 1, number, 10, 7.25, 3))
                for index in order:
                    assert await made[index].store.sync()
                assert await made[0].store.sync()
                results.append(made[0].knows())
        # Milliseconds of a half-life of minutes lie between the writes.
        assert results[0] == pytest.approx((6, 3, 30, 21.75, 9), rel=1e-2)
        assert results[0] == pytest.approx(results[1], rel=1e-2)

    async def test_writes_at_the_same_time_lose_nothing(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        async with replicas(redis_url, 8) as made:
            for _ in range(5):
                for replica in made:
                    replica.learn(BAD)
                await asyncio.gather(*(replica.store.sync() for replica in made))
            await made[0].store.sync()
            assert made[0].knows()[0] == pytest.approx(40, rel=1e-2)

    async def test_a_replica_that_leaves_hands_on_what_it_knows(
        self, redis_url: str, client: redis.asyncio.Redis
    ) -> None:
        async with replicas(redis_url) as (first, second):
            async with first.store:
                await eventually(lambda: not first.table._sent, "the first exchange is over")
                first.learn(BAD, 3)
            await second.store.sync()
            assert second.knows()[0] == pytest.approx(3, rel=1e-2)

    async def test_the_background_task_reads_by_itself(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        async with replicas(redis_url, 1) as (writer,):
            writer.learn(BAD, 30)
            await writer.store.sync()
            reader = Replica(redis_url, sync_s=0.01)
            async with reader.store:
                await eventually(lambda: reader.knows()[0] > 29, "it has heard of the other")
            await reader.registry.close()

    @pytest.mark.parametrize("uses_priors", [True, False])
    async def test_a_service_that_leaves_teaches_the_one_that_comes(
        self, clusters: ClusterFactory, redis_url: str, client: redis.asyncio.Redis, uses_priors: bool
    ) -> None:
        settings = CoordinatorSettings(
            tokenizer_dir=str(clusters.model_dir), redis_url=redis_url, uses_priors=uses_priors
        )
        async with GenerationService(settings) as first:
            for _ in range(30):
                first.environment.speculation.priors.record(KEY, BAD, first.environment.now_s())
        async with GenerationService(settings) as second:
            environment = second.environment
            if uses_priors:
                await eventually(
                    lambda: environment.speculation.priors.is_doubted(KEY, environment.now_s()),
                    "the second knows",
                )
        assert await client.exists(VALUES) == uses_priors

    async def test_no_cancellation_is_lost_in_a_call(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        async def ask_and_go_on(registry: Registry) -> None:
            await registry.ping()
            await asyncio.Event().wait()

        for num_turns in range(0, 200, 5):  # of the loop, so that it meets every stage of connecting and asking
            registry = Registry(redis_url)
            task = asyncio.create_task(ask_and_go_on(registry))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.cancelled(), f"swallowed after {num_turns} turns of the loop"
            await registry.close()


class TestWhatIsStored:
    async def test_evidence_fades_by_the_servers_clock(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        then_s = await server_time_s(client) - HALF_LIFE_S
        await client.hset(VALUES, str(KEY), f"{then_s:.3f} 8 4 20 10 6")
        await client.zadd(TIMES, {str(KEY): then_s})
        async with replicas(redis_url, 1) as (replica,):
            await replica.store.sync()
            assert replica.knows() == pytest.approx((4, 2, 10, 5, 3), rel=1e-2)
            replica.learn(Evidence(1, 1, 1, 1, 1))
            await replica.store.sync()
            assert replica.knows() == pytest.approx((5, 3, 11, 6, 4), rel=1e-2)

    async def test_both_keys_share_a_slot_and_expire(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        async with replicas(redis_url, 1) as (replica,):
            replica.learn(BAD)
            await replica.store.sync()
        keys = await client.keys("*")
        assert sorted(keys) == [TIMES, VALUES]
        for key in keys:
            assert 0 < await client.ttl(key) <= LIFE_S

    async def test_what_nobody_has_written_for_long_is_dropped(
        self, redis_url: str, client: redis.asyncio.Redis
    ) -> None:
        then_s = await server_time_s(client) - LIFE_S - 1
        await client.hset(VALUES, str(KEY), f"{then_s:.3f} 8 4 20 10 6")
        await client.zadd(TIMES, {str(KEY): then_s})
        async with replicas(redis_url, 1) as (replica,):
            await replica.store.sync()
            assert replica.table.num_keys == 0
        assert await client.keys("*") == []

    async def test_the_number_of_keys_is_bounded_and_the_oldest_go(
        self, redis_url: str, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_module, "KEYS_MAX", 5)
        async with replicas(redis_url, 1) as (replica,):
            for number in range(12):
                replica.learn(BAD, key=PriorKey(f"model-{number}", "r"))
                await replica.store.sync()
            assert {key.model for key in replica.table.summary(0.0)} == {f"model-{n}" for n in range(7, 12)}
        assert await client.hlen(VALUES) == await client.zcard(TIMES) == 5

    async def test_what_cannot_be_read_is_left_out(
        self, redis_url: str, client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        await client.hset(VALUES, mapping={"odd": "odd", str(KEY): "not numbers"})
        async with replicas(redis_url, 1) as (replica,):
            replica.learn(BAD, 2)
            assert await replica.store.sync()
            assert replica.knows()[0] == pytest.approx(2, rel=1e-2)
            assert replica.table.num_keys == 1
        assert "'odd'" in caplog.text


class TestRedisAway:
    async def test_what_was_known_and_learned_is_kept_when_redis_dies(self, tmp_path: Path) -> None:
        server = EmbeddedRedis(tmp_path)
        url = server.start()
        try:
            async with replicas(url, 1) as (replica,):
                replica.learn(BAD, 30)
                assert await replica.store.sync()
                server.stop()
                replica.learn(BAD, 2)
                for _ in range(3):
                    assert not await replica.store.sync()
                assert replica.store.is_degraded
                assert replica.table.is_doubted(KEY, 0.0)
                assert replica.knows()[0] == pytest.approx(32, rel=1e-2)
                assert replica.table.take(0.0)[KEY].num_judged == pytest.approx(2)
        finally:
            server.stop()

    async def test_without_redis_a_replica_opens_and_closes_at_once(self) -> None:
        replica = Replica("redis://127.0.0.1:1/0", sync_s=0.01)
        async with asyncio.timeout(10), replica.store:
            replica.learn(BAD, 30)
            await eventually(lambda: replica.store.is_degraded, "it has noticed")
            assert replica.table.is_doubted(KEY, 0.0)
        await replica.registry.close()
