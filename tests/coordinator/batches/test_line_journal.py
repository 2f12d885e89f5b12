"""Leases on lines in a real Redis: each line ends once, whoever dies and whatever is repeated."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.access.api_keys import ANYBODY, Caller, Scope
from coordinator.batches import line_journal
from coordinator.batches.batch import Batch, BatchState, LineCounts
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.line_journal import Fenced, LineJournal
from outrider.errors import Conflict, NotFound, Overloaded
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import created, desk_over, lines, state_of

SEARCH = Caller("search", frozenset(Scope))


async def running(desk: BatchDesk, num_lines: int) -> Batch:
    """A batch whose lines may be claimed."""
    batch = await created(desk, lines(num_lines))
    await desk.journal.move(batch.batch_id, BatchState.IN_PROGRESS, {"num_lines": num_lines})
    return await state_of(desk, batch)


@pytest.fixture
def desk(registry: Registry, tmp_path: Path) -> BatchDesk:
    return desk_over(registry, tmp_path, lease_s=0.2)


class TestClaims:
    async def test_give_each_line_to_one(self, desk: BatchDesk) -> None:
        batch = await running(desk, 5)
        first = await desk.journal.claim(batch.batch_id, "a", 3)
        second = await desk.journal.claim(batch.batch_id, "b", 3)
        assert [claim.line for claim in first] == [0, 1, 2]
        assert [claim.line for claim in second] == [3, 4]
        assert not await desk.journal.claim(batch.batch_id, "c", 3)

    async def test_pass_on_when_the_lease_ends(self, desk: BatchDesk) -> None:
        batch = await running(desk, 2)
        lost = await desk.journal.claim(batch.batch_id, "a", 2)
        await asyncio.sleep(0.3)
        (claim,) = await desk.journal.claim(batch.batch_id, "b", 1)
        assert (claim.line, claim.num_attempts) == (0, 2)
        assert await desk.journal.renew(batch.batch_id, lost) == {0}
        assert await desk.journal.commit(batch.batch_id, "p", lost, LineCounts(num_completed=2)) == {0}, (
            "all or nothing"
        )
        assert (await state_of(desk, batch)).counts.num_completed == 0

    async def test_last_while_they_are_renewed(self, desk: BatchDesk) -> None:
        batch = await running(desk, 1)
        claims = await desk.journal.claim(batch.batch_id, "a", 1)
        for _ in range(4):
            await asyncio.sleep(0.08)
            assert not await desk.journal.renew(batch.batch_id, claims)
        assert not await desk.journal.claim(batch.batch_id, "b", 1)

    async def test_can_be_given_back_at_once_and_do_not_count(self, desk: BatchDesk) -> None:
        batch = await running(desk, 1)
        claims = await desk.journal.claim(batch.batch_id, "a", 1)
        await desk.journal.release(batch.batch_id, claims)
        (claim,) = await desk.journal.claim(batch.batch_id, "b", 1)
        assert claim.num_attempts == 1
        assert await desk.journal.commit(batch.batch_id, "p", claims, LineCounts(num_completed=1)) == {0}

    async def test_begin_only_while_the_batch_runs(self, desk: BatchDesk) -> None:
        batch = await created(desk, lines(2))
        assert not await desk.journal.claim(batch.batch_id, "a", 2)


class TestCommits:
    async def test_can_be_repeated(self, desk: BatchDesk) -> None:
        batch = await running(desk, 3)
        claims = await desk.journal.claim(batch.batch_id, "a", 3)
        for _ in range(2):
            assert not await desk.journal.commit(batch.batch_id, "p", claims, LineCounts(num_completed=2, num_failed=1))
        found = await state_of(desk, batch)
        assert (found.counts.num_completed, found.counts.num_failed, found.has_ended_lines_only) == (2, 1, True)
        assert await desk.journal.parts(batch.batch_id) == ["p"]

    async def test_of_a_line_that_has_ended_change_nothing(self, desk: BatchDesk) -> None:
        batch = await running(desk, 1)
        late = await desk.journal.claim(batch.batch_id, "a", 1)
        await asyncio.sleep(0.3)
        claims = await desk.journal.claim(batch.batch_id, "b", 1)
        assert not await desk.journal.commit(batch.batch_id, "p", claims, LineCounts(num_completed=1))
        assert await desk.journal.commit(batch.batch_id, "q", late, LineCounts(num_completed=1)) == {0}
        assert await desk.journal.parts(batch.batch_id) == ["p"]

    async def test_of_a_batch_that_was_cancelled_change_nothing(self, desk: BatchDesk) -> None:
        batch = await running(desk, 2)
        claims = await desk.journal.claim(batch.batch_id, "a", 1)
        await desk.cancel(ANYBODY, batch.batch_id)
        for _ in range(2):
            assert await desk.journal.close(batch.batch_id) == {0}
        assert await desk.journal.commit(batch.batch_id, "p", claims, LineCounts(num_completed=1)) == {0}
        assert await desk.journal.next_line(batch.batch_id) == 1


class TestTasks:
    async def test_belong_to_one_until_their_lease_ends(self, desk: BatchDesk) -> None:
        batch = await created(desk, lines(1))
        assert await desk.journal.take_task(batch.batch_id, "a", BatchState.VALIDATING)
        assert await desk.journal.take_task(batch.batch_id, "a", BatchState.VALIDATING)
        assert not await desk.journal.take_task(batch.batch_id, "b", BatchState.VALIDATING)
        await asyncio.sleep(0.3)
        assert await desk.journal.take_task(batch.batch_id, "b", BatchState.VALIDATING)
        with pytest.raises(Fenced):
            await desk.journal.move(batch.batch_id, BatchState.IN_PROGRESS, fence="a")
        await desk.journal.move(batch.batch_id, BatchState.IN_PROGRESS, fence="b")

    async def test_states_follow_their_order(self, desk: BatchDesk) -> None:
        batch = await created(desk, lines(1))
        with pytest.raises(Fenced, match="validating"):
            await desk.journal.move(batch.batch_id, BatchState.COMPLETED)
        with pytest.raises(Fenced, match="gone"):
            await desk.journal.move("batch_none", BatchState.CANCELLING)
        await desk.journal.move(batch.batch_id, BatchState.FAILED)
        await desk.journal.move(batch.batch_id, BatchState.FAILED)
        with pytest.raises(Conflict, match="failed"):
            await desk.cancel(ANYBODY, batch.batch_id)


class TestTenants:
    async def test_see_only_their_own(self, desk: BatchDesk) -> None:
        batch = await created(desk, lines(1), SEARCH)
        assert (await desk.get(SEARCH, batch.batch_id)).tenant == "search"
        for call in (desk.get, desk.cancel):
            with pytest.raises(NotFound):
                await call(Caller("other", frozenset(Scope)), batch.batch_id)
        assert not await desk.page(ANYBODY, "", 10)

    async def test_list_the_newest_first_in_pages(self, desk: BatchDesk) -> None:
        made = []
        for _ in range(3):
            made.append((await created(desk, lines(1), SEARCH)).batch_id)
            await asyncio.sleep(0.002)  # times are in ms
        first = await desk.page(SEARCH, "", 2)
        rest = await desk.page(SEARCH, first[-1].batch_id, 2)
        assert [batch.batch_id for batch in (*first, *rest)] == made[::-1]
        with pytest.raises(NotFound):
            await desk.page(SEARCH, "batch_none", 2)

    async def test_have_a_limited_number_of_open_batches(
        self, desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(line_journal, "OPEN_MAX", 1)
        batch = await created(desk, lines(1), SEARCH)
        with pytest.raises(Overloaded):
            await created(desk, lines(1), SEARCH)
        await created(desk, lines(1))
        await desk.journal.retire(batch.batch_id, "search")
        await created(desk, lines(1), SEARCH)


async def test_everything_in_redis_has_an_end(desk: BatchDesk, registry: Registry) -> None:
    batch = await running(desk, 3)
    claims = await desk.journal.claim(batch.batch_id, "a", 2)
    await desk.journal.commit(batch.batch_id, "p", claims[:1], LineCounts(num_completed=1))
    keys = await registry.ask(registry.register_script("return redis.call('KEYS', 'or:*')")(keys=[], args=[]))
    keys += await registry.ask(registry.register_script("return redis.call('KEYS', '{or:batch*')")(keys=[], args=[]))
    ttl = registry.register_script("return redis.call('PTTL', KEYS[1])")
    lasting = [key for key in keys if int(await registry.ask(ttl(keys=[key], args=[]))) < 0]
    # Those are bounded: by open batches, by a tenant's files, and by what is stored.
    assert sorted(lasting) == ["or:batches:active", "or:files:of:", "or:files:sizes:", "or:files:stored"]
    assert isinstance(desk.journal, LineJournal)
