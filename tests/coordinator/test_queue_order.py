"""The queue that keeps what waits in order gives out slots as the one that sorts it each time, at a bounded cost."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from coordinator.placement.fair_queue import URGENT, FairQueue, Siblings, Ticket
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.routing import Router
from coordinator.placement.slot_queue import Round, SlotQueue
from outrider.objective import PATIENCE_S
from outrider.registry.worker_record import WorkerRecord
from tests.coordinator.reference_queue import ReferenceQueue, reference_pass
from tests.coordinator.test_slot_search import targets

WEIGHTS = {"a": 2.0, "b": 0.5}
TENANTS = st.sampled_from("abcd")
PRIORITIES = st.sampled_from([URGENT, -1, 0, 0, 0, 1])
Pair = tuple[Ticket, Ticket]  # ours, and the reference's


class SameOrder(RuleBasedStateMachine):
    """Both queues see the same events."""

    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.reference = FairQueue(WEIGHTS), ReferenceQueue(WEIGHTS)
        self.names: dict[Ticket, int] = {}
        self.inside: list[Pair] = []
        self.now_s = 0.0

    @rule(
        target=pairs,
        priority=PRIORITIES,
        tenant=TENANTS,
        lane=st.sampled_from("xyz"),
        due_s=st.sampled_from([None, None, 0.5, 1.0, PATIENCE_S, 2 * PATIENCE_S]),
        may_be_shed=st.booleans(),
    )
    def push(self, priority: int, tenant: str, lane: str, due_s: float | None, may_be_shed: bool) -> Pair:
        options: dict[str, Any] = {"may_be_shed": may_be_shed, "since_s": self.now_s, "lane": lane}
        if due_s is not None:
            options["due_s"] = self.now_s + due_s
        pair = Ticket(priority, tenant, 7, **options), Ticket(priority, tenant, 7, **options)
        for queue, ticket in zip((self.ours, self.reference), pair, strict=True):
            queue.push(ticket)  # type: ignore[attr-defined]
            self.names[ticket] = len(self.names) // 2
        self.inside.append(pair)
        return pair

    @rule(pair=pairs)
    def leave_or_come_back(self, pair: Pair) -> None:
        for queue, ticket in zip((self.ours, self.reference), pair, strict=True):
            getattr(queue, "remove" if pair in self.inside else "push")(ticket)
        if pair in self.inside:
            self.inside.remove(pair)
        else:
            self.inside.append(pair)

    @rule(pair=consumes(pairs))
    def begin(self, pair: Pair) -> None:
        if pair in self.inside:
            self.inside.remove(pair)
            for queue, ticket in zip((self.ours, self.reference), pair, strict=True):
                queue.remove(ticket)  # type: ignore[attr-defined]
                queue.begin(ticket)  # type: ignore[attr-defined]
                queue.take_slot(ticket.tenant)  # type: ignore[attr-defined]

    @rule(pair=pairs, lane=st.sampled_from("xyz"))
    def change_lanes(self, pair: Pair, lane: str) -> None:
        if pair in self.inside:
            self.ours.move(pair[0], lane)
            pair[1].lane = lane

    @rule(tenant=TENANTS, num_tokens=st.integers(0, 50))
    def count(self, tenant: str, num_tokens: int) -> None:
        self.ours.count_output(tenant, num_tokens)
        self.reference.count_output(tenant, num_tokens)

    @rule(tenant=TENANTS)
    def leave_slot(self, tenant: str) -> None:
        if self.reference._num_held_of[tenant]:
            self.ours.leave_slot(tenant)
            self.reference.leave_slot(tenant)

    @rule(passed_s=st.sampled_from([0.0, 0.25, 1.0, PATIENCE_S]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    def _named(self, tickets: Iterator[Ticket]) -> list[int]:
        return [self.names[ticket] for ticket in tickets]

    @invariant()
    def both_have_the_same_order_with_and_without_lanes(self) -> None:
        ordered = self._named(self.reference.ordered(self.now_s))
        assert self._named(iter(self.ours.in_order(now_s=self.now_s))) == ordered
        assert self._named(iter(self.ours.in_order())) == self._named(self.reference.ordered(float("inf")))
        in_x_or_z = [self.names[ticket] for ticket in self.reference.ordered(self.now_s) if ticket.lane != "y"]
        assert self._named(self.ours.ordered(self.now_s, lambda lane: lane == "y")) == in_x_or_z

    @invariant()
    def both_count_and_refuse_alike(self) -> None:
        for priority in (URGENT, -1, 0, 1, 2):
            assert self.ours.num_before(priority) == self.reference.num_before(priority)
            for tenant in "abce":
                assert self.ours.num_ahead(priority, tenant) == self.reference.num_ahead(priority, tenant)
                refused, expected = (
                    queue.less_entitled_than(Ticket(priority, tenant)) for queue in (self.ours, self.reference)
                )
                assert (refused and self.names[refused]) == (expected and self.names[expected])


TestSameOrder = SameOrder.TestCase


@given(st.lists(st.tuples(TENANTS, st.floats(0, 20), st.none() | st.floats(0, 20)), max_size=30), st.floats(0, 30))
def test_requests_that_reach_the_queue_late_have_a_turn_and_pass_nobody_of_their_kind(
    arrivals: list[tuple[str, float, float | None]], now_s: float
) -> None:
    queue = FairQueue()
    for tenant, since_s, due_s in arrivals:
        queue.push(Ticket(tenant=tenant, since_s=since_s, due_s=math.inf if due_s is None else due_s))
    found = queue.in_order(now_s=now_s)
    assert len(set(found)) == len(arrivals)
    for tenant in "abcd":
        plain = [each.arrival for each in found if each.tenant == tenant and not each.has_objective]
        assert plain == sorted(plain)


class Fleet:
    """Requests that wait for targets of several lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.workers = targets(lengths)
        self.slots = SlotQueue("demo", Router(lambda _: None, random.Random(0), 3.0), wait_max_s=30.0, weights={})
        self.requests: list[PlacementRequest] = []
        self.lost: dict[Siblings, frozenset[str]] = {}
        self.num_restrictions = 0

    def push(self, num_tokens: int, siblings: Siblings, tenant: str = "") -> None:
        request = self._request(num_tokens, siblings, tenant)
        self.slots.push(request, 0.0)
        self.requests.append(request)

    def begin(self, siblings: Siblings) -> None:
        """One of the request's sequences takes a slot without waiting for it, and leaves it soon."""
        slot = self.slots.take(self.slots.offer(self._request(1, siblings, "e"), 0.0), self.workers[0], 0.0)
        assert slot is not None
        self.slots.leave(slot, 0.0)

    def _request(self, num_tokens: int, siblings: Siblings, tenant: str) -> PlacementRequest:
        def restrictions() -> frozenset[str]:
            self.num_restrictions += 1
            return self.lost.get(siblings, frozenset())

        return PlacementRequest(
            model="demo",
            ticket=Ticket(0, tenant, siblings=siblings),
            rank=lambda: self._ranked(num_tokens, siblings),
            is_hopeless=lambda: False,
            token=str(len(self.requests)),
            since_s=0.0,
            deadline_s=1e9,
            num_tokens=num_tokens,
            restrictions=restrictions,
        )

    def _ranked(self, num_tokens: int, siblings: Siblings) -> list[WorkerRecord]:
        lost = self.lost.get(siblings, frozenset())
        return [each for each in self.workers if each.max_model_len >= num_tokens and each.incarnation not in lost]

    def one_pass(self, with_room: set[str]) -> list[tuple[str, list[str]]]:
        """The offers of a pass: whose, and the targets that are asked."""
        found, round_ = [], Round(self.slots)
        while (offer := round_.next(0.0)) is not None:
            found.append((offer.request.token, [each.incarnation for each in offer.asked]))
            if any(each.incarnation in with_room for each in offer.asked):
                self.slots.forget(offer.request)
                break
            round_.found_full(offer)
        return found

    def expected_pass(self, with_room: set[str]) -> list[tuple[str, list[str]]]:
        requests = [self.slots.waiting[ticket] for ticket in self.slots.queue.in_order(now_s=0.0)]
        offers = reference_pass(requests, lambda worker: worker.incarnation in with_room)
        return [(request.token, [each.incarnation for each in asked]) for request, asked in offers]


@given(st.lists(st.sampled_from([10, 20, 40, 80]), min_size=1, max_size=6), st.data())
def test_a_pass_asks_the_same_targets_for_the_same_sequences(lengths: list[int], data: st.DataObject) -> None:
    fleet, groups = Fleet(lengths), [Siblings() for _ in range(4)]
    numbers = st.sets(st.integers(0, len(lengths)), max_size=3)
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 4))):
            fleet.push(data.draw(st.integers(1, 90)), data.draw(st.sampled_from(groups)), data.draw(TENANTS))
        if data.draw(st.booleans()):  # restrictions change while they wait
            group = data.draw(st.sampled_from(groups))
            fleet.begin(group)
            fleet.lost[group] = frozenset(map(str, data.draw(numbers)))
        with_room = set(map(str, data.draw(numbers)))
        expected = fleet.expected_pass(with_room)
        assert fleet.one_pass(with_room) == expected


def count_reads(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often what orders tickets is read."""
    reads = Counter[str]()

    def counted(name: str) -> property:
        slot = getattr(Ticket, name)

        def read(ticket: Ticket) -> Any:
            reads[name] += 1
            return slot.__get__(ticket)

        return property(read, slot.__set__)

    for name in ("arrival", "due_s", "since_s"):
        patch.setattr(Ticket, name, counted(name))
    return reads


def cost_of_slots(num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """How many keys and restrictions are computed for each slot that comes free where so many wait.

    Half of them are too long for the only target with room."""
    fleet = Fleet([1000, 10])
    fleet.push(5, Siblings())  # so that both lengths are known
    fleet.one_pass({"1"})
    for number in range(num_waiting):
        fleet.push((500, 5)[number % 2], Siblings(), tenant="abcd"[number // 2 % 4])
    with monkeypatch.context() as patch:
        reads, fleet.num_restrictions = count_reads(patch), 0
        for _ in range(10):
            assert fleet.one_pass({"1"})[-1][1] == ["1"], "a short one"
            assert fleet.one_pass(set()), "all is full"
        return (reads.total() + fleet.num_restrictions) / 10


def test_what_a_free_slot_costs_does_not_grow_with_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (cost_of_slots(num, monkeypatch) for num in (100, 3200))
    # A search by halves in a queue 32 times as long takes 5 more steps, and a ticket that leaves a few searches.
    assert many <= few + 30, f"{few} with 100 waiting, {many} with 3,200"
