"""Tests of the record of requests that bring workers down, and of the trials that keep suspects apart from each
other."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from coordinator.intake.run_identity import WorkerLife
from coordinator.recovery.poison import (
    AGAIN_AFTER_S,
    BACK_S,
    CONVICTED_S,
    CONVICTIONS_MAX,
    LIVES_MAX,
    LOSSES_MAX,
    NEW_FACTS_MAX,
    NOTED_MAX,
    NOTED_S,
    SUSPECTS_MAX,
    Fact,
    PoisonRecord,
    Trials,
    probability_of_at_least,
)
from outrider.registry.worker_record import WorkerRecord, WorkerState
from tests.coordinator.fakes import record_of

NOW = 2.0


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
        assert record.acquit("a", NOW)
        assert not record.acquit("a", NOW)
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
        record.suspect("a", {WorkerLife("t1", "1")}, 0.0)
        record.suspect("a", {WorkerLife("t1", "1")}, 1.0)
        assert record.num_killed("a", 2.0) == 1
        record.suspect("a", {WorkerLife("t1", "2"), WorkerLife("t2", "1")}, 2.0)
        assert record.num_killed("a", 3.0) == 3
        assert record.num_killed("b", 3.0) == 0
        assert record.time_left_s("a", 3.0) == 0, "nobody is refused by that"
        assert record.convicted(3.0) == []
        assert record.acquit("a", 3.0)
        assert record.num_killed("a", 3.0) == 0

    def test_they_are_forgotten_after_a_while_and_beyond_a_number_of_prompts(self) -> None:
        record = PoisonRecord()
        record.suspect("a", {WorkerLife("t1", "1")}, 0.0)
        assert record.num_killed("a", CONVICTED_S) == 0
        record.suspect("a", {WorkerLife("t2", "1")}, CONVICTED_S)
        assert record.num_killed("a", CONVICTED_S) == 1
        record.suspect("a", set(), CONVICTED_S + 1.0)
        assert record.num_killed("a", 2 * CONVICTED_S) == 1, "it was sent again"
        assert record.convicted(2 * CONVICTED_S + 1.0) == []
        assert not record
        for number in range(SUSPECTS_MAX + 1):
            record.suspect(str(number), {WorkerLife(f"t{number}-{life}", "1") for life in range(LIVES_MAX + 1)}, 0.0)
        assert len(record) == SUSPECTS_MAX
        assert record.num_killed("0", 0.0) == 0
        assert record.num_killed("1", 0.0) == LIVES_MAX


class TestHearsay:
    """Facts about poisonous requests that one replica reports are known to the others."""

    def told(self, record: PoisonRecord, at_s: float) -> dict[Fact, float]:
        return dict.fromkeys(record.take_new_facts(), at_s)

    def test_losses_suspicions_and_convictions_are_known_everywhere(self) -> None:
        one, other = Blamed(4), Blamed(4)
        one.lose("1", "b", 0.0)
        one.record.suspect("c", {WorkerLife("t1", "1")}, 0.0)
        one.record.convict("d", 0.0)
        facts = self.told(one.record, 0.0)
        other.record.merge(facts, 1.0)
        assert not other.at(4, 1.0), "a worker was lost to another prompt"
        assert other.at(5, 1.0)
        assert other.record.num_killed("c", 1.0) == 1
        assert other.record.time_left_s("d", 1.0) == CONVICTED_S - 1.0
        assert other.record.take_new_facts() == [], "it is told once"
        changes = other.record.num_changes
        other.record.merge(facts, 2.0)
        assert other.record.num_changes == changes

    def test_what_was_lost_to_a_prompt_elsewhere_is_no_chance(self) -> None:
        """Found: each replica attributed to chance the losses that a prompt had caused at the others, and let it cause
        more."""
        one, other = Blamed(4), Blamed(4)
        for life in "12":
            one.lose(life, "a", 0.0)
            other.lose(life, "b", 0.0)
        assert not other.at(3)
        other.record.merge(self.told(one.record, 0.0), 1.0)
        assert other.at(3)

    def test_whoever_completes_a_prompt_clears_it_everywhere_of_what_was_before(self) -> None:
        one, other = PoisonRecord(), PoisonRecord()
        for record in (one, other):
            record.suspect("a", {WorkerLife("t1", "1")}, 0.0)
            record.convict("b", 0.0)
        earlier = self.told(other, 0.0)
        for prompt in "ab":
            assert one.acquit(prompt, 5.0)
        other.merge(earlier | self.told(one, 5.0), 5.0)
        assert other.num_killed("a", 6.0) == 0
        assert other.time_left_s("b", 6.0) == 0
        other.merge(earlier, 6.0)
        assert other.num_killed("a", 6.0) == 0, "that was before"
        other.convict("b", 7.0)
        other.merge(self.told(one, 5.0), 7.0)
        assert other.time_left_s("b", 7.0) == CONVICTED_S, "and this is after"

    def test_a_loss_that_a_run_went_beyond_is_one_of_the_others(self) -> None:
        one, other = Blamed(4), Blamed(4)
        one.lose("1", "a", 0.0)
        facts = self.told(one.record, 0.0)
        other.record.merge(facts, 0.0)
        assert other.at(3)
        one.record.excuse("a", {WorkerLife("t0", "1"), WorkerLife("t0", "2")})
        other.record.merge(self.told(one.record, 0.0), 0.0)
        for blamed in (one, other):
            assert not blamed.at(4)
            assert blamed.at(5)
            blamed.record.merge(facts, 0.0)
            assert not blamed.at(4), "whatever is told of it again"
        one.record.excuse("a", {WorkerLife("t0", "1")})
        assert one.record.take_new_facts() == [], "it is told once"

    def test_a_target_that_is_registered_for_long_after_its_loss_is_there(self) -> None:
        blamed = Blamed(4)
        there = [record_of("target", "h:1", "f", worker_id="t0", incarnation="1", model_name="m")]
        blamed.record.look(there, 0.0)
        blamed.lose("1", "b", 0.0)
        facts = self.told(blamed.record, 0.0)
        blamed.record.look(there, BACK_S)
        assert not blamed.at(3)
        blamed.record.look(there, BACK_S + 1.0)
        assert blamed.at(3)
        blamed.record.merge(facts, BACK_S + 2.0)
        assert blamed.at(3), "as others still say"

    def test_unless_its_model_stands_still(self) -> None:
        blamed = Blamed(4)
        there = record_of("target", "h:1", "f", worker_id="t0", incarnation="1", model_name="m")
        blamed.lose("1", "b", 0.0)
        blamed.record.look([replace(there, state="stalled")], BACK_S + 1.0)
        assert not blamed.at(3)

    @pytest.mark.parametrize(
        "fact", [(), ("",), ("lost",), ("lost", "a", "b"), ("had", "a", "b", "c"), ("cleared", "a", "b"), ("x", "y")]
    )  # fmt: skip
    def test_what_makes_no_sense_says_nothing(self, fact: Fact) -> None:
        record = PoisonRecord()
        record.merge({fact: 0.0}, 0.0)
        assert not record

    def test_no_more_is_kept_to_be_told_than_a_bound(self) -> None:
        record = PoisonRecord()
        for number in range(NEW_FACTS_MAX + 3):
            record.convict(str(number), 0.0)
        new_facts = record.take_new_facts()
        assert (len(new_facts), new_facts[0]) == (NEW_FACTS_MAX, ("convicted", "3"))
        assert record.take_new_facts() == []


class Blamed:
    """Asks whether a run with the prompt "a" is to be ended, where a run may cost three workers."""

    def __init__(self, num_targets: int, num_sequences: int = 1) -> None:
        self.record = PoisonRecord()
        self.targets = {f"t{number}" for number in range(num_targets)}
        self.others = set[str]()  # with other weights
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
            targets=dict.fromkeys(self.targets, True) | dict.fromkeys(self.others, False),
            model="m",
            since_s=now_s - NOTED_S,
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
        assert ended_at[:4] == [3, 5, 7, 8]
        assert ended_at == sorted(ended_at)
        assert ended_at[-1] == LOSSES_MAX, "whatever happens"

    def test_it_could_have_been_at_targets_of_its_weights_alone(self) -> None:
        blamed = Blamed(4)
        blamed.lose("1", "b", 0.0)
        assert blamed.at(7, has_passed_trial=True)
        blamed.targets, blamed.others = {"t0", "t1"}, {"t2", "t3"}
        assert not blamed.at(7, has_passed_trial=True)

    @pytest.mark.parametrize(("num_targets", "num_losses"), [(1, LOSSES_MAX), (2, LOSSES_MAX), (4, 5), (11, 3)])
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
        blamed.record.acquit("a", NOW)
        assert not blamed.at(3)

    def test_targets_that_go_without_a_word_count_whoever_was_there(self) -> None:
        def there(*names: str, state: WorkerState = "ready") -> list[WorkerRecord]:
            return [
                record_of("target", "h:1", "f", worker_id=name, incarnation="1", model_name="m", state=state)
                for name in names
            ]

        blamed = Blamed(4)
        blamed.record.look(there("t0", "t1", "t2"), 0.0)
        blamed.record.look(there("t0", "t1", "t2"), 5.0)
        assert blamed.at(3, 5.0)
        blamed.record.look(there("t1", "t2"), 10.0)
        assert not blamed.at(4, 10.0)
        assert blamed.at(5, 10.0)
        blamed.record.look(there("t1", "t2", state="draining"), 15.0)
        blamed.record.look([], 20.0)
        assert blamed.at(5, 20.0), "two of them left"
        blamed.record.regain(there("t0")[0])
        assert blamed.at(3, 20.0)

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
    def test_what_says_nothing_about_the_run_does_not_count_for_it(self, loss: tuple[str, str, float]) -> None:
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
