"""Replicas that follow one canary, on a real Redis, and on one that is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.canary.assignment import CanaryDesk
from coordinator.canary.keeper import CanaryKeeper
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from outrider.canary import plan as plan_module
from outrider.canary.plan import NUM_GROUPS, ArmName, Assignment, Canary, CanaryState
from outrider.canary.statistics import ArmStatistics, Count, RequestFigures
from outrider.canary.store import Batch, CanaryStore, CanaryView
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry
from tests.coordinator.canaries import NEW_DRAFT, SHORT, key_in, plan_of
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import eventually

CONTROL, CANARY = ArmName.CONTROL, ArmName.CANARY


class Replica:
    """Its clock stands still, at a moment of its own."""

    def __init__(self, url: str, name: str, now_s: float = 0.0, drafts: tuple[str, ...] = ()) -> None:
        self.registry = Registry(url)
        self.desk = CanaryDesk(name)
        self.metrics = CoordinatorMetrics()
        self.drafts = list(drafts)
        self.now_s = now_s
        self.store = CanaryStore(self.registry)
        self.keeper = CanaryKeeper(
            *(self.store, self.desk, self.metrics, lambda: self.now_s),
            has_draft=lambda name: name in self.drafts,
            sync_s=60.0,
        )

    def see(self, arm: ArmName, num: int = 1, tpot_ms: float = 10.0) -> None:
        """Requests that finish, one slower, one faster than the mean."""
        for number in range(num):
            factor = 1.2 if number % 2 else 0.8
            self.statistics(arm).add(
                RequestFigures(
                    ttft_ms=100 * factor, tpot_ms=tpot_ms * factor, e2e_ms=1000.0,
                    num_draft_tokens=0, num_accepted_draft_tokens=0,
                ),
                number // 2 % NUM_GROUPS,
            )  # fmt: skip

    def statistics(self, arm: ArmName) -> ArmStatistics:
        assert self.desk.canary is not None
        canary_id = self.desk.canary.plan.canary_id
        return self.desk.statistics_of(Assignment(canary_id, arm, group=0, is_compared=True))

    @property
    def canary(self) -> Canary:
        assert self.desk.canary is not None
        return self.desk.canary

    @property
    def share(self) -> float:
        return self.desk.share(self.now_s)

    def knows(self, arm: ArmName) -> int:
        return self.desk._view.arms[arm].num_ended


@contextlib.asynccontextmanager
async def replicas(url: str, count: int = 2, **options: Any) -> AsyncIterator[list[Replica]]:
    made = [Replica(url, f"replica {number}", 1000.0 * number, **options) for number in range(count)]
    yield made
    for each in made:
        await each.registry.close()


@pytest.fixture
def store(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> CanaryStore:
    """On an empty Redis, where canaries begin at once."""
    monkeypatch.setattr("outrider.canary.store.LEAD_MS", 0)
    return CanaryStore(registry)


async def begun(store: CanaryStore, made: list[Replica], **plan: Any) -> None:
    """All replicas have heard of it."""
    await store.begin(plan_of(SHORT, **plan))
    for replica in made:
        assert await replica.keeper.sync()


class TestTogether:
    async def test_replicas_agree_about_every_key_whatever_their_own_clocks_show(
        self, redis_url: str, store: CanaryStore
    ) -> None:
        async with replicas(redis_url) as (first, second):
            await begun(store, [first, second])
            assert first.canary == second.canary
            assert first.desk.clock_ms(first.now_s) == pytest.approx(second.desk.clock_ms(second.now_s), abs=500)
            assert first.share == second.share == 0.5

    async def test_a_canary_begins_at_the_same_moment_for_those_that_heard_of_it_early_and_late(
        self, redis_url: str, registry: Registry
    ) -> None:
        store = CanaryStore(registry)
        async with replicas(redis_url) as (first, second):
            await store.begin(plan_of(SHORT))
            await first.keeper.sync()
            await asyncio.sleep(0.2)
            await second.keeper.sync()
            for each in (first, second):
                assert each.share == 0.0
                wait_ms = each.canary.begins_ms - each.desk.clock_ms(each.now_s)
                assert 0 < wait_ms <= plan_module.LEAD_MS
                each.now_s += plan_module.LEAD_MS / 1000
                assert each.share == 0.5

    async def test_what_all_saw_is_known_to_all(self, redis_url: str, store: CanaryStore) -> None:
        async with replicas(redis_url, 3) as made:
            await begun(store, made)
            for number, replica in enumerate(made, 1):
                replica.see(CONTROL, number)
                replica.see(CANARY, 10 * number)
            for replica in (*made, *made):
                assert await replica.keeper.sync()
            assert {replica.knows(CONTROL) for replica in made} == {6}
            assert {replica.knows(CANARY) for replica in made} == {60}

    async def test_what_a_replica_that_is_killed_saw_is_kept_up_to_its_last_exchange(
        self, redis_url: str, store: CanaryStore
    ) -> None:
        async with replicas(redis_url) as (first, second):
            await begun(store, [first, second])
            first.see(CANARY, 5)
            await first.keeper.sync()
            first.see(CANARY, 100)  # and then it dies
            await second.keeper.sync()
            assert second.knows(CANARY) == 5

    async def test_a_replica_that_leaves_hands_over_all(self, redis_url: str, store: CanaryStore) -> None:
        async with replicas(redis_url) as (first, second):
            await begun(store, [second])
            async with first.keeper:
                await eventually(lambda: first.desk.canary is not None, "the first exchange is over")
                first.see(CANARY, 5)
            await second.keeper.sync()
            assert second.knows(CANARY) == 5

    async def test_a_replica_that_leaves_while_it_hands_over_hands_over_what_came_meanwhile_too(
        self, redis_url: str, store: CanaryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with replicas(redis_url) as (first, second):
            await begun(store, [first, second])
            first.see(CANARY, 5)
            exchange, is_sent = first.store.exchange, asyncio.Event()

            async def answer_is_lost(batch: Batch | None = None) -> CanaryView:
                await exchange(batch)
                is_sent.set()
                await asyncio.Event().wait()
                raise AssertionError

            monkeypatch.setattr(first.store, "exchange", answer_is_lost)
            async with first.keeper:
                await is_sent.wait()
                first.see(CANARY, 7)
                monkeypatch.setattr(first.store, "exchange", exchange)
            await second.keeper.sync()
            assert second.knows(CANARY) == 12

    async def test_a_bug_is_told_and_does_not_end_the_exchanges(
        self,
        redis_url: str,
        store: CanaryStore,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        async with replicas(redis_url, 1) as (replica,):
            exchange = replica.store.exchange

            async def broken(batch: Batch | None = None) -> CanaryView:
                raise KeyError("a bug")

            monkeypatch.setattr(replica.store, "exchange", broken)
            async with replica.keeper:
                await eventually(lambda: replica.keeper.is_degraded, "it has met the bug")
                assert "KeyError: 'a bug'" in caplog.text
                monkeypatch.setattr(replica.store, "exchange", exchange)
                await store.begin(plan_of(SHORT))
                replica.keeper.hurry()
                await eventually(lambda: replica.desk.canary is not None, "it has heard of the canary", 2.0)

    async def test_the_share_is_shown(self, redis_url: str, store: CanaryStore) -> None:
        async with replicas(redis_url, 1) as (replica,):
            await begun(store, [replica], share=0.25)
            assert replica.metrics.registry.get_sample_value("outrider_canary_share") == 0.25
            assert await store.decide(replica.canary, CanaryState.PROMOTED, "")
            await replica.keeper.sync()
            assert replica.metrics.registry.get_sample_value("outrider_canary_share") == 1.0


class TestDecisions:
    async def state_after(
        self, redis_url: str, store: CanaryStore, tpot_ms: float, *, diverged: bool = False, **plan: Any
    ) -> tuple[Canary, Canary]:
        """As both replicas know it, after one of them has seen enough."""
        async with replicas(redis_url) as (first, second):
            await begun(store, [first, second], **plan)
            first.see(CONTROL, 1000)
            first.see(CANARY, 400, tpot_ms)
            if diverged:
                first.statistics(CANARY).count(Count.AUDITED)
                first.statistics(CANARY).count(Count.DIVERGED)
            await first.keeper.sync()
            await second.keeper.sync()
            return first.canary, second.canary

    @pytest.mark.parametrize(
        ("tpot_ms", "diverged", "state"),
        [
            (8.0, False, CanaryState.PROMOTED),
            (10.0, False, CanaryState.RUNNING),
            (13.0, False, CanaryState.ABORTED),
            (8.0, True, CanaryState.ABORTED),
        ],
        ids=["faster", "the same", "slower", "faster and wrong"],
    )
    async def test_an_automatic_one_follows_the_rule(
        self, redis_url: str, store: CanaryStore, tpot_ms: float, diverged: bool, state: CanaryState
    ) -> None:
        found = await self.state_after(redis_url, store, tpot_ms, diverged=diverged, is_automatic=True)
        assert [each.state for each in found] == [state, state]
        assert bool(found[0].reason) == (state is not CanaryState.RUNNING)

    @pytest.mark.parametrize("tpot_ms", [8.0, 13.0])
    async def test_one_that_recommends_leaves_traffic_as_it_is(
        self, redis_url: str, store: CanaryStore, tpot_ms: float
    ) -> None:
        found = await self.state_after(redis_url, store, tpot_ms)
        assert {each.state for each in found} == {CanaryState.RUNNING}

    @pytest.mark.parametrize("is_automatic", [False, True])
    async def test_undecided_when_its_time_is_over_it_is_given_up_and_says_so(
        self, redis_url: str, store: CanaryStore, is_automatic: bool
    ) -> None:
        async with replicas(redis_url, 1) as (replica,):
            await begun(store, [replica], duration_s=0.2, is_automatic=is_automatic)
            await asyncio.sleep(0.25)
            await replica.keeper.sync()
            assert replica.canary.state is CanaryState.ABORTED
            assert replica.canary.reason.startswith("undecided when its time was over; open: requests")

    async def test_a_recommendation_that_nobody_followed_is_told(self, redis_url: str, store: CanaryStore) -> None:
        async with replicas(redis_url, 1) as (replica,):
            await begun(store, [replica], duration_s=1.0)
            replica.see(CONTROL, 1000)
            replica.see(CANARY, 400, 8.0)
            await asyncio.sleep(1.05)
            await replica.keeper.sync()
            assert replica.canary.state is CanaryState.ABORTED
            assert "as was recommended" in replica.canary.reason

    async def test_one_that_waits_begins_when_any_replica_sees_a_draft_worker_of_its_model(
        self, redis_url: str, store: CanaryStore
    ) -> None:
        async with replicas(redis_url) as (first, second):
            await store.begin(plan_of(NEW_DRAFT))
            for each in (first, second):
                await each.keeper.sync()
                assert each.canary.state is CanaryState.WAITING
            second.drafts.append("new")
            await second.keeper.sync()
            await first.keeper.sync()
            assert first.canary.state is second.canary.state is CanaryState.RUNNING
            assert first.share == 0.5

    async def test_one_that_waits_in_vain_ends(self, redis_url: str, store: CanaryStore) -> None:
        async with replicas(redis_url, 1) as (replica,):
            await store.begin(plan_of(NEW_DRAFT, duration_s=0.1))
            await asyncio.sleep(0.15)
            await replica.keeper.sync()
            assert replica.canary.state is CanaryState.ABORTED
            assert replica.canary.reason == "no draft worker of new came in time"


async def test_without_redis_the_plan_holds_until_its_end_and_nothing_is_lost(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    try:
        async with replicas(url, 1) as (replica,):
            store = CanaryStore(replica.registry)
            await store.begin(plan_of(SHORT, duration_s=60.0))
            assert await replica.keeper.sync()
            replica.now_s += 5
            replica.see(CANARY, 3)
            server.stop()
            for _ in range(3):
                assert not await replica.keeper.sync()
                replica.see(CANARY)
            assert replica.keeper.is_degraded
            assert replica.share == 0.5
            batch = replica.desk.take()
            assert batch is not None
            assert batch.sums[CANARY][Count.FINISHED] == 3
            replica.now_s += 60
            assert replica.share == 0.0
    finally:
        server.stop()


async def test_a_service_follows_the_canary_of_its_redis_and_refuses_nobody_without_it(
    clusters: ClusterFactory, tmp_path: Path
) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    settings = CoordinatorSettings(tokenizer_dir=str(clusters.model_dir), redis_url=url)
    registry = Registry(url)
    try:
        plan = plan_of(SHORT)
        await CanaryStore(registry).begin(plan)
        async with GenerationService(settings) as service:
            await eventually(lambda: service.canary.canary is not None, "it has heard of the canary")
            assert service.canary.canary is not None
            assert service.canary.canary.plan == plan
            server.stop()
            service._hurry_canary()
            keeper = service._canary_keeper
            assert keeper is not None
            await eventually(lambda: keeper.is_degraded, "it has noticed")
            assert service.canary.canary.plan.arm_of(key_in(plan, CANARY)) is CANARY
    finally:
        await registry.close()
        server.stop()


async def test_news_bring_the_next_exchange_at_once(redis_url: str, store: CanaryStore, registry: Registry) -> None:
    async with replicas(redis_url, 1) as (replica,), replica.keeper:
        await eventually(lambda: replica.desk._view.clock_ms > 0, "the first exchange is over")
        await store.begin(plan_of(SHORT))
        replica.keeper.hurry()
        await eventually(lambda: replica.desk.canary is not None, "it has heard of the canary", 2.0)
