"""The chaos suite's accounts: whose request a fault has hit, how long it waited, and what the table says."""

from __future__ import annotations

import pytest

from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.ledger import (
    LATE_S,
    OF_ANOTHER,
    POISONOUS,
    QUIET,
    Injection,
    Ledger,
    in_words,
    longest_gap_s,
    percentile,
)
from tests.e2e.chaos.verdict import Answer, Incident, Kind, Verdict

RIGHT = Verdict(Kind.RIGHT)


def answer(asked_s: float, *chunk_times_s: float) -> Answer:
    return Answer(asked_s, chunk_times_s=list(chunk_times_s), ended_s=chunk_times_s[-1])


def met(at_s: float, *, is_refusal: bool) -> Answer:
    """An answer whose client met something in between."""
    found = answer(at_s - 1.0, at_s + 1.0)
    found.incidents.append(Incident(at_s, is_refusal, "503 unavailable: no target"))
    return found


def test_a_fault_hits_who_was_under_way_and_who_came_before_it_was_mended() -> None:
    ledger = Ledger()
    injection = Injection(1, "target SIGSTOP", 10.0)
    ledger.begin(injection)
    ledger.add("before", answer(8.0, 9.0), RIGHT, 0.0)
    ledger.add("during", answer(9.0, 9.5, 13.5), RIGHT, 0.0)
    ledger.mended(injection, 13.0)
    ledger.add("came while it lasted", answer(12.0, 13.1, 13.2), RIGHT, 0.0)
    ledger.add("came later", answer(13.4, 13.6), RIGHT, 0.0)
    row = ledger.row("target SIGSTOP")
    assert (row.num_injected, row.num_requests) == (1, 2)
    assert row.gaps_s == [4.0, 13.1 - 12.0]


def test_the_longest_wait_is_looked_for_around_the_fault_alone() -> None:
    waits = answer(0.0, 5.0, 5.1, 7.1, 7.2, 17.2)
    assert longest_gap_s(waits, 6.0, 7.15) == 7.1 - 5.1
    assert longest_gap_s(waits, 3.0, 4.0) == 5.0


def test_damage_is_put_down_to_the_fault_until_everything_serves_again() -> None:
    ledger = Ledger()
    injection = Injection(7, "target SIGKILL", 10.0)
    ledger.begin(injection)
    ledger.mended(injection, 10.0)
    ledger.add("case", answer(11.0, 12.0), Verdict(Kind.WRONG, 3, "so and so"), 0.0)
    ledger.end(injection, 20.0, None)
    ledger.add("later", answer(21.0, 22.0), Verdict(Kind.REFUSED, 5, "503"), 21.0)
    assert ledger.row("target SIGKILL").num_tokens[Kind.WRONG] == 3
    assert ledger.row(QUIET).num_refused == 1
    assert "case: wrong: so and so; during 7 target SIGKILL" in ledger.failures[0]
    assert len(ledger.failures) == 2


def test_a_fault_that_nobody_recovers_from_is_a_failure() -> None:
    ledger = Ledger()
    injection = Injection(1, "draft SIGKILL", 10.0)
    ledger.begin(injection)
    ledger.end(injection, 70.0, "draft-0 is not ready")
    assert "did not recover: draft-0 is not ready" in ledger.failures[0]


def test_the_table_adds_up() -> None:
    ledger = Ledger()
    for number, name in enumerate(("a", "b", "b")):
        injection = Injection(number, name, 10.0 * number)
        ledger.begin(injection)
        ledger.end(injection, 10.0 * number + 2, None)
        ledger.add("x", answer(10.0 * number - 1, 10.0 * number + 1), RIGHT, 0.0)
    lines = ledger.markdown().splitlines()
    assert lines[2].startswith("| a | 1 | 1 | 0 | 0 | 0 | 0 | 0 / 0 | 2.0 s / 2.0 s |")
    assert lines[-1].startswith("| **all** | 3 |")
    assert ledger.to_json()["faults"][-1]["num_injected"] == 3


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([], 50) is None
    assert in_words(0.0123) == "12 ms"
    assert in_words(None) == "-"


@pytest.mark.parametrize(
    ("costs", "is_refusal", "is_failure"),
    [
        (Costs.NOTHING, True, True),
        (Costs.NOTHING, False, True),
        (Costs.CONNECTIONS, True, True),
        (Costs.CONNECTIONS, False, False),
        (Costs.CAPACITY, True, False),
        (Costs.CAPACITY, False, False),
    ],
)
def test_a_client_has_to_bear_with_what_the_fault_may_cost(costs: Costs, is_refusal: bool, is_failure: bool) -> None:
    ledger = Ledger()
    injection = Injection(1, "a fault", 10.0, costs)
    ledger.begin(injection)
    ledger.add("x", met(12.0, is_refusal=is_refusal), RIGHT, 0.0)
    ledger.end(injection, 20.0, None)
    assert bool(ledger.failures) == is_failure
    if not is_failure:
        row = ledger.row("a fault")
        assert (row.num_refusals, row.num_breaks) == (int(is_refusal), int(not is_refusal))


@pytest.mark.parametrize(("num_faults", "is_failure"), [(1, True), (2, False)])
def test_where_two_faults_take_room_at_once_a_refusal_is_no_failure(num_faults: int, is_failure: bool) -> None:
    ledger = Ledger()
    for number in range(num_faults):
        ledger.begin(Injection(number, "target SIGKILL", 10.0, takes_room=True))
    ledger.begin(Injection(9, "draft SIGKILL", 10.0))
    ledger.add("x", met(12.0, is_refusal=True), RIGHT, 0.0)
    assert bool(ledger.failures) == is_failure
    ledger.add("y", met(12.0, is_refusal=False), RIGHT, 0.0)
    assert "a connection broke without need" in ledger.failures[-1]


def test_what_comes_long_after_a_fault_is_not_its_doing() -> None:
    ledger = Ledger()
    injection = Injection(1, "all targets lost", 10.0, Costs.CAPACITY)
    ledger.begin(injection)
    ledger.end(injection, 20.0, None)
    ledger.add("x", met(20.0 + LATE_S - 1, is_refusal=True), RIGHT, 15.0)
    assert not ledger.failures
    ledger.add("x", met(20.0 + LATE_S + 1, is_refusal=True), RIGHT, 15.0)
    assert "refused without need: 503 unavailable" in ledger.failures[0]


def test_a_request_belongs_to_the_last_fault_that_it_hit() -> None:
    ledger = Ledger()
    assert ledger.name_of_fault(1.0, 2.0) == QUIET
    for number, name in enumerate(("first", "second")):
        injection = Injection(number, name, 10.0 + number)
        ledger.begin(injection)
        ledger.mended(injection, 12.0 + number)
    assert ledger.name_of_fault(9.0, 10.5) == "first"
    assert ledger.name_of_fault(9.0, 11.5) == "second"
    assert ledger.name_of_fault(12.5, 14.0) == "second"
    assert ledger.name_of_fault(14.0, 15.0) == QUIET


@pytest.mark.parametrize(("num_faults", "is_failure"), [(2, True), (3, False)])
def test_a_request_may_be_taken_for_the_end_of_targets_where_it_met_as_many_that_ended(
    num_faults: int, is_failure: bool
) -> None:
    ledger = Ledger()
    for number in range(num_faults):
        ledger.begin(Injection(number, "target SIGKILL", 10.0, takes_room=True))
    incident = Incident(12.0, True, f"503 poisonous_request: 3 {POISONOUS} while they had this request")
    ended, refused = answer(11.0, 14.0), answer(11.0, 14.0)
    ended.incidents.append(incident)
    ledger.add("x", ended, RIGHT, 0.0)
    assert bool(ledger.failures) == is_failure
    told = Incident(13.0, True, f"503 poisonous_request: {POISONOUS} one after the other {OF_ANOTHER} (ab)")
    refused.incidents.append(told)
    ledger.add("y", refused, RIGHT, 0.0)
    assert len(ledger.failures) == int(is_failure), "that is judged where the other one ended"
