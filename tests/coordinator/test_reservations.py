"""Slots at workers: taken in order, given back, kept alive, and of no account while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.placement.reservations import AWAY_S, CANDIDATES_MAX, Reservations
from outrider.errors import RegistryUnavailable
from outrider.registry.worker_record import WorkerRecord
from tests.coordinator.fakes import record_of
from tests.simulation.registry import PoolModel

WORKERS = tuple(
    replace(
        record_of("target", f"h:{number}", "0" * 16),
        incarnation=str(number),
        max_num_seqs=1,
        max_num_waiting=1,
    )
    for number in range(2)
)


class FakeRegistry:
    """A model of Redis at a time of its own."""

    def __init__(self) -> None:
        self.pool = PoolModel()
        self.now_s = 100.0
        self.is_away = False
        self.num_asked = 0

    async def reserve(self, pool: str, incarnations: Sequence[str], limits: Sequence[int], token: str) -> int | None:
        await self._answer()
        return self.pool.reserve(incarnations, limits, token, self.now_s)

    async def renew(self, pool: str, incarnation: str, tokens: Sequence[str]) -> None:
        await self._answer()
        self.pool.renew(incarnation, tokens, self.now_s)

    async def release(self, pool: str, incarnation: str, token: str) -> None:
        await self._answer()
        self.pool.release(incarnation, token)

    async def _answer(self) -> None:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise RegistryUnavailable("away")

    def held(self, worker: WorkerRecord) -> int:
        return self.pool.num_reserved(worker.incarnation, self.now_s)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.005)


@pytest.fixture
def redis() -> FakeRegistry:
    return FakeRegistry()


def reservations(redis: FakeRegistry, **options: Any) -> Reservations:
    return Reservations(redis, lambda: redis.now_s, **options)  # type: ignore[arg-type]


async def test_workers_are_filled_in_order_and_their_queues_with_them(redis: FakeRegistry) -> None:
    async with reservations(redis) as made:
        taken = [await made.take("target", WORKERS, f"s{number}") for number in range(5)]
        assert taken == [WORKERS[0], WORKERS[0], WORKERS[1], WORKERS[1], None]
        made.give_back(WORKERS[0], "s1")
        await eventually(lambda: redis.held(WORKERS[0]) == 1)
        assert await made.take("target", WORKERS, "s5") == WORKERS[0]
        assert await made.take("target", (), "s6") is None


async def test_few_of_many_workers_are_asked(redis: FakeRegistry) -> None:
    many = [replace(WORKERS[0], worker_id=f"t{number}", incarnation=str(number)) for number in range(500)]
    async with reservations(redis) as made:
        for number in range(2 * CANDIDATES_MAX):
            assert await made.take("target", many, f"s{number}") is not None
        assert await made.take("target", many, "x") is None
        assert len(redis.pool.reservations) == CANDIDATES_MAX


async def test_two_replicas_see_each_other(redis: FakeRegistry) -> None:
    async with reservations(redis) as one, reservations(redis) as other:
        taken = [await each.take("target", WORKERS[:1], name) for each, name in ((one, "a"), (other, "b"), (one, "c"))]
        assert taken == [WORKERS[0], WORKERS[0], None]


async def test_what_runs_is_renewed_and_nothing_else(redis: FakeRegistry) -> None:
    async with reservations(redis, renew_s=0.01) as made:
        await made.take("target", WORKERS, "a")
        for _ in range(5):
            redis.now_s += 10.0
            num_asked = redis.num_asked
            await eventually(lambda num=num_asked: redis.num_asked > num + 1)  # type: ignore[misc]
        assert redis.held(WORKERS[0]) == 1
        made.give_back(WORKERS[0], "a")
        await eventually(lambda: redis.held(WORKERS[0]) == 0)
        await asyncio.sleep(0.05)
        assert redis.held(WORKERS[0]) == made.num_held == 0


async def test_without_redis_the_first_is_taken_and_redis_left_alone_for_a_while(redis: FakeRegistry) -> None:
    async with reservations(redis) as made:
        redis.is_away = True
        assert [await made.take("target", WORKERS, str(n)) for n in range(9)] == [WORKERS[0]] * 9
        assert redis.num_asked < 4, "nobody waits for it"
        redis.is_away = False
        redis.now_s += AWAY_S
        assert await made.take("target", WORKERS, "x") == WORKERS[0]
        assert redis.held(WORKERS[0]) == 1


async def test_what_a_cancelled_request_may_have_taken_is_given_back(redis: FakeRegistry) -> None:
    async with reservations(redis) as made:
        taking = asyncio.create_task(made.take("target", WORKERS, "a"))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        redis.pool.reserve(["0"], [2], "a", redis.now_s)  # the call got through
        await eventually(lambda: redis.held(WORKERS[0]) == 0)


async def test_a_replica_that_leaves_gives_back_what_it_owes(redis: FakeRegistry) -> None:
    async with reservations(redis) as made:
        await made.take("target", WORKERS, "a")
        made.give_back(WORKERS[0], "a")
    assert redis.held(WORKERS[0]) == 0


async def test_without_a_registry_the_first_is_always_taken() -> None:
    made = Reservations(None, lambda: 0.0)
    assert await made.take("target", WORKERS, "a") == WORKERS[0]
    made.give_back(WORKERS[0], "a")
    assert made.num_held == 0
