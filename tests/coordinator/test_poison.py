"""What is remembered of requests that bring workers down, and whom their neighbours are kept apart from."""

from __future__ import annotations

from coordinator.poison import (
    AGAIN_AFTER_S,
    CONVICTED_S,
    CONVICTIONS_MAX,
    LIVES_MAX,
    SUSPECTS_MAX,
    PoisonRecord,
    Trials,
)
from tests.coordinator.fakes import record_of


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
        record.suspect("a", {("t1", "1")}, 0.0)
        record.suspect("a", {("t1", "1")}, 1.0)
        assert record.num_killed("a", 2.0) == 1
        record.suspect("a", {("t1", "2"), ("t2", "1")}, 2.0)
        assert record.num_killed("a", 3.0) == 3
        assert record.num_killed("b", 3.0) == 0
        assert record.time_left_s("a", 3.0) == 0, "nobody is refused by that"
        assert record.convicted(3.0) == []
        assert record.acquit("a")
        assert record.num_killed("a", 3.0) == 0

    def test_they_are_forgotten_after_a_while_and_beyond_a_number_of_prompts(self) -> None:
        record = PoisonRecord()
        record.suspect("a", {("t1", "1")}, 0.0)
        assert record.num_killed("a", CONVICTED_S) == 0
        record.suspect("a", {("t2", "1")}, CONVICTED_S)
        assert record.num_killed("a", CONVICTED_S) == 1
        record.suspect("a", set(), CONVICTED_S + 1.0)
        assert record.num_killed("a", 2 * CONVICTED_S) == 1, "it was sent again"
        assert record.convicted(2 * CONVICTED_S + 1.0) == []
        assert not record
        for number in range(SUSPECTS_MAX + 1):
            record.suspect(str(number), {(f"t{number}-{life}", "1") for life in range(LIVES_MAX + 1)}, 0.0)
        assert len(record) == SUSPECTS_MAX
        assert record.num_killed("0", 0.0) == 0
        assert record.num_killed("1", 0.0) == LIVES_MAX


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
