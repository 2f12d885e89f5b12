"""Which worker gets a request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from coordinator.routing import Router, WorkerKey, key_of
from outrider.worker_record import Snapshot, WorkerRecord
from tests.coordinator.fakes import record_of

FINGERPRINT = "0123456789abcdef"


def router(*names: str) -> Router:
    return Router(FINGERPRINT, names, random.Random(0), quarantine_s=3.0)


def target(number: int, **changes: Any) -> WorkerRecord:
    return record_of("target", f"127.0.0.1:{7000 + number}", FINGERPRINT, **changes)


def draft(number: int, **changes: Any) -> WorkerRecord:
    return record_of("draft", f"127.0.0.1:{8000 + number}", FINGERPRINT, **changes)


def pick(
    made: Router,
    *workers: WorkerRecord,
    num_tokens: int = 10,
    excluded: Collection[WorkerKey] = (),
    now_s: float = 0.0,
) -> WorkerRecord | None:
    ranked = made.rank_targets(
        Snapshot(targets=workers), now_s, model="demo", num_tokens=num_tokens, excluded=excluded
    )
    return ranked[0] if ranked else None


def test_no_workers_means_none() -> None:
    assert pick(router()) is None


def test_the_less_loaded_of_two_is_picked() -> None:
    busy, idle = target(0, num_running=3, num_waiting=1), target(1, num_running=3)
    assert all(pick(router(), busy, idle) == idle for _ in range(20))


def test_load_is_relative_to_size() -> None:
    small, large = target(0, num_running=2, max_num_seqs=2), target(1, num_running=4, max_num_seqs=16)
    assert pick(router(), small, large) == large


def test_sessions_opened_since_the_last_heartbeat_count() -> None:
    made, first, second = router(), target(0), target(1)
    picked = []
    for _ in range(6):
        worker = pick(made, first, second)
        assert worker is not None
        made.open_session(worker)
        picked.append(worker)
    assert Counter(worker.worker_id for worker in picked) == {first.worker_id: 3, second.worker_id: 3}
    for worker in picked:
        made.close_session(worker)
    assert pick(made, target(2, num_running=1), first) == first


def test_equals_share_the_work() -> None:
    made, workers = router(), [target(number) for number in range(4)]
    counts = Counter(worker.worker_id for _ in range(400) if (worker := pick(made, *workers)) is not None)
    assert min(counts.values()) > 50


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_fingerprint": "f" * 16}, "f" * 16),
        ({"state": "draining"}, "draining"),
        ({"model_name": "other"}, "'other'"),
    ],
)
def test_a_worker_that_does_not_fit_is_passed_over_and_reported(changes: dict[str, Any], reason: str) -> None:
    made, odd = router("demo"), target(0, **changes)
    assert pick(made, odd) is None
    usable, (excluded,) = made.usable([odd, target(1)], 0.0)
    assert usable == [target(1)]
    assert excluded.worker_id == odd.worker_id
    assert reason in excluded.reason


def test_a_mismatch_of_tokenizers_shows_both_fingerprints() -> None:
    _, (excluded,) = router().usable([draft(0, tokenizer_fingerprint="f" * 16)], 0.0)
    assert FINGERPRINT in excluded.reason
    assert "f" * 16 in excluded.reason


def test_a_draft_may_have_a_model_name_of_its_own() -> None:
    small = draft(0, model_name="draft-of-demo")
    assert router("demo").rank_drafts(Snapshot(drafts=(small,)), 0.0, num_tokens=10, excluded=()) == [small]


def test_a_full_draft_worker_is_not_asked() -> None:
    full = draft(0, num_running=8)
    assert not router().rank_drafts(Snapshot(drafts=(full,)), 0.0, num_tokens=10, excluded=())


def test_a_context_that_does_not_fit_goes_elsewhere() -> None:
    short, long = target(0, max_model_len=100), target(1, max_model_len=1000, num_running=7)
    assert pick(router(), short, long, num_tokens=500) == long
    assert pick(router(), short, num_tokens=500) is None


def test_workers_already_tried_are_excluded() -> None:
    first, second = target(0), target(1)
    assert pick(router(), first, second, excluded={key_of(first)}) == second


def test_a_worker_that_failed_is_left_alone_for_a_while() -> None:
    made, worker = router(), target(0)
    made.pass_over(worker, now_s=10.0)
    assert pick(made, worker, now_s=12.9) is None
    assert pick(made, worker, now_s=13.0) == worker


def test_a_draft_worker_that_keeps_failing_is_left_alone_for_longer_until_it_is_of_use() -> None:
    made, worker, now_s = router(), draft(0), 0.0
    waits = []
    for _ in range(7):
        made.pass_over(worker, now_s)
        made.pass_over(worker, now_s + 0.1)  # another session that notices the same
        began_s = now_s
        while not made.rank_drafts(Snapshot(drafts=(worker,)), now_s, num_tokens=10, excluded=()):
            now_s += 0.5
        waits.append(now_s - began_s)
    assert waits == [3, 6, 12, 24, 48, 48, 48]
    made.has_served(worker)
    made.pass_over(worker, now_s)
    assert made.rank_drafts(Snapshot(drafts=(worker,)), now_s + 3.0, num_tokens=10, excluded=()) == [worker]


def test_failures_of_long_ago_are_forgotten() -> None:
    made = router()
    for number in range(100):
        made.pass_over(draft(number), now_s=1000.0 * number)
    assert len(made._passed_over_until_s) == len(made._num_failures) == 1


def test_a_restart_clears_the_sheet() -> None:
    made, worker = router(), target(0)
    made.pass_over(worker, now_s=10.0)
    assert pick(made, target(0, incarnation="2"), now_s=10.1) is not None


def test_all_are_ranked_and_what_everybody_reserved_counts() -> None:
    workers = tuple(target(number, incarnation=str(number)) for number in range(5))
    reserved = {str(number): number for number in range(5)}
    ranked = router().rank_targets(
        Snapshot(workers, num_reserved=reserved), 0.0, model="demo", num_tokens=1, excluded=()
    )
    assert sorted(ranked, key=workers.index) == list(workers)
    numbers = [int(worker.incarnation) for worker in ranked]
    assert numbers[0] < numbers[1], "the less loaded of two"
    assert numbers[2:] == sorted(numbers[2:])


def test_models_are_those_of_usable_targets() -> None:
    snapshot = Snapshot(
        targets=(target(0), target(1, model_name="b"), target(2, model_name="c", state="draining"))
    )
    assert sorted(router().models(snapshot, 0.0)) == ["b", "demo"]
    assert sorted(router("demo", "c").models(snapshot, 0.0)) == ["demo"]
