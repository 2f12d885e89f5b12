"""A check or a finalization leaves nothing in the storage if it is cancelled, or if an answer of Redis is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator.access.api_keys import ANYBODY
from coordinator.batches import batch_results
from coordinator.batches.batch import Batch, BatchState
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.batch_runner import BatchRunner
from coordinator.batches.batch_tasks import BatchTasks
from coordinator.batches.file_store import FolderStore
from coordinator.batches.line_journal import Claim
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import EchoLines, created, desk_over, lines, names_in, results, until
from tests.coordinator.fakes import eventually


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_results, "WAIT_S", 0.05)
    monkeypatch.setattr(batch_results, "LOOK_S", 0.02)


@pytest.fixture
def desk(registry: Registry, tmp_path: Path) -> BatchDesk:
    return desk_over(registry, tmp_path, lease_s=0.5)


def over(batch: Batch) -> bool:
    return batch.is_over


class LostMove:
    """Changes of a batch's state, of which the first to one state fails before or after it is made."""

    def __init__(self, desk: BatchDesk, state: BatchState, *, is_made: bool) -> None:
        self.num_left = 1
        self._move, self._state, self._is_made = desk.journal.move, state, is_made

    async def __call__(self, batch_id: str, state: BatchState, *rest: Any, **named: Any) -> None:
        if state is not self._state or not self.num_left:
            await self._move(batch_id, state, *rest, **named)
            return
        self.num_left -= 1
        if self._is_made:
            await self._move(batch_id, state, *rest, **named)
        raise RegistryUnavailable("the answer is lost")


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("state", [BatchState.IN_PROGRESS, BatchState.COMPLETED])
async def test_a_lost_answer_leaves_no_content_behind(
    desk: BatchDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: BatchState, is_made: bool
) -> None:
    lost = LostMove(desk, state, is_made=is_made)
    monkeypatch.setattr(desk.journal, "move", lost)
    batch = await created(desk, lines(3))
    async with BatchRunner(desk, EchoLines(), poll_s=0.05):
        done = await until(desk, batch, over)
        await eventually(lambda: len(names_in(tmp_path)) == 2, "its file and its output are left", 30)
    assert not lost.num_left
    assert (done.state, done.counts.num_completed) == (BatchState.COMPLETED, 3)
    assert len(await results(desk, done.output_file_id)) == 3


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_check_that_is_cancelled_while_it_begins_the_lines_keeps_what_the_record_names(
    desk: BatchDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Whether the batch begins or is cancelled first."""
    move, is_moving, may_move = desk.journal.move, asyncio.Event(), asyncio.Event()

    async def slow(batch_id: str, state: BatchState, *rest: Any, **named: Any) -> None:
        if state is BatchState.IN_PROGRESS:
            is_moving.set()
            await may_move.wait()
        await move(batch_id, state, *rest, **named)

    monkeypatch.setattr(desk.journal, "move", slow)
    batch = await created(desk, lines(3))
    tasks = BatchTasks(desk, EchoLines(), "this one")
    tasks.begin(batch)
    await is_moving.wait()
    closing = asyncio.create_task(tasks.close())
    (_, checking), *_ = tasks._tasks.values()
    await eventually(lambda: checking.cancelling() > 0, "the check is cancelled", 30)
    if not is_first:
        await desk.cancel(ANYBODY, batch.batch_id)
    may_move.set()
    await closing
    now = await desk.journal.get(batch.batch_id)
    assert now is not None
    assert now.state is (BatchState.IN_PROGRESS if is_first else BatchState.CANCELLING)
    file = await desk.files.get(None, batch.input_file_id)
    assert names_in(tmp_path) == {name for name in (file.content, now.input_content, now.index_content) if name}


async def test_a_check_is_cancelled_once_and_deletes_its_copy_in_peace(registry: Registry, tmp_path: Path) -> None:
    may_check, has_begun = threading.Event(), threading.Event()
    is_deleting, may_delete = asyncio.Event(), asyncio.Event()

    class Lines(EchoLines):
        def check_body(self, batch: Batch, url: str, body: bytes) -> None:
            has_begun.set()
            assert may_check.wait(30)

    class Store(FolderStore):
        async def delete(self, name: str) -> None:
            is_deleting.set()
            await may_delete.wait()
            await super().delete(name)

    desk = desk_over(registry, tmp_path, store=Store(tmp_path))
    batch = await created(desk, lines(3))
    tasks = BatchTasks(desk, Lines(), "this one")
    tasks.begin(batch)
    await eventually(has_begun.is_set, "the file is being checked", 30)
    cancelled = await desk.cancel(ANYBODY, batch.batch_id)
    tasks.begin(cancelled)
    may_check.set()
    await asyncio.wait_for(is_deleting.wait(), 30)
    (before,) = tasks._tasks.values()
    for _ in range(20):  # rounds
        tasks.begin(cancelled)
        await asyncio.sleep(0)
    assert list(tasks._tasks.values()) == [before], "nothing else begins for the batch meanwhile"
    may_delete.set()
    await eventually(lambda: not tasks._tasks, "it ends", 30)
    assert len(names_in(tmp_path)) == 1
    tasks.begin(cancelled)
    assert (await until(desk, batch, over)).state is BatchState.CANCELLED
    await tasks.close()


async def test_a_record_of_a_later_release_is_left_alone(
    desk: BatchDesk, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    batch = await created(desk, lines(3))
    script = registry.register_script("return redis.call('HSET', KEYS[1], unpack(ARGV))")

    async def write(**fields: str) -> None:
        told = [part for pair in fields.items() for part in pair]
        await registry.ask(script(keys=[f"{{or:batch:{batch.batch_id}}}:batch"], args=told))

    about = batch.to_fields()["about"]
    await write(state="in_progress", num_lines="3")
    assert await desk.journal.claim(batch.batch_id, "of a later release", 2)
    await write(about=json.dumps(json.loads(about) | {"unheard_of": 1}))
    assert await desk.journal.get(batch.batch_id) is None

    def num_told() -> int:
        return sum("cannot be read" in record.message for record in caplog.records)

    with caplog.at_level(logging.ERROR):
        async with BatchRunner(desk, EchoLines(), poll_s=0.02):
            await eventually(lambda: num_told() > 0, "it says so", 30)
            other = await created(desk, lines(3))
            assert (await until(desk, other, over)).counts.num_completed == 3, "others run"
    assert num_told() == 1, "once, not in every round"
    assert batch.batch_id in await desk.journal.active()
    assert await desk.journal.renew(batch.batch_id, [_claimed(number) for number in (0, 1)]) == set()


async def test_a_batch_without_a_record_is_retired(desk: BatchDesk, registry: Registry) -> None:
    batch = await created(desk, lines(3))
    script = registry.register_script("return redis.call('DEL', KEYS[1])")
    await registry.ask(script(keys=[f"{{or:batch:{batch.batch_id}}}:batch"], args=[]))
    async with BatchRunner(desk, EchoLines(), poll_s=0.02):
        for _ in range(500):
            if not await desk.journal.active():
                break
            await asyncio.sleep(0.02)
    assert await desk.journal.active() == []


def _claimed(line: int) -> Claim:
    return Claim(line, "of a later release", 1)
