"""How many sequences tenants have at once: all replicas together, and each by itself where Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.access import concurrency_limits
from coordinator.access.api_keys import Caller, Scope, TenantLimits
from coordinator.access.concurrency_limits import ConcurrencyLimits, Held
from outrider.errors import InvalidRequest, Overloaded
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry
from tests.coordinator.fakes import eventually

SEARCH = Caller("search", frozenset(Scope), TenantLimits(max_concurrent_sequences=4))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    made = Registry(redis_url)
    await made.ask(made._client.flushall())
    try:
        yield made
    finally:
        await made.close()


def clock() -> float:
    return asyncio.get_running_loop().time()


async def hold(limits: ConcurrencyLimits, num: int, *, has_begun: bool = False) -> Held:
    held = await limits.hold(SEARCH, num, lambda: 2.5, has_begun=has_begun)
    assert held is not None
    return held


async def num_counted(registry: Registry) -> int:
    (key,) = await registry.ask(registry._client.keys("or:running:*")) or [None]
    return 0 if key is None else int(await registry.ask(registry._client.zcard(key)))


async def test_replicas_keep_to_one_limit_together(registry: Registry) -> None:
    async with ConcurrencyLimits(registry, clock) as one, ConcurrencyLimits(registry, clock) as other:
        held = await hold(one, 3)
        with pytest.raises(Overloaded, match="tenant search may have 4 sequences at once") as caught:
            await hold(other, 2)
        assert caught.value.retry_after_s == 2.5
        await hold(other, 1)
        with pytest.raises(Overloaded):
            await hold(other, 1)
        one.release(held)

        async def is_free() -> bool:
            return await num_counted(registry) == 1

        for _ in range(1000):
            if await is_free():
                break
            await asyncio.sleep(0.01)
        await hold(other, 3)


async def test_others_of_the_tenant_are_not_in_redis_by_name(registry: Registry) -> None:
    async with ConcurrencyLimits(registry, clock) as limits:
        await hold(limits, 1)
        (key,) = await registry.ask(registry._client.keys("*"))
        assert "search" not in key


async def test_what_runs_is_renewed_and_what_a_replica_left_behind_ends_by_itself(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency_limits, "RESERVATION_S", 0.6)
    dead = ConcurrencyLimits(registry, clock)  # never opened: nothing is renewed
    await hold(dead, 2)
    async with ConcurrencyLimits(registry, clock, renew_s=0.05) as limits:
        held = await hold(limits, 2)
        ghost_ends_s = clock() + 20
        while True:  # the ghost's two are free again, and those that run still count
            try:
                limits.release(await hold(limits, 2))
                break
            except Overloaded:
                assert clock() < ghost_ends_s
                await asyncio.sleep(0.02)
        with pytest.raises(Overloaded):
            await hold(limits, 3)
        limits.release(held)


async def test_a_stream_that_goes_on_is_let_in_beside_what_its_dead_replica_left_behind_but_not_for_ever(
    registry: Registry,
) -> None:
    await hold(ConcurrencyLimits(registry, clock), 4)
    async with ConcurrencyLimits(registry, clock) as limits:
        with pytest.raises(Overloaded):
            await hold(limits, 1)
        await hold(limits, 4, has_begun=True)
        with pytest.raises(Overloaded):
            await hold(limits, 1, has_begun=True)


async def test_one_that_was_refused_leaves_nothing_behind_and_a_cancelled_one_neither(
    registry: Registry,
) -> None:
    async with ConcurrencyLimits(registry, clock) as limits:
        with pytest.raises(Overloaded):
            await hold(limits, 5)
        task = asyncio.create_task(hold(limits, 4))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await eventually(lambda: not limits._ended and not limits._running, "Redis is told")
        for _ in range(1000):
            if not await num_counted(registry):
                break
            await asyncio.sleep(0.01)
        await hold(limits, 4)


async def test_without_redis_a_replica_keeps_to_the_limit_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency_limits, "_AWAY_S", 1000.0)
    registry = Registry("redis://127.0.0.1:1/0", 0.2)
    limits = ConcurrencyLimits(registry, clock)
    try:
        tries = await asyncio.gather(*(hold(limits, 2) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in tries] == [Held, Held, Overloaded]  # those that came first
        assert isinstance(tries[0], Held)
        limits.release(tries[0])
        await hold(limits, 1)
    finally:
        await registry.close()


async def test_a_request_is_refused_before_its_prompt_is_looked_at_where_this_replica_knows() -> None:
    limits = ConcurrencyLimits(None, clock)
    limits.check(SEARCH, 4, 1.0)
    held = await hold(limits, 3)
    with pytest.raises(Overloaded) as caught:
        limits.check(SEARCH, 2, 1.5)
    assert caught.value.retry_after_s == 1.5
    limits.check(SEARCH, 1, 1.0)
    limits.release(held)
    limits.check(SEARCH, 4, 1.0)
    with pytest.raises(InvalidRequest, match="this request alone has 5"):
        limits.check(SEARCH, 5, 1.0)


async def test_who_was_refused_by_what_others_hold_is_refused_at_once_for_a_moment(
    registry: Registry,
) -> None:
    now_s = 0.0
    await hold(ConcurrencyLimits(registry, clock), 3)
    limits = ConcurrencyLimits(registry, lambda: now_s)
    limits.check(SEARCH, 2, 1.0)
    with pytest.raises(Overloaded):
        await hold(limits, 2)
    with pytest.raises(Overloaded):
        limits.check(SEARCH, 2, 1.0)
    limits.check(SEARCH, 1, 1.0)  # which may fit
    now_s = 1.0
    limits.check(SEARCH, 2, 1.0)


async def test_who_has_no_limit_is_not_counted() -> None:
    limits = ConcurrencyLimits(None, clock)
    free = Caller("free", frozenset(Scope))
    limits.check(free, 64, 1.0)
    assert await limits.hold(free, 64, lambda: 1.0) is None
    limits.release(None)
    assert not limits._running
