"""An idle worker that has lost a block says so, seldom, and goes on."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from draft_worker.limits import DraftLimits
from draft_worker.runner import DraftCore
from draft_worker.scheduler import DraftScheduler
from outrider.engine.kv.idle_check import LOOK_EVERY_S, IdleCheck
from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.observability.telemetry import DraftMetrics, TargetMetrics
from target_worker.limits import SchedulerLimits
from target_worker.runner import TargetCore
from target_worker.scheduling.scheduler import Scheduler
from tests.draft_worker.test_scheduler import attach
from tests.target_worker.fakes import VOCAB_SIZE

ENGINE: Any = SimpleNamespace(idle=lambda: None)  # all that is asked of it


class Count:
    value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


def test_blocks_that_are_all_accounted_for_are_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    allocator, count = BlockAllocator(9, 4), Count()
    kv = KVSequence(allocator)
    kv.extend(20)
    kv.publish([b"a", b"b"], 0)
    kv.free()
    IdleCheck(allocator, count).look(0.0)
    assert count.value == 0
    assert not caplog.records


@pytest.mark.parametrize("damage", ["lost", "free twice", "kept for nothing"])
def test_what_is_wrong_is_told_and_counted_at_most_once_a_minute(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    allocator, count = BlockAllocator(9, 4), Count()
    match damage:
        case "lost":
            KVSequence(allocator).extend(3)
        case "free twice":
            allocator._free.append(allocator._free[0])
        case _:
            allocator._unused[allocator._free.pop()] = None
    check = IdleCheck(allocator, count)
    for now in (100.0, 100.0 + LOOK_EVERY_S / 2, 100.0 + 0.99 * LOOK_EVERY_S):
        check.look(now)
    assert count.value == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    check.look(100.0 + LOOK_EVERY_S)
    assert count.value == 2


def failures(metrics: TargetMetrics | DraftMetrics) -> float:
    value = metrics.registry.get_sample_value(
        "outrider_kv_cache_integrity_failures_total",
        dict(zip(("model_name", "engine"), metrics._values, strict=True)),
    )
    assert value is not None
    return value


def test_both_workers_look_when_they_have_nothing_to_do() -> None:
    target = Scheduler(SchedulerLimits(max_model_len=20), BlockAllocator(99, 4), VOCAB_SIZE)
    draft = DraftScheduler(DraftLimits(max_model_len=20), BlockAllocator(99, 4), VOCAB_SIZE)
    for core in (
        TargetCore(target, ENGINE, TargetMetrics("m", "t")),
        DraftCore(draft, ENGINE, DraftMetrics("m", "d")),
    ):
        assert failures(core._metrics) == 0
        core.scheduler.allocator.allocate()  # for nobody
        assert core.run_next(5.0) == ([], None)
        assert failures(core._metrics) == 1


def test_a_draft_worker_that_waits_for_commits_is_not_idle() -> None:
    draft = DraftScheduler(DraftLimits(max_model_len=20), BlockAllocator(99, 4), VOCAB_SIZE)
    core = DraftCore(draft, ENGINE, DraftMetrics("m", "d"))
    draft.handle(attach("a", (1,) * 19))  # as long as it can follow: it says nothing
    assert core.run_next(5.0) == ([], None)
    draft.allocator.allocate()
    assert core.run_next(6.0) == ([], None)
    assert failures(core._metrics) == 0
