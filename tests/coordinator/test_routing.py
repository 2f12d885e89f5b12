"""Which worker gets a request."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from coordinator.placement.routing import (
    FOLLOWED_MIN,
    FULL_S,
    LOAD_BOUND,
    ModelKey,
    Router,
    WorkerKey,
    key_of,
    prefix_key,
)
from outrider.registry.worker_record import MEMORY, Snapshot, WorkerRecord
from tests.coordinator.fakes import model_table, record_of

FINGERPRINT = "0123456789abcdef"
MODEL = ModelKey("demo", FINGERPRINT)


def router(*names: str) -> Router:
    return Router(model_table(FINGERPRINT, *names).reason_against, random.Random(0), quarantine_s=3.0)


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
    ranked = made.rank_targets(Snapshot(targets=workers), now_s, model=MODEL, num_tokens=num_tokens, excluded=excluded)
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
    assert router("demo").rank_drafts(Snapshot(drafts=(small,)), 0.0, num_known=1, num_tokens=10, excluded=()) == [
        small
    ]


def test_a_memory_worker_comes_after_draft_workers_that_are_busy_or_far() -> None:
    memory = draft(0, engine=MEMORY)
    busy, far = draft(1, num_running=7), draft(2, zone="elsewhere")
    target_here = target(0, zone="here")
    told: dict[str, Any] = {"num_known": 1, "num_tokens": 10, "excluded": (), "target": target_here}
    assert router().rank_drafts(Snapshot(drafts=(memory, busy, far)), 0.0, **told) == [far, busy, memory]
    assert router().rank_drafts(Snapshot(drafts=(memory,)), 0.0, **told) == [memory]


def test_a_full_draft_worker_is_not_asked() -> None:
    full = draft(0, num_running=8)
    assert not router().rank_drafts(Snapshot(drafts=(full,)), 0.0, num_known=1, num_tokens=10, excluded=())


def test_a_draft_worker_of_short_context_is_used_as_far_as_it_can_follow() -> None:
    """A client that sends no `max_tokens` asks for the rest of the target's context."""
    short, long = draft(0, max_model_len=1024), draft(1, max_model_len=8192, zone="elsewhere")
    told: dict[str, Any] = {"num_tokens": 8192, "excluded": (), "target": target(0, zone="here")}
    both = Snapshot(drafts=(short, long))
    assert router().rank_drafts(both, 0.0, num_known=100, **told) == [long, short]
    assert router().rank_drafts(Snapshot(drafts=(short,)), 0.0, num_known=100, **told) == [short]
    at_its_limit = 1024 - FOLLOWED_MIN
    assert router().rank_drafts(Snapshot(drafts=(short,)), 0.0, num_known=at_its_limit, **told) == [short]
    assert router().rank_drafts(both, 0.0, num_known=at_its_limit + 1, **told) == [long]
    assert router().rank_drafts(both, 0.0, num_known=2000, **told) == [long]


def test_a_draft_worker_follows_a_sequence_that_ends_within_its_context_however_little_is_left() -> None:
    short = Snapshot(drafts=(draft(0, max_model_len=1024),))
    assert router().rank_drafts(short, 0.0, num_known=1020, num_tokens=1024, excluded=())
    assert not router().rank_drafts(short, 0.0, num_known=1020, num_tokens=1025, excluded=())


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
        while not made.rank_drafts(Snapshot(drafts=(worker,)), now_s, num_known=1, num_tokens=10, excluded=()):
            now_s += 0.5
        waits.append(now_s - began_s)
    assert waits == [3, 6, 12, 24, 48, 48, 48]
    made.has_served(worker)
    made.pass_over(worker, now_s)
    assert made.rank_drafts(Snapshot(drafts=(worker,)), now_s + 3.0, num_known=1, num_tokens=10, excluded=()) == [
        worker
    ]


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
        Snapshot(workers, num_reserved=reserved), 0.0, model=MODEL, num_tokens=1, excluded=()
    )
    assert sorted(ranked, key=workers.index) == list(workers)
    numbers = [int(worker.incarnation) for worker in ranked]
    assert numbers[0] < numbers[1], "the less loaded of two"
    assert numbers[2:] == sorted(numbers[2:])


def test_models_are_those_of_usable_targets() -> None:
    snapshot = Snapshot(targets=(target(0), target(1, model_name="b"), target(2, model_name="c", state="draining")))
    assert sorted(router().models(snapshot, 0.0)) == ["b", "demo"]
    assert sorted(router("demo", "c").models(snapshot, 0.0)) == ["demo"]


def test_a_model_none_of_whose_targets_answered_is_still_served() -> None:
    made, first, second, third = router(), target(0), target(1), target(2, state="draining")
    snapshot = Snapshot(targets=(first, second, third))
    made.pass_over(first, now_s=10.0)
    assert made.models(snapshot, 11.0) == {"demo": [second]}
    made.pass_over(second, now_s=11.0)
    assert made.models(snapshot, 12.0) == {"demo": [first, second]}
    assert pick(made, first, second, now_s=12.0) is None
    assert made.expects_target(snapshot, model=MODEL, num_tokens=10, excluded={key_of(first)})
    for model, num_tokens, excluded in (
        (MODEL, 10, {key_of(first), key_of(second)}),
        (MODEL._replace(name="another"), 10, set()),
        (MODEL._replace(tokenizer_fingerprint="f" * 16), 10, set()),
        (MODEL, 10**9, set()),
    ):
        assert not made.expects_target(snapshot, model=model, num_tokens=num_tokens, excluded=excluded)


PROMPT = tuple(range(200))


def homes(made: Router, workers: list[WorkerRecord], prompts: list[tuple[int, ...]]) -> list[str]:
    snapshot = Snapshot(targets=tuple(workers))
    return [
        made.rank_targets(
            snapshot, 0.0, model=MODEL, num_tokens=10, excluded=(), prefix=prefix_key(prompt)
        )[0].worker_id
        for prompt in prompts
    ]  # fmt: skip


class TestPrefixAffinity:
    workers = [target(number) for number in range(8)]  # noqa: RUF012

    def test_prompts_that_begin_alike_have_one_key(self) -> None:
        assert prefix_key(PROMPT) == prefix_key((*PROMPT[:128], 7, 8, 9))
        assert prefix_key(PROMPT) != prefix_key((*PROMPT[:127], 7, *PROMPT[128:]))

    def test_short_prompts_have_none(self) -> None:
        assert prefix_key(PROMPT[:31]) is None
        assert prefix_key(PROMPT[:32]) is not None

    def test_a_prompt_that_grows_changes_its_key_rarely(self) -> None:
        assert len({prefix_key(PROMPT[:length]) for length in range(32, 200)}) == 3

    def test_every_replica_sends_a_prefix_to_the_same_target(self) -> None:
        found = {
            home
            for seed in range(20)
            for home in homes(Router(lambda _: None, random.Random(seed), 3.0), self.workers, [PROMPT])
        }
        assert len(found) == 1

    def test_prefixes_spread_over_the_targets(self) -> None:
        prompts = [tuple(range(start, start + 40)) for start in range(800)]
        counts = Counter(homes(router(), self.workers, prompts))
        assert len(counts) == 8
        assert min(counts.values()) > 60, "of 100 each; below 60 once in 10^5"

    def test_a_target_that_comes_or_goes_moves_only_its_own_share(self) -> None:
        prompts = [tuple(range(start, start + 40)) for start in range(800)]
        before, after = homes(router(), self.workers, prompts), homes(router(), self.workers[1:], prompts)
        moved = {was for was, now in zip(before, after, strict=True) if was != now}
        assert moved == {self.workers[0].worker_id}

    def test_a_home_that_is_much_busier_than_the_rest_is_passed_over(self) -> None:
        (home,) = homes(router(), self.workers, [PROMPT])
        busy = [replace(worker, num_running=4) if worker.worker_id == home else worker for worker in self.workers]
        assert homes(router(), busy, [PROMPT]) != [home]
        rest = [replace(worker, num_running=4) for worker in self.workers]
        assert homes(router(), rest, [PROMPT]) == [home], "as busy as everybody"

    def test_one_prefix_that_everybody_sends_does_not_pile_up(self) -> None:
        made = router()
        for _ in range(32):
            (home,) = homes(made, self.workers, [PROMPT])
            made.open_session(next(worker for worker in self.workers if worker.worker_id == home))
        loads = [made._num_open[key_of(worker)] for worker in self.workers]
        assert max(loads) <= math.ceil(LOAD_BOUND * 32 / 8) + 1

    def test_a_target_with_a_queue_is_nobodys_home(self) -> None:
        (home,) = homes(router(), self.workers, [PROMPT])
        waiting = [replace(worker, wait_ms=500) if worker.worker_id == home else worker for worker in self.workers]
        assert homes(router(), waiting, [PROMPT]) != [home]


def test_of_two_targets_the_one_with_the_shorter_wait_is_picked() -> None:
    slow, quick = target(0, num_running=1, wait_ms=900), target(1, num_running=7, wait_ms=100)
    assert all(pick(router(), slow, quick) == quick for _ in range(20))


def test_a_few_texts_wait_at_the_target_and_one_that_has_begun_finds_the_whole_queue_open() -> None:
    made, worker = router(), target(0, max_num_seqs=16, max_num_waiting=64)
    assert made.slot_limit(worker) == 18
    assert made.slot_limit(worker, is_urgent=True) == 80
    assert made.slot_limit(target(0, max_num_seqs=1, max_num_waiting=64)) == 2
    assert made.slot_limit(worker, is_background=True) == 14
    assert made.slot_limit(target(0, max_num_seqs=1), is_background=True) == 1
    for _ in range(18):
        assert made.may_ask(worker, 0.0)
        made.open_session(worker)
    assert not made.may_ask(worker, 0.0)
    assert made.may_ask(worker, 0.0, is_urgent=True)


class TestBackground:
    """Sequences of batches make room at the worker, so that they are no load to others."""

    def test_they_leave_a_target_as_free_as_it_was(self) -> None:
        made = router()
        busy, idle = target(0, num_running=7, num_background=7), target(1, num_running=1)
        assert pick(made, busy, idle) == busy
        assert made.slot_limit(busy) == made.slot_limit(idle) + 7
        assert made.slot_limit(busy, is_background=True) == made.slot_limit(idle, is_background=True) == 7

    def test_nor_do_they_keep_others_from_a_draft_worker(self) -> None:
        full = draft(0, num_running=8, num_background=6)
        snapshot = Snapshot(drafts=(full,), num_reserved={full.incarnation: 8})
        assert router().rank_drafts(snapshot, 0.0, num_known=1, num_tokens=10, excluded=()) == [full]
        assert not router().rank_drafts(snapshot, 0.0, num_known=1, num_tokens=10, excluded=(), is_background=True)

    def test_at_a_draft_worker_they_leave_slots_free(self) -> None:
        for num_running, has_room in ((6, True), (7, False)):
            snapshot = Snapshot(drafts=(draft(0, num_running=num_running),))
            found = router().rank_drafts(snapshot, 0.0, num_known=1, num_tokens=10, excluded=(), is_background=True)
            assert bool(found) is has_room


def test_a_target_that_said_it_is_full_is_left_alone_for_a_moment() -> None:
    made, worker = router(), target(0)
    made.note_full(worker, 10.0)
    assert not made.may_ask(worker, 10.0 + FULL_S / 2)
    assert not made.may_ask(worker, 10.0 + FULL_S / 2, is_urgent=True)
    assert made.may_ask(worker, 10.0 + FULL_S)


class TestDraftChoice:
    def ranked(self, made: Router, target: WorkerRecord, *drafts: WorkerRecord) -> list[WorkerRecord]:
        snapshot = Snapshot(drafts=drafts)
        return made.rank_drafts(snapshot, 0.0, num_known=1, num_tokens=10, excluded=(), target=target)

    def test_the_nearest_by_measurement_comes_first(self) -> None:
        here = target(0)
        far = draft(0, round_trips=f"{here.address}=40000")
        near = draft(1, round_trips=f"127.0.0.1:1=90000 {here.address}=300")
        middle = draft(2, round_trips=f"{here.address}=5000", num_running=1)
        assert self.ranked(router(), here, far, near, middle) == [near, middle, far]

    def test_zones_stand_in_for_what_was_not_measured(self) -> None:
        here = target(0, zone="a")
        elsewhere, same = draft(0, zone="b"), draft(1, zone="a", num_running=3)
        assert self.ranked(router(), here, elsewhere, same) == [same, elsewhere]
        assert set(map(key_of, self.ranked(router(), target(0), elsewhere, same))) == {
            key_of(elsewhere),
            key_of(same),
        }

    def test_a_busy_one_nearby_comes_after_an_idle_one_further_away(self) -> None:
        here = target(0, zone="a")
        busy, idle = draft(0, zone="a", num_running=7), draft(1, zone="b")
        assert self.ranked(router(), here, busy, idle) == [idle, busy]

    def test_one_with_a_draft_head_goes_to_targets_that_keep_features_for_it_alone(self) -> None:
        model, head = draft(0), draft(1, head_fingerprint="a")
        made = router()
        for kept, expected in (("a", {model, head}), ("b", {model}), ("", {model})):
            here = target(0, head_fingerprint=kept)
            assert set(map(key_of, self.ranked(made, here, model, head))) == set(map(key_of, expected))

    def test_nonsense_in_the_record_counts_as_nothing(self) -> None:
        here = target(0)
        odd = draft(0, round_trips=f"{here.address}=soon = x=1=2 \x00=3 {here.address}=-4")
        assert self.ranked(router(), here, odd) == [odd]

    def test_one_that_failed_is_tried_by_one_session_until_it_has_been_of_use(self) -> None:
        made, here, worker = router(), target(0), draft(0)
        made.pass_over(worker, 0.0)
        snapshot = Snapshot(drafts=(worker,))

        def usable() -> bool:
            return bool(made.rank_drafts(snapshot, 100.0, num_known=1, num_tokens=10, excluded=(), target=here))

        assert usable()
        made.open_session(worker)
        assert not usable()
        made.has_served(worker)
        assert usable()
