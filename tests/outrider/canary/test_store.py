"""One canary in a real Redis, for all replicas and the operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from outrider.canary.plan import LEAD_MS, ArmChange, ArmName, Canary, CanaryPlan, CanaryState
from outrider.canary.rule import Verdict, judge
from outrider.canary.statistics import ArmStatistics, Count, Figure, Loss, RequestFigures
from outrider.canary.store import Batch, CanaryStore
from outrider.errors import ConfigurationError, RegistryUnavailable
from outrider.local.free_ports import free_ports
from outrider.registry.registry import Registry


def plan(canary_id: str = "abcd1234", **changes: Any) -> CanaryPlan:
    fields: dict[str, Any] = {"change": ArmChange(speculates=False), "share": 0.5}
    return CanaryPlan(canary_id=canary_id, **fields | changes)


def batch(number: int, sender: str = "one", canary_id: str = "abcd1234", num: int = 3) -> Batch:
    control, canary = ArmStatistics(), ArmStatistics()
    for _ in range(num):
        control.add(
            RequestFigures(ttft_ms=12.5, tpot_ms=0.1, e2e_ms=1e6 / 3, num_draft_tokens=7, num_accepted_draft_tokens=2),
            group=5,
        )
    canary.count(Count.LEFT, num)
    sums = {ArmName.CONTROL: control.sums, ArmName.CANARY: canary.sums}
    return Batch(canary_id, sender, number, sums)


@pytest.fixture
def store(registry: Registry) -> CanaryStore:
    return CanaryStore(registry)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def current(store: CanaryStore) -> Canary:
    canary = (await store.exchange()).canary
    assert canary is not None
    return canary


async def test_without_a_canary_there_is_nothing(store: CanaryStore) -> None:
    view = await store.exchange(batch(1))
    assert view.canary is None
    assert not any(arm.sums for arm in view.arms.values())


async def test_a_plan_comes_back_as_it_was_and_begins_when_all_have_heard(store: CanaryStore) -> None:
    made = plan(duration_s=60.5, audit_share=0.0)
    await store.begin(made)
    view = await store.exchange()
    assert view.canary is not None
    assert view.canary.plan == made
    assert view.canary.state is CanaryState.RUNNING
    assert 0 <= view.canary.begins_ms - view.clock_ms <= LEAD_MS
    assert view.canary.ends_ms - view.canary.begins_ms == 60_500


async def test_one_that_names_a_draft_model_waits_and_begins_anew_when_there_is_one(
    store: CanaryStore,
) -> None:
    await store.begin(plan(change=ArmChange(draft_model="new"), duration_s=100))
    waiting = await current(store)
    assert (waiting.state, waiting.begins_ms) == (CanaryState.WAITING, 0)
    assert await store.decide(waiting, CanaryState.RUNNING, "there is one")
    running = await current(store)
    assert running.state is CanaryState.RUNNING
    assert running.begins_ms >= waiting.ends_ms - 100_000 + LEAD_MS
    assert running.ends_ms - running.begins_ms == 100_000


async def test_only_one_canary_is_in_force(store: CanaryStore) -> None:
    await store.begin(plan())
    with pytest.raises(ConfigurationError, match="the canary abcd1234 is in force; end it first"):
        await store.begin(plan("wxyz"))
    assert await store.decide(await current(store), CanaryState.PROMOTED, "")
    with pytest.raises(ConfigurationError, match="abcd1234"):
        await store.begin(plan("wxyz"))
    assert await store.decide(await current(store), CanaryState.ABORTED, "")
    await store.begin(plan("wxyz"))
    assert (await current(store)).plan.canary_id == "wxyz"


async def test_one_whose_time_is_over_is_in_nobodys_way(store: CanaryStore) -> None:
    waiting = plan(change=ArmChange(draft_model="new"), duration_s=0.001)
    await store.begin(waiting)
    await asyncio.sleep(0.01)
    await store.begin(plan("wxyz"))


async def test_of_two_that_decide_at_once_one_is_told_that_it_came_too_late(store: CanaryStore) -> None:
    await store.begin(plan())
    seen = await current(store)
    won = await asyncio.gather(
        store.decide(seen, CanaryState.PROMOTED, "rule"), store.decide(seen, CanaryState.ABORTED, "operator")
    )
    assert sorted(won) == [False, True]
    found = await current(store)
    assert (found.state, found.reason) == (
        (CanaryState.PROMOTED, "rule") if won[0] else (CanaryState.ABORTED, "operator")
    )
    other = replace(seen, plan=plan("wxyz"))
    assert not await store.decide(other, CanaryState.ABORTED, "")


async def test_what_replicas_saw_adds_up(store: CanaryStore) -> None:
    await store.begin(plan())
    await asyncio.gather(*(store.exchange(batch(1, sender, num=4)) for sender in "abcdef"))
    arms = (await store.exchange()).arms
    assert arms[ArmName.CONTROL].num(Count.FINISHED) == 24
    assert arms[ArmName.CANARY].num(Count.LEFT) == 24
    e2e = arms[ArmName.CONTROL].mean(Figure.E2E)
    assert e2e.whole == 24
    assert e2e.value == pytest.approx(1e6 / 3, rel=1e-12)
    assert arms[ArmName.CONTROL].draft_acceptance_rate == pytest.approx(2 / 7)
    assert arms[ArmName.CONTROL].quantile(Figure.TPOT, 0.5) == pytest.approx(0.1, rel=0.011)


async def test_a_batch_whose_answer_was_lost_counts_once_though_it_is_sent_again(store: CanaryStore) -> None:
    await store.begin(plan())
    for number in (1, 1, 2, 1, 2):
        view = await store.exchange(batch(number))
    assert view.arms[ArmName.CONTROL].num(Count.FINISHED) == 6


async def test_a_group_of_keys_counts_as_lost_in_the_arm_that_lost_it_first_whichever_replica_says_so(
    store: CanaryStore,
) -> None:
    def lost(sender: str, number: int, **groups: int) -> Batch:
        sums = {}
        for arm in ArmName:
            statistics = ArmStatistics()
            if arm in groups:
                statistics.lose(Count.FAILED, groups[arm])
            sums[arm] = statistics.sums
        return Batch("abcd1234", sender, number, sums)

    await store.begin(plan())
    await store.exchange(lost("one", 1, canary=3))
    await store.exchange(lost("two", 1, canary=3, control=3))
    await store.exchange(lost("two", 2, canary=4, control=4))  # control's comes first within a batch
    arms = (await store.exchange(lost("one", 2, control=8))).arms
    assert {arm: arms[arm].num_first(Loss.FAILURES) for arm in ArmName} == {
        ArmName.CONTROL: 2,
        ArmName.CANARY: 1,
    }
    assert {arm: arms[arm].num_lost(Loss.FAILURES) for arm in ArmName} == {
        ArmName.CONTROL: 3,
        ArmName.CANARY: 3,
    }


async def test_sums_of_a_release_that_names_them_otherwise_are_no_sums_of_ours(store: CanaryStore) -> None:
    await store.begin(plan())
    theirs = {
        "finished": 900.0,
        "refused": 5.0,
        "tpot:num": 900.0,
        "tpot:sum": 1e9,
        "tpot:squares": 1e18,
        "tpot:b:100": 900.0,
    }
    await store.exchange(Batch("abcd1234", "old", 1, {ArmName.CANARY: theirs}))
    view = await store.exchange(batch(1))
    assert view.arms[ArmName.CANARY].num(Count.FINISHED) == 900
    assert view.arms[ArmName.CANARY].mean(Figure.TPOT).whole == 0
    assert view.arms[ArmName.CANARY].quantile(Figure.TPOT, 0.5) is not None
    assert view.canary is not None
    assert judge(view.canary.plan, view.arms, is_out_of_time=False).verdict is Verdict.CONTINUE


async def test_a_batch_of_an_earlier_canary_is_dropped(store: CanaryStore) -> None:
    await store.begin(plan())
    await store.exchange(batch(1))
    assert await store.decide(await current(store), CanaryState.ABORTED, "")
    late = await store.exchange(batch(2))
    assert late.arms[ArmName.CONTROL].num(Count.FINISHED) == 6
    await store.begin(plan("wxyz"))
    view = await store.exchange(batch(3))
    assert not any(arm.sums for arm in view.arms.values())


async def test_statistics_end_by_themselves_and_a_promotion_does_not(
    store: CanaryStore, client: redis.asyncio.Redis
) -> None:
    await store.begin(plan())
    await store.exchange(batch(1))
    assert await client.ttl("{or:canary}:plan") == -1
    for key in ("control", "canary", "batches"):
        assert 6 * 86400 < await client.ttl("{or:canary}:" + key) <= 7 * 86400


async def test_what_is_forgotten_leaves_no_key(store: CanaryStore, client: redis.asyncio.Redis) -> None:
    await store.begin(plan())
    await store.exchange(batch(1))
    await store.forget()
    assert await client.keys("*canary*") == []
    await store.forget()


async def test_a_plan_of_another_release_is_no_plan(
    store: CanaryStore, client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await store.begin(plan())
    await client.hset("{or:canary}:plan", "plan", '{"canary_id": "abcd1234", "mood": "good"}')
    for _ in range(3):
        assert (await store.exchange()).canary is None
    assert caplog.text.count("ignoring the plan of the canary abcd1234") == 1
    await client.hset("{or:canary}:plan", "id", "wxyz")
    await store.exchange()
    assert caplog.text.count("ignoring the plan of the canary wxyz") == 1


async def test_sums_that_are_no_numbers_are_as_good_as_lost(
    store: CanaryStore, client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await store.begin(plan())
    await store.exchange(batch(1))
    await client.hset("{or:canary}:control", "finished", "many")
    for _ in range(3):
        arms = (await store.exchange()).arms
        assert [arms[arm].num_ended for arm in (ArmName.CONTROL, ArmName.CANARY)] == [0, 3]
    assert caplog.text.count("ignoring the statistics of the canary abcd1234") == 1


async def test_without_redis_every_call_says_so() -> None:
    registry = Registry(f"redis://127.0.0.1:{free_ports(1)[0]}/0", 0.2)
    away = CanaryStore(registry)
    for call in (away.exchange(), away.begin(plan()), away.forget()):
        with pytest.raises(RegistryUnavailable):
            await call
    await registry.close()
