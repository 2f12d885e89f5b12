"""Tenants' limits: what a bucket lets through, that Redis and a replica alone count alike, and that all share one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.access import rate_limits
from coordinator.access.api_keys import Caller, Scope, TenantLimits
from coordinator.access.rate_limits import BEGUN, CERTAIN, NEW, Bucket, RateLimits
from outrider.errors import Overloaded
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry

LIMITS = TenantLimits(requests_per_minute=60, tokens_per_minute=6000)
SEARCH = Caller("search", frozenset(Scope), LIMITS)


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


class TestBucket:
    @given(
        st.lists(
            st.tuples(st.floats(0, 30), st.integers(1, 3), st.integers(0, 3000), st.booleans()),
            max_size=200,
        )
    )
    def test_no_minute_lets_more_in_than_two_minutes_worth(self, charges: list[tuple[float, int, int, bool]]) -> None:
        """A full bucket and what flows in meanwhile, and the one request that empties it."""
        bucket, now_s, let_in = Bucket.full(LIMITS, 0.0), 0.0, list[float]()
        for pause_s, requests, tokens, is_certain in charges:
            now_s += pause_s
            if bucket.charge(LIMITS, now_s, requests, tokens, CERTAIN if is_certain else NEW) == 0 and not is_certain:
                let_in += [now_s] * requests
        for start_s in let_in:
            assert sum(start_s <= at_s < start_s + 60 for at_s in let_in) <= 2 * 60 + 3

    def test_who_waits_as_long_as_it_is_told_is_let_in(self) -> None:
        bucket = Bucket.full(LIMITS, 0.0)
        bucket.charge(LIMITS, 0.0, 0, 12_000, CERTAIN)  # a long output
        wait_s = bucket.charge(LIMITS, 0.0, 1, 10)
        assert wait_s == pytest.approx(60.01, abs=0.01)
        assert bucket.charge(LIMITS, wait_s - 0.1, 1, 10) > 0
        assert bucket.charge(LIMITS, wait_s + 0.001, 1, 10) == 0

    def test_a_clock_that_goes_back_refills_nothing(self) -> None:
        bucket = Bucket.full(LIMITS, 100.0)
        bucket.charge(LIMITS, 100.0, 60, 0)
        assert bucket.charge(LIMITS, 50.0, 1, 0) > 0

    def test_what_has_no_limit_costs_nothing(self) -> None:
        only_requests = TenantLimits(requests_per_minute=5)
        bucket = Bucket.full(only_requests, 0.0)
        assert [bucket.charge(only_requests, 0.0, 1, 10**9) == 0 for _ in range(6)] == [True] * 5 + [False]


class TestShared:
    async def test_replicas_keep_to_one_limit_together(self, registry: Registry) -> None:
        replicas = [RateLimits(registry, lambda: 0.0) for _ in range(3)]
        outcomes = await asyncio.gather(*(replicas[i % 3].admit(SEARCH, 1) for i in range(90)), return_exceptions=True)
        refused = [each for each in outcomes if each is not None]
        assert all(isinstance(each, Overloaded) for each in refused)
        assert len(refused) in (29, 30)  # a request a second flows in meanwhile

    async def test_an_output_is_charged_when_it_is_known(self, registry: Registry) -> None:
        limits = RateLimits(registry, lambda: 0.0)
        await limits.admit(SEARCH, 10)
        limits.owe(SEARCH, 9000)
        await limits.charge_outputs()
        with pytest.raises(Overloaded, match="tenant search has used up its 60 requests or 6000 tokens") as caught:
            await RateLimits(registry, lambda: 0.0).admit(SEARCH, 1)
        assert 29 < caught.value.retry_after_s < 31

    async def test_redis_counts_as_a_replica_alone_does(self, registry: Registry) -> None:
        """The script and the model of it, charge by charge."""
        limits, bucket = RateLimits(registry, lambda: 0.0), Bucket.full(LIMITS, 0.0)
        for requests, tokens, owed_max in [
            (1, 100, NEW), (30, 2000, NEW), (0, 3000, CERTAIN), (1, 900, NEW), (1, 5, NEW), (0, 50, CERTAIN),
            (1, 3000, BEGUN), (1, 9000, BEGUN), (1, 5, BEGUN), (0, 5, CERTAIN),
        ]:  # fmt: skip
            shared = await limits._charge("t", LIMITS, requests, tokens, owed_max)
            own = bucket.charge(LIMITS, 0.0, requests, tokens, owed_max)
            assert shared == pytest.approx(own, abs=0.3)

    async def test_a_bucket_that_is_full_again_is_forgotten(self, registry: Registry) -> None:
        await RateLimits(registry, lambda: 0.0).admit(SEARCH, 600)
        (key,) = await registry.ask(registry._client.keys("or:limits:*"))
        assert "search" not in key
        assert 6_000 < await registry.ask(registry._client.pttl(key)) <= 7_100

    async def test_tenants_do_not_pay_for_each_other(self, registry: Registry) -> None:
        limits = RateLimits(registry, lambda: 0.0)
        for _ in range(60):
            await limits.admit(SEARCH, 1)
        await limits.admit(Caller("ads", frozenset(Scope), LIMITS), 1)
        await limits.admit(Caller("free", frozenset(Scope)), 10**9)


class TestWithoutRedis:
    async def test_a_replica_keeps_to_the_limits_by_itself_and_nobody_waits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rate_limits, "_AWAY_S", 1000.0)
        registry = Registry("redis://127.0.0.1:1/0", 0.2)
        limits = RateLimits(registry, lambda: 0.0)
        try:
            for _ in range(60):
                await limits.admit(SEARCH, 1)
            with pytest.raises(Overloaded) as caught:
                await limits.admit(SEARCH, 1)
            assert caught.value.retry_after_s == pytest.approx(1.0)
        finally:
            await registry.close()

    async def test_one_that_comes_and_goes_gives_nobody_more(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits, away = RateLimits(registry, lambda: 0.0), Registry("redis://127.0.0.1:1/0", 0.2)
        monkeypatch.setattr(rate_limits, "_AWAY_S", 0.0)
        try:
            for index in range(60):
                limits._registry, limits._script = (
                    (away, away.register_script(rate_limits._CHARGE))
                    if index % 2
                    else (registry, registry.register_script(rate_limits._CHARGE))
                )
                await limits.admit(SEARCH, 1)
            limits._registry, limits._script = away, away.register_script(rate_limits._CHARGE)
            with pytest.raises(Overloaded):
                await limits.admit(SEARCH, 1)
        finally:
            await away.close()


class TestTold:
    async def test_who_was_refused_is_refused_at_once_until_its_time_has_come(self, registry: Registry) -> None:
        now_s = 0.0
        limits = RateLimits(registry, lambda: now_s)
        limits.check(SEARCH)
        limits.owe(SEARCH, 9000)
        await limits.charge_outputs()
        with pytest.raises(Overloaded) as caught:
            await limits.admit(SEARCH, 1)
        with pytest.raises(Overloaded) as again:
            limits.check(SEARCH)
        assert again.value.retry_after_s == pytest.approx(caught.value.retry_after_s)
        limits.check(Caller("ads", frozenset(Scope), LIMITS))
        limits.check(Caller("search", frozenset(Scope), TenantLimits(tokens_per_minute=10**6)))  # a new file
        now_s = caught.value.retry_after_s
        limits.check(SEARCH)

    async def test_a_stream_that_goes_on_may_owe_a_minutes_worth(self) -> None:
        limits = RateLimits(None, lambda: 0.0)
        for _ in range(60):
            await limits.admit(SEARCH, 1)
        with pytest.raises(Overloaded):
            await limits.admit(SEARCH, 1)
        for _ in range(60):
            await limits.admit(SEARCH, 1, has_begun=True)
        with pytest.raises(Overloaded, match="used up"):
            await limits.admit(SEARCH, 1, has_begun=True)
