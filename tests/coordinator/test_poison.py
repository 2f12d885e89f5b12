"""What is remembered of requests that bring workers down, and whom their neighbours are kept apart from."""

from __future__ import annotations

import math
from random import Random

import pytest

from coordinator.poison import (
    AGAIN_AFTER_S,
    CONVICTED_S,
    CONVICTIONS_MAX,
    LIVES_MAX,
    LOSSES_MAX,
    NOTED_MAX,
    NOTED_S,
    SUSPECTS_MAX,
    PoisonRecord,
    Trials,
    probability_of_at_least,
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


class Blamed:
    """Asks whether a run with the prompt "a" is to be ended, where a run may cost three workers."""

    def __init__(self, num_targets: int, num_sequences: int = 1) -> None:
        self.record = PoisonRecord()
        self.targets = {f"t{number}" for number in range(num_targets)}
        self.num_sequences = num_sequences

    def lose(self, life: str, prompt: str, now_s: float, model: str = "m", worker_id: str = "t0") -> None:
        gone = record_of("target", "h:1", "f", worker_id=worker_id, incarnation=life, model_name=model)
        self.record.note_loss(gone, prompt, now_s)

    def at(self, num_losses: int, now_s: float = 0.0, *, has_passed_trial: bool = False) -> bool:
        return self.record.blames(
            "a",
            num_losses,
            frozenset(),
            has_passed_trial=has_passed_trial,
            num_losses_max=3,
            num_sequences=self.num_sequences,
            targets=self.targets,
            model="m",
            now_s=now_s,
        )


class TestChance:
    def test_where_no_others_die_a_run_may_cost_three_workers(self) -> None:
        blamed = Blamed(4)
        for life in "123":
            blamed.lose(life, "a", 0.0)
        assert [blamed.at(number) for number in range(5)] == [False, False, False, True, True]

    def test_the_more_others_die_the_more_it_may(self) -> None:
        blamed = Blamed(4)
        ended_at = []
        for number in range(12):
            ended_at.append(next(losses for losses in range(20) if blamed.at(losses)))
            blamed.lose(f"other {number}", "b", 0.0)
        assert ended_at[:4] == [3, 5, 6, 6]
        assert ended_at == sorted(ended_at)
        assert ended_at[-1] == LOSSES_MAX, "whatever happens"

    @pytest.mark.parametrize(
        ("num_targets", "num_losses"), [(1, LOSSES_MAX), (2, LOSSES_MAX), (4, 5), (11, 3)]
    )
    def test_one_that_had_passed_its_trial_is_ended_when_hardly_any_chance_is_left(
        self, num_targets: int, num_losses: int
    ) -> None:
        blamed = Blamed(num_targets)
        assert blamed.at(3)
        assert not blamed.at(num_losses - 1, has_passed_trial=True)
        assert blamed.at(num_losses, has_passed_trial=True)

    def test_what_was_lost_with_a_prompt_that_others_complete_was_lost_to_something_else(self) -> None:
        blamed = Blamed(4)
        blamed.lose("1", "a", 0.0)
        assert blamed.at(3)
        blamed.record.acquit("a")
        assert not blamed.at(3)

    def test_in_a_large_fleet_three_losses_are_no_chance(self) -> None:
        blamed = Blamed(100)
        for number in range(5):
            blamed.lose(f"other {number}", "b", 0.0)
        assert blamed.at(3)

    def test_a_run_with_a_sequence_at_every_target_meets_whatever_dies(self) -> None:
        blamed = Blamed(4, num_sequences=4)
        for number, num_losses in enumerate((5, 7, LOSSES_MAX, LOSSES_MAX)):
            blamed.lose(str(number), "b", 0.0)
            assert not blamed.at(num_losses - 1)
            assert blamed.at(num_losses)

    @pytest.mark.parametrize(
        "loss",
        [("1", "a", 0.0), ("1", "b", -NOTED_S), ("1", "b", 0.0, "another model")],
        ids=["with the same prompt", "long ago", "of another model"],
    )
    def test_what_says_nothing_about_the_run_does_not_count_for_it(
        self, loss: tuple[str, str, float]
    ) -> None:
        blamed = Blamed(4)
        blamed.lose(*loss)
        assert blamed.at(3)

    def test_a_worker_that_had_its_prompt_and_others_was_lost_with_it(self) -> None:
        blamed = Blamed(4)
        blamed.lose("1", "b", 0.0)
        assert not blamed.at(3)
        blamed.lose("1", "a", 0.0)
        assert blamed.at(3)

    def test_innocent_runs_that_lose_three_are_seldom_ended(self) -> None:
        """5,000 runs of 90 seconds, where two of four targets are lost a minute, at random. The test is made anew at
        each loss, so its error rate is measured here: of the runs that lose three, fewer than 1 % are ended."""
        rng, num_with_three, num_ended = Random(1), 0, 0
        for _ in range(5000):
            blamed, num_own, now_s = Blamed(4), 0, -NOTED_S
            while (now_s := now_s + rng.expovariate(2 / 60)) < 90.0:
                is_own = now_s > 0 and rng.random() < 0.25
                num_own += is_own
                blamed.lose(str(now_s), "a" if is_own else "b", now_s)
                num_with_three += is_own and num_own == 3
                num_ended += is_own and blamed.at(num_own, now_s)
        assert num_with_three > 100
        assert num_ended < num_with_three / 100

    def test_no_more_losses_are_remembered_than_a_bound(self) -> None:
        blamed = Blamed(4)
        blamed.lose("first", "b", 0.0)
        for number in range(NOTED_MAX):
            blamed.lose(str(number), "a", 0.0)
        assert blamed.at(3), "the first one was forgotten"

    def test_the_probability_is_that_of_the_binomial_distribution(self) -> None:
        assert math.isclose(probability_of_at_least(3, 4, 0.25), 13 / 256)
        assert math.isclose(probability_of_at_least(0, 9, 0.3), 1.0)
        assert probability_of_at_least(2, 5, 1.0) == 1.0


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
