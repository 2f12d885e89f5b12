"""Tests of the fair queue: which request is served next."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from coordinator.placement.fair_queue import (
    OUTPUT_TOKEN_PRICE,
    TENANTS_MAX,
    URGENT,
    FairQueue,
    Siblings,
    Ticket,
)

ARRIVALS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=60)


def pushed(queue: FairQueue, *tickets: Ticket) -> list[Ticket]:
    for ticket in tickets:
        queue.push(ticket)
    return list(tickets)


def served(queue: FairQueue, num: int, output_len: int = 10) -> list[Ticket]:
    """Serves `num` tickets one after the other, each of which generates `output_len` tokens."""
    found = []
    for _ in range(num):
        (ticket,) = queue.in_order(1)
        queue.remove(ticket)
        queue.begin(ticket)
        queue.count_output(ticket.tenant, output_len)
        found.append(ticket)
    return found


def test_equals_of_one_tenant_come_in_the_order_of_their_arrival() -> None:
    queue = FairQueue()
    tickets = pushed(queue, *(Ticket(num_prompt_tokens=number) for number in range(5)))
    assert queue.in_order(10) == tickets
    assert served(queue, 5) == tickets
    assert not queue


def test_lower_priority_numbers_go_first_and_texts_that_have_begun_before_all() -> None:
    queue = FairQueue()
    late, usual, early, begun = pushed(queue, Ticket(5), Ticket(0), Ticket(-5), Ticket(URGENT))
    assert queue.in_order(10) == [begun, early, usual, late]


def test_one_that_comes_back_has_the_turn_that_it_had() -> None:
    queue = FairQueue()
    first, second = pushed(queue, Ticket(), Ticket())
    queue.remove(first)
    queue.push(first)
    assert queue.in_order(2) == [first, second]


@pytest.mark.parametrize("weight", [0.5, 1.0, 3.0])
def test_tenants_are_served_by_their_weights_however_many_requests_they_send(weight: float) -> None:
    queue = FairQueue({"b": weight})
    for _ in range(400):
        pushed(queue, *(Ticket(tenant="a") for _ in range(5)), Ticket(tenant="b"))
    counts = Counter(ticket.tenant for ticket in served(queue, 300))
    assert counts["b"] / counts["a"] == pytest.approx(weight, rel=0.05)


def test_what_counts_is_the_tokens_served_not_the_number_of_requests() -> None:
    queue = FairQueue()
    for _ in range(200):
        pushed(queue, Ticket(tenant="short"), Ticket(tenant="long", num_prompt_tokens=180))
    tokens = Counter[str]()
    for _ in range(150):
        (ticket,) = served(queue, 1, output_len=10)
        tokens[ticket.tenant] += ticket.num_prompt_tokens + int(10 * OUTPUT_TOKEN_PRICE)
    assert tokens["long"] / tokens["short"] == pytest.approx(1.0, abs=0.1)


def test_who_was_away_has_saved_nothing_up() -> None:
    queue = FairQueue()
    pushed(queue, *(Ticket(tenant="busy") for _ in range(100)))
    served(queue, 90)
    pushed(queue, *(Ticket(tenant="back") for _ in range(10)))
    counts = Counter(ticket.tenant for ticket in served(queue, 10))
    assert counts["back"] <= 6


def test_who_comes_after_a_quiet_time_owes_nothing_either() -> None:
    queue = FairQueue()
    pushed(queue, Ticket(tenant="early"))
    served(queue, 1, output_len=100_000)
    pushed(queue, *(Ticket(tenant=name) for name in ("early", "new") for _ in range(10)))
    counts = Counter(ticket.tenant for ticket in served(queue, 10))
    assert counts == {"early": 5, "new": 5} or abs(counts["early"] - counts["new"]) <= 2


def test_a_repeated_attempt_is_charged_once() -> None:
    queue = FairQueue()
    ticket = Ticket(tenant="a", num_prompt_tokens=50)
    pushed(queue, ticket)
    queue.remove(ticket)
    queue.begin(ticket)
    queue.begin(ticket)
    pushed(queue, Ticket(tenant="b", num_prompt_tokens=10), ticket)
    assert [each.tenant for each in queue.in_order(2)] == ["b", "a"]


@given(ARRIVALS, st.integers(-1, 1), st.sampled_from("abc"))
def test_as_many_are_ahead_of_a_newcomer_as_have_their_turns_before_it(
    arrivals: list[tuple[str, int]], priority: int, tenant: str
) -> None:
    """Within one for each tenant."""
    queue = FairQueue({"a": 2.0})
    for each, _ in arrivals:
        queue.push(Ticket(tenant=each))
    expected = queue.num_ahead(priority, tenant)
    newcomer = Ticket(priority, tenant)
    queue.push(newcomer)
    num = 0
    while served(queue, 1) != [newcomer]:
        num += 1
    assert abs(num - expected) <= 3


class TestShareOfSlots:
    @staticmethod
    def held(queue: FairQueue, **slots: int) -> None:
        for tenant, num in slots.items():
            for _ in range(num):
                queue.take_slot(tenant)

    def test_who_holds_more_than_its_share_comes_after_those_who_hold_less(self) -> None:
        queue = FairQueue()
        first = pushed(queue, *(Ticket(tenant="greedy") for _ in range(3)))
        queue.count_output("modest", 10**6)  # by tokens alone it would be the last
        (late,) = pushed(queue, Ticket(tenant="modest"))
        self.held(queue, greedy=4, modest=1)
        assert queue.in_order() == [late, *first]

    def test_within_its_share_tokens_decide(self) -> None:
        queue = FairQueue()
        (greedy,) = pushed(queue, Ticket(tenant="greedy"))
        (modest,) = pushed(queue, Ticket(tenant="modest"))
        queue.count_output("modest", 1000)
        self.held(queue, greedy=2, modest=2)  # of five, the free one included
        assert queue.in_order() == [greedy, modest]
        self.held(queue, greedy=1)
        assert queue.in_order() == [modest, greedy]

    def test_weights_make_shares(self) -> None:
        queue = FairQueue({"gold": 3.0})
        (gold,) = pushed(queue, Ticket(tenant="gold"))
        (lead,) = pushed(queue, Ticket(tenant="lead"))
        queue.count_output("gold", 1000)
        self.held(queue, gold=5, lead=1)
        assert queue.in_order() == [lead, gold]
        self.held(queue, lead=1)  # shares of eight: six and two
        assert queue.in_order() == [gold, lead]

    def test_who_does_not_wait_takes_nothing_from_the_shares_of_those_who_do(self) -> None:
        queue = FairQueue()
        (a,) = pushed(queue, Ticket(tenant="a"))
        (b,) = pushed(queue, Ticket(tenant="b"))
        self.held(queue, a=2, b=5, satisfied=50)
        queue.count_output("a", 10)
        assert queue.in_order() == [a, b]

    def test_a_tenant_alone_and_one_that_returns_slots_may_have_everything(self) -> None:
        queue = FairQueue()
        tickets = pushed(queue, Ticket(tenant="a"), Ticket(tenant="a"))
        self.held(queue, a=100)
        assert queue.in_order() == tickets
        for _ in range(100):
            queue.leave_slot("a")
        assert not queue._num_held_of

    def test_priorities_come_before_shares_and_those_that_have_begun_are_not_held_back(self) -> None:
        queue = FairQueue()
        (early,) = pushed(queue, Ticket(-1, "greedy"))
        (late,) = pushed(queue, Ticket(0, "modest"))
        begun = pushed(queue, Ticket(URGENT, "greedy"), Ticket(URGENT, "modest"))
        self.held(queue, greedy=9)
        queue.count_output("modest", 10)
        assert queue.in_order() == [*begun, early, late]

    @given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 20)), max_size=20), st.randoms())
    def test_somebody_who_waits_is_always_within_its_share(
        self, slots: list[tuple[str, int]], chance: random.Random
    ) -> None:
        queue = FairQueue({"a": chance.choice([0.001, 1.0, 1000.0]), "b": 0.5})
        waiting = chance.sample("abcd", chance.randint(1, 4))
        for tenant in waiting:
            pushed(queue, Ticket(tenant=tenant))
        for tenant, num in slots:
            self.held(queue, **{tenant: num})
        beyond = queue._beyond_share(waiting)
        assert beyond < set(waiting)
        assert all(queue._num_held_of[tenant] for tenant in beyond)


class TestShedding:
    def test_a_newcomer_that_goes_first_takes_the_place_of_the_last(self) -> None:
        queue = FairQueue()
        _, last = pushed(queue, Ticket(0), Ticket(1))
        assert queue.less_entitled_than(Ticket(0)) is last

    def test_one_that_would_be_last_itself_displaces_nobody(self) -> None:
        queue = FairQueue()
        pushed(queue, Ticket(0, "a"), Ticket(0, "b"))
        assert queue.less_entitled_than(Ticket(1, "c")) is None
        assert queue.less_entitled_than(Ticket(0, "a")) is None

    def test_the_tenant_with_most_waiting_gives_way_to_one_with_less(self) -> None:
        queue = FairQueue()
        many = pushed(queue, *(Ticket(0, "greedy") for _ in range(3)))
        pushed(queue, Ticket(0, "modest"))
        assert queue.less_entitled_than(Ticket(0, "new")) is many[-1]
        assert queue.less_entitled_than(Ticket(0, "greedy")) is None

    def test_weights_count(self) -> None:
        queue = FairQueue({"large": 10.0})
        pushed(queue, *(Ticket(0, "large") for _ in range(5)))
        assert queue.less_entitled_than(Ticket(0, "small")) is None

    def test_of_several_sequences_none_is_shed_once_one_of_them_has_begun(self) -> None:
        queue, siblings = FairQueue(), Siblings()
        one, other = pushed(queue, *(Ticket(1, siblings=siblings) for _ in range(2)))
        assert queue.less_entitled_than(Ticket(0)) is other
        queue.remove(one)
        queue.begin(one)
        assert queue.less_entitled_than(Ticket(0)) is None

    def test_texts_that_have_begun_are_left_alone(self) -> None:
        queue = FairQueue()
        pushed(queue, Ticket(3, may_be_shed=False), Ticket(URGENT, may_be_shed=False))
        assert queue.less_entitled_than(Ticket(0)) is None


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    queue, rng = FairQueue(), random.Random(0)
    for number in range(3 * TENANTS_MAX):
        pushed(queue, Ticket(tenant=f"t{number}"))
        served(queue, 1, rng.randrange(1000))
    assert len(queue._served) <= TENANTS_MAX


class QueueMachine(RuleBasedStateMachine):
    """Against a list: what is in, and who may not be passed."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue({"a": 2.0})
        self.inside: list[Ticket] = []

    @rule(target=tickets, priority=st.sampled_from([URGENT, -1, 0, 1]), tenant=st.sampled_from("abc"))
    def push(self, priority: int, tenant: str) -> Ticket:
        ticket = Ticket(priority, tenant, 7)
        self.queue.push(ticket)
        self.inside.append(ticket)
        return ticket

    @rule(ticket=tickets)
    def leave(self, ticket: Ticket) -> None:
        if ticket in self.inside:
            self.queue.remove(ticket)
            self.inside.remove(ticket)

    @rule(ticket=tickets)
    def come_back(self, ticket: Ticket) -> None:
        if ticket not in self.inside:
            self.queue.push(ticket)
            self.inside.append(ticket)

    @rule(num_tokens=st.integers(0, 1000), tenant=st.sampled_from("abcd"))
    def count(self, num_tokens: int, tenant: str) -> None:
        self.queue.count_output(tenant, num_tokens)

    @invariant()
    def everybody_has_a_turn_and_nobody_is_passed_by_a_lesser_one(self) -> None:
        assert len(self.queue) == len(self.inside)
        assert all(ticket in self.queue for ticket in self.inside)
        in_order = self.queue.in_order(100)
        assert {id(ticket) for ticket in in_order} == {id(ticket) for ticket in self.inside}
        assert [ticket.priority for ticket in in_order] == sorted(ticket.priority for ticket in in_order)
        for tenant in "abc":
            for priority in (URGENT, -1, 0, 1):
                own = [each.arrival for each in in_order if (each.tenant, each.priority) == (tenant, priority)]
                assert own == sorted(own)


TestQueueMachine = QueueMachine.TestCase


def test_a_ticket_is_in_the_queue_from_push_to_remove() -> None:
    queue, first, second = FairQueue(), Ticket(tenant="a"), Ticket(tenant="a")
    queue.push(first)
    assert first in queue
    assert second not in queue, "though it looks the same"
    queue.push(second)
    queue.remove(first)
    assert first not in queue
    assert second in queue
    queue.push(first)
    assert queue.in_order() == [first, second], "it keeps its position"
