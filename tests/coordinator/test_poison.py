"""What is remembered of requests that bring workers down, and whom their neighbours are kept apart from."""

from __future__ import annotations

from coordinator.poison import (
    AGAIN_AFTER_S,
    CONVICTED_S,
    CONVICTIONS_MAX,
    LIVES_MAX,
    LOSSES_MAX,
    SUSPECTS_MAX,
    PoisonRecord,
    Trials,
)
from coordinator.run_identity import Losses, RunIdentity
from tests.coordinator.fakes import record_of

LIVES = (("t1", "1"), ("t1", "2"), ("t2", "1"))


class TestRecord:
    def test_a_prompt_is_refused_for_a_while(self) -> None:
        record = PoisonRecord()
        record.convict("a", 10.0)
        assert record.time_left_s("a", 10.0) == CONVICTED_S
        assert record.time_left_s("b", 10.0) == 0
        assert record.convicted(10.0 + CONVICTED_S / 2) == ["a"]
        assert record.convicted(10.0 + CONVICTED_S) == []
        assert record.time_left_s("a", 10.0 + CONVICTED_S) == 0

    def test_whoever_completes_it_clears_it(self) -> None:
        record = PoisonRecord()
        record.convict("a", 0.0)
        assert record.acquit("a")
        assert not record.acquit("a")
        assert record.time_left_s("a", 1.0) == 0

    def test_the_latest_ones_are_remembered(self) -> None:
        record = PoisonRecord()
        for number in range(CONVICTIONS_MAX + 3):
            record.convict(str(number), 0.0)
        record.convict("3", 0.0)
        record.convict("new", 0.0)
        assert len(record) == CONVICTIONS_MAX
        assert record.time_left_s("3", 1.0) > 0
        assert record.time_left_s("4", 1.0) == 0

    def test_workers_that_runs_lost_before_they_ended_add_up(self) -> None:
        """Each counts once, however many runs it had."""
        record = PoisonRecord()
        record.suspect("a", {("t1", "1")}, 7, 0.0)
        record.suspect("a", {("t1", "1")}, 7, 1.0)
        assert record.losses("a", 2.0) == Losses(1, 7)
        record.suspect("a", {("t1", "2"), ("t2", "1")}, 7, 2.0)
        assert record.losses("a", 3.0).num == 3
        assert record.losses("b", 3.0).num == 0
        assert record.time_left_s("a", 3.0) == 0, "nobody is refused by that"
        assert record.convicted(3.0) == []
        assert record.acquit("a")
        assert record.losses("a", 3.0).num == 0

    def test_they_are_forgotten_after_a_while_and_beyond_a_number_of_prompts(self) -> None:
        record = PoisonRecord()
        record.suspect("a", {("t1", "1")}, 7, 0.0)
        assert record.losses("a", CONVICTED_S).num == 0
        record.suspect("a", {("t2", "1")}, 7, CONVICTED_S)
        assert record.losses("a", CONVICTED_S).num == 1
        record.suspect("a", set(), 7, CONVICTED_S + 1.0)
        assert record.losses("a", 2 * CONVICTED_S).num == 1, "it was sent again"
        assert record.convicted(2 * CONVICTED_S + 1.0) == []
        assert not record
        for number in range(SUSPECTS_MAX + 1):
            record.suspect(str(number), {(f"t{number}-{life}", "1") for life in range(LIVES_MAX + 1)}, 7, 0.0)
        assert len(record) == SUSPECTS_MAX
        assert record.losses("0", 0.0).num == 0
        assert record.losses("1", 0.0).num == LIVES_MAX

    def test_it_knows_which_workers_were_lost_and_since_when(self) -> None:
        record = PoisonRecord()
        for life, moment_s in zip(LIVES, (1.0, 2.0, 3.0), strict=True):
            record.note_loss(life, moment_s)
        record.note_loss(LIVES[0], 9.0)
        assert record.lost_since(2.0) == [*LIVES[1:]], "the first was lost once, before that"
        for number in range(LOSSES_MAX):
            record.note_loss(("t3", str(number)), 4.0)
        assert len(record.lost_since(0.0)) == LOSSES_MAX


def lost_to(run: RunIdentity, *lives: tuple[str, str], sequence: int = 0, is_gone: bool = True) -> None:
    for worker_id, incarnation in lives:
        target = record_of("target", "h:1", "f", worker_id=worker_id, incarnation=incarnation)
        run.lose(sequence, target, 0, is_gone=is_gone)


class TestForgiveness:
    def test_a_worker_that_is_forgiven_does_not_count_for_any_sequence(self) -> None:
        run = RunIdentity()
        lost_to(run, *LIVES)
        lost_to(run, LIVES[0], sequence=1)
        run.forgive_first()
        assert run.num_losses == 2
        assert run.killed == {*LIVES[1:]}
        assert run.was_lost_with(LIVES[0]), "though it does not count"

    def test_one_that_said_what_had_failed_is_not_forgiven(self) -> None:
        run = RunIdentity()
        lost_to(run, LIVES[0], is_gone=False)
        run.forgive_first()
        assert run.num_losses == 1

    def test_the_first_is_forgiven_first(self) -> None:
        run = RunIdentity()
        lost_to(run, LIVES[1], LIVES[0], LIVES[1])
        run.forgive_first()
        assert run.killed == {LIVES[0]}
        assert run.num_losses == 1

    def test_whoever_keeps_their_number_is_told(self) -> None:
        run, told = RunIdentity(), list[int]()
        run.on_loss = lambda: told.append(run.num_losses)
        lost_to(run, *LIVES[:2])
        run.forgive_first()
        assert told == [1, 2, 1]

    def test_what_was_lost_earlier_counts_as_far_as_it_may(self) -> None:
        run = RunIdentity()
        run.resume_with(Losses(1, 9))
        run.resume_with(Losses(3, 5))
        run.resume_with(Losses(2, 7))
        assert run.losses == (3, 5)
        run.discount_earlier(2)
        assert run.losses == (2, 5)
        lost_to(run, LIVES[0])
        assert run.losses == (3, 0), "this run had generated nothing there"
        run.discount_earlier(2)
        assert run.num_losses == 2
        lost_to(run, *LIVES[1:])
        run.discount_earlier(2)
        assert run.num_losses == 3, "its own"


def test_a_target_tries_one_run_at_a_time() -> None:
    trials, one, other = Trials(), record_of("target", "h:1", "f"), record_of("target", "h:2", "f")
    assert trials.may_begin(one, 0.0)
    trials.begin(one)
    assert not trials.may_begin(one, 0.0)
    assert trials.may_begin(other, 0.0)
    restarted = record_of("target", "h:1", "f", incarnation="2")
    assert trials.may_begin(restarted, 0.0)
    trials.end(one)
    trials.end(one)
    assert trials.may_begin(one, 0.0)


def test_a_target_that_tries_a_run_of_another_replica_is_asked_again_before_long() -> None:
    trials, one = Trials(), record_of("target", "h:1", "f")
    trials.refuse(one, 5.0)
    assert not trials.may_begin(one, 5.0)
    assert trials.may_begin(record_of("target", "h:2", "f"), 5.0)
    assert trials.may_begin(one, 5.0 + AGAIN_AFTER_S)
