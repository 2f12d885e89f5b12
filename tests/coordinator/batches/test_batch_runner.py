"""Batches from their file to their output, over a real Redis and a folder, with a service that answers at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.access.api_keys import ANYBODY
from coordinator.batches import batch_results
from coordinator.batches.batch import Batch, BatchState
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.batch_runner import BatchRunner
from coordinator.observability.metrics import CoordinatorMetrics
from outrider.errors import InvalidRequest, Overloaded, Unavailable, WorkerLost
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import EchoLines, created, desk_over, line, lines, names_in, results, until
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


async def cleared(desk: BatchDesk) -> None:
    """Waits until batches that are over have left nothing but their files."""
    for _ in range(500):
        if not await desk.journal.active():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still there: {await desk.journal.active()}")


def runner_of(desk: BatchDesk, service: EchoLines) -> BatchRunner:
    return BatchRunner(desk, service, poll_s=0.05)


async def test_a_replica_exports_how_far_batches_are(desk: BatchDesk) -> None:
    service, metrics = EchoLines(room=3, fail={"r0": [InvalidRequest(None, "wrong")]}), CoordinatorMetrics()

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"outrider_{name}", labels) or 0.0

    service.gate.clear()
    batch = await created(desk, lines(10))
    async with BatchRunner(desk, service, metrics, poll_s=0.05):
        await eventually(lambda: value("batch_lines_running") == 3, "three lines run")
        await eventually(lambda: value("batch_lines_left") == 10, "ten are left")
        assert (value("batches_open"), value("batches_degraded")) == (1, 0)
        service.gate.set()
        await until(desk, batch, over)
        await eventually(lambda: value("batches_open") == 0, "the batch is over")
    assert (value("batch_lines_total", result="completed"), value("batch_lines_total", result="failed")) == (9, 1)
    assert (value("batch_lines_running"), value("batch_lines_left")) == (0, 0)


async def test_every_line_is_answered_once(desk: BatchDesk, tmp_path: Path) -> None:
    service = EchoLines()
    batch = await created(desk, lines(40))
    async with runner_of(desk, service):
        done = await until(desk, batch, over)
        await cleared(desk)
    assert (done.state, done.counts.num_completed, done.counts.num_failed) == (BatchState.COMPLETED, 40, 0)
    answers = await results(desk, done.output_file_id)
    assert sorted(each["custom_id"] for each in answers) == sorted(f"r{number}" for number in range(40))
    assert all(each["response"]["body"] == {"text": each["custom_id"]} for each in answers)
    assert done.error_file_id is None
    assert service.most <= service.num_room
    # The input and the output remain, and nothing else.
    assert len(names_in(tmp_path)) == 2


async def test_nothing_runs_of_a_file_with_one_wrong_line(desk: BatchDesk, tmp_path: Path) -> None:
    service = EchoLines()
    batch = await created(desk, lines(3) + line("bad", body={}))
    async with runner_of(desk, service):
        done = await until(desk, batch, over)
    assert done.state is BatchState.FAILED
    assert [(each["line"], each["param"]) for each in done.errors] == [(4, "prompt")]
    assert not service.runs
    assert len(names_in(tmp_path)) == 1


async def test_a_line_that_fails_is_in_the_file_of_errors(desk: BatchDesk) -> None:
    fail: Mapping[str, list[Exception]] = {
        "r1": [InvalidRequest("prompt", "too long")],
        "r2": [Overloaded("full", 0.05)] * 3,
        "r3": [WorkerLost("lost", 0.05)] * 3,
        "r4": [ValueError("a bug")],
    }
    batch = await created(desk, lines(5))
    async with runner_of(desk, EchoLines(fail=fail)):
        done = await until(desk, batch, over)
    assert (done.state, done.counts.num_completed, done.counts.num_failed) == (BatchState.COMPLETED, 2, 3)
    assert {each["custom_id"] for each in await results(desk, done.output_file_id)} == {"r0", "r2"}
    statuses = {each["custom_id"]: each["response"]["status_code"] for each in await results(desk, done.error_file_id)}
    assert statuses == {"r1": 400, "r3": 503, "r4": 500}


async def test_the_owner_may_delete_the_file_once_it_is_checked(desk: BatchDesk) -> None:
    service = EchoLines()
    service.gate.clear()
    batch = await created(desk, lines(3))
    async with runner_of(desk, service):
        await until(desk, batch, lambda found: found.state is BatchState.IN_PROGRESS)
        await desk.files.delete(ANYBODY, batch.input_file_id)
        service.gate.set()
        done = await until(desk, batch, over)
    assert done.counts.num_completed == 3


async def test_a_file_that_is_gone_fails_the_batch(desk: BatchDesk) -> None:
    batch = await created(desk, lines(3))
    await desk.files.delete(ANYBODY, batch.input_file_id)
    async with runner_of(desk, EchoLines()):
        done = await until(desk, batch, over)
    assert [each["code"] for each in done.errors] == ["file_not_found"]


async def test_a_cancelled_batch_keeps_what_had_ended(desk: BatchDesk) -> None:
    service = EchoLines(room=2, delay_s=0.02)
    batch = await created(desk, lines(200))
    async with runner_of(desk, service):
        await until(desk, batch, lambda found: found.counts.num_completed > 0)
        await desk.cancel(ANYBODY, batch.batch_id)
        done = await until(desk, batch, over)
        num_runs = len(service.runs)
        await asyncio.sleep(0.2)
        assert len(service.runs) == num_runs, "nothing runs any more"
    assert done.state is BatchState.CANCELLED
    assert len(await results(desk, done.output_file_id)) == done.counts.num_completed < 200


async def test_a_batch_whose_time_is_up_names_the_lines_that_have_not_run(desk: BatchDesk) -> None:
    service = EchoLines(room=2, delay_s=0.05)
    file_of = await created(desk, lines(200))
    late = replace(file_of, batch_id="batch_late", expires_at=int(time.time()) + 2)
    await desk.cancel(ANYBODY, file_of.batch_id)
    await desk.journal.create(late)
    async with runner_of(desk, service):
        done = await until(desk, late, over)
    assert done.state is BatchState.EXPIRED
    output, errors = await results(desk, done.output_file_id), await results(desk, done.error_file_id)
    assert len(output) == done.counts.num_completed > 0
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert sorted(each["custom_id"] for each in (*output, *errors)) == sorted(f"r{number}" for number in range(200))


async def test_a_replica_that_leaves_gives_its_lines_back(desk: BatchDesk) -> None:
    slow = EchoLines()
    slow.gate.clear()
    batch = await created(desk, lines(4))
    async with runner_of(desk, slow):
        await until(desk, batch, lambda found: len(slow.runs) == 4)
    before_s = time.monotonic()
    async with runner_of(desk, EchoLines()):
        done = await until(desk, batch, over)
    assert done.counts.num_completed == 4
    assert time.monotonic() - before_s < 5


async def test_a_replica_that_stands_still_loses_its_lines_and_changes_nothing(desk: BatchDesk) -> None:
    slow, quick = EchoLines(room=4), EchoLines(room=4)
    slow.gate.clear()
    batch = await created(desk, lines(8))
    async with runner_of(desk, slow) as stopped:
        await until(desk, batch, lambda found: len(slow.runs) == 4)
        renewing = next(task for task in stopped._loops if task.get_name() == "renewing batches' leases")
        renewing.cancel()
        slow.num_room = 0
        async with runner_of(desk, quick):
            await until(desk, batch, lambda found: len(quick.runs) == 8)
            slow.gate.set()  # its late results come to nothing
            done = await until(desk, batch, over)
        stopped._loops.remove(renewing)
    answers = await results(desk, done.output_file_id)
    assert sorted(each["custom_id"] for each in answers) == [f"r{number}" for number in range(8)]


async def test_batches_share_the_room(desk: BatchDesk) -> None:
    service = EchoLines(room=4, delay_s=0.01)
    long, short = await created(desk, lines(300)), await created(desk, lines(10))
    async with runner_of(desk, service):
        await until(desk, short, over)
        assert not (await until(desk, long, lambda found: True)).is_over
        await desk.cancel(ANYBODY, long.batch_id)
        await until(desk, long, over)


async def test_a_batch_whose_model_has_no_target_holds_up_no_other(desk: BatchDesk) -> None:
    lines_max = 40
    service = EchoLines(
        room=4, fail={f"a{number}": [Unavailable("no target", 0.05)] * 9999 for number in range(lines_max)}
    )
    waiting = await created(desk, b"".join(line(f"a{number}") + b"\n" for number in range(lines_max)))
    async with runner_of(desk, service) as runner:
        await eventually(lambda: runner.num_running == 4, "it has all of the room")
        other = await created(desk, lines(10))
        done = await until(desk, other, over)
        assert done.counts.num_completed == 10
        assert runner.num_running <= 6, "what is kept for a batch is half of the room at most"
        await desk.cancel(ANYBODY, waiting.batch_id)
        await until(desk, waiting, over)


async def test_expired_files_are_deleted(desk: BatchDesk, tmp_path: Path) -> None:
    batch = await created(desk, lines(1))
    file = await desk.files.get(None, batch.input_file_id)
    await desk.files.announce(file.content, time.time() - 1)
    assert await desk.files.delete_due() == 1
    assert not names_in(tmp_path)
    assert json.loads(json.dumps(file.filename)) == "in.jsonl"
