"""Order of the sequences that wait for a slot at a target: by priority, then by the tenants' shares. Pure.

Lower priority numbers go first. Within a priority the tenant that has been served least for its weight goes first: the
virtual token counters of Sheng et al., 2401.00588. A tenant that had nothing waiting starts at the lowest counter of
those that wait, so nobody saves up. One tenant's requests keep the order of their arrival, except that those whose
first token is due by an objective go by that time, the earliest first. One without an objective, or whose time is over,
is due PATIENCE_S after its arrival, as in `objective.by_due`.

A tenant also has a share of the slots, by the same weights. Among those that wait at one priority, a tenant that
another slot would take beyond its share, rounded up, goes after all others: it gets a free slot only if no sequence of
the others fits. So a tenant that is alone may take every slot, no running sequence is ended, and no usable slot is kept
free. Sequences that have begun are not held back. Only slots given out by this replica count: it does not know those
that tenants have through others.

The tickets of one *lane* fit the same targets, so that the caller can leave all of them out at once. Lanes change
nothing in the order; they are why finding the next ticket costs what the tenants and lanes are, not what waits.

Invariant: memory is bounded by the waiting tickets, the slots given out and TENANTS_MAX.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Final

from outrider.objective import PATIENCE_S

URGENT: Final = -(2**31)
"""Priority of a sequence that has begun: its client has seen tokens and waits for the next one."""
OUTPUT_TOKEN_PRICE: Final = 2.0
"""Price of a generated token, in prompt tokens, as in 2401.00588."""
TENANTS_MAX: Final = 4096
_ROUNDING: Final = 1e-9  # of a share that is a whole number


@dataclass(slots=True, eq=False)
class Siblings:
    """The sequences of one request, which fails as a whole."""

    have_begun: bool = False  # one of them has been given a slot


@dataclass(slots=True, eq=False)
class Ticket:
    """Position of one sequence in the queue."""

    priority: int = 0
    tenant: str = ""
    num_prompt_tokens: int = 0
    may_be_shed: bool = True  # for one that goes first, if there is no room for both
    siblings: Siblings = field(default_factory=Siblings)
    due_s: float = math.inf  # when its first token is due, by its service-level objective
    since_s: float = 0.0  # its request's arrival, on the same clock
    lane: Hashable = None  # does not change while it waits, but by `FairQueue.move`
    # Set by the queue, once:
    arrival: int = field(default=0, init=False)
    patient_until_s: float = field(default=math.inf, init=False)  # when it is due without an objective
    is_charged: bool = field(default=False, init=False)

    @property
    def has_objective(self) -> bool:
        """Whether its first token is due by an objective; that of a sequence that has begun is due no more."""
        return self.priority != URGENT and self.due_s < math.inf

    @property
    def is_sheddable(self) -> bool:
        """Whether the ticket's request may be refused now: none of its sequences has begun."""
        return self.may_be_shed and not self.siblings.have_begun


_by_arrival: Final[Callable[[Ticket], int]] = attrgetter("arrival")
_by_due: Final[Callable[[Ticket], Any]] = attrgetter("due_s", "arrival")


@dataclass(slots=True)
class _Lane:
    """One tenant's tickets of one lane at one priority."""

    by_arrival: list[Ticket] = field(default_factory=list)
    by_due: list[Ticket] = field(default_factory=list)  # those with an objective

    def add(self, ticket: Ticket) -> None:
        insort(self.by_arrival, ticket, key=_by_arrival)
        if ticket.has_objective:
            insort(self.by_due, ticket, key=_by_due)

    def remove(self, ticket: Ticket) -> None:
        del self.by_arrival[bisect_left(self.by_arrival, _by_arrival(ticket), key=_by_arrival)]
        if ticket.has_objective:
            del self.by_due[bisect_left(self.by_due, _by_due(ticket), key=_by_due)]

    def turns(self, now_s: float) -> Iterator[Iterator[tuple[float, int, Ticket]]]:
        """Yields the tickets in the order in which their patience ends, and those that are due in that of their times.

        A ticket of both goes where it comes first.
        """
        yield ((each.patient_until_s, each.arrival, each) for each in self.by_arrival)
        due = range(bisect_right(self.by_due, (now_s, math.inf), key=_by_due), len(self.by_due))
        yield ((each.due_s, each.arrival, each) for each in map(self.by_due.__getitem__, due))


@dataclass(slots=True)
class _Line:
    """One tenant's tickets at one priority."""

    lanes: dict[Hashable, _Lane] = field(default_factory=dict)
    num: int = 0

    @property
    def first_arrival(self) -> int:
        return min(lane.by_arrival[0].arrival for lane in self.lanes.values())

    @property
    def newest(self) -> Ticket:
        return max((lane.by_arrival[-1] for lane in self.lanes.values()), key=_by_arrival)

    def in_order(self, lanes: Container[Hashable], now_s: float) -> Iterator[Ticket]:
        """Yields the tickets of these lanes, the earliest due first and equals by their arrival."""
        turns = (turn for name, lane in self.lanes.items() if name in lanes for turn in lane.turns(now_s))
        seen = set[Ticket]()
        for _, _, ticket in heapq.merge(*turns, key=itemgetter(0, 1)):
            if ticket not in seen:
                yield ticket
                if ticket.has_objective:
                    seen.add(ticket)


class FairQueue:
    """Tickets in the order in which they are given slots."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants are above 0; a tenant without one has weight 1."""
        self._weights = dict(weights or {})
        self._waiting: dict[int, dict[str, _Line]] = {}  # by priority and tenant
        self._tickets: set[Ticket] = set()  # all that wait
        # Their priorities in order, of all and by lane.
        self._priorities: list[int] = []
        self._priorities_in: dict[Hashable, list[int]] = {}
        self._num_waiting_of: Counter[str] = Counter()
        self._num_held_of: Counter[str] = Counter()  # slots
        # By tenant: virtual tokens, and the latest arrival of a request.
        self._served: dict[str, float] = {}
        self._latest_s: dict[str, float] = {}
        self._floor = 0.0  # counter at which a new tenant starts
        self._arrivals = itertools.count(1)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def push(self, ticket: Ticket) -> None:
        """Adds a ticket; one that comes back keeps its position."""
        if ticket.tenant not in self._num_waiting_of:
            counters = [self._served[tenant] for tenant in self._num_waiting_of]
            self._floor = min(counters, default=self._floor)
            self._forget_some()
            self._served[ticket.tenant] = max(self._served.get(ticket.tenant, 0.0), self._floor)
        if not ticket.arrival:
            ticket.arrival = next(self._arrivals)
            # Order, not clocks, decides among equals.
            latest_s = max(self._latest_s.get(ticket.tenant, -math.inf), ticket.since_s)
            self._latest_s[ticket.tenant] = latest_s
            ticket.patient_until_s = latest_s + PATIENCE_S
        self._insert(ticket)
        self._num_waiting_of[ticket.tenant] += 1

    def remove(self, ticket: Ticket) -> None:
        """Removes a ticket that has a slot or no longer waits."""
        self._extract(ticket)
        self._num_waiting_of[ticket.tenant] -= 1
        if not self._num_waiting_of[ticket.tenant]:
            del self._num_waiting_of[ticket.tenant]
            if not self._num_waiting_of:
                self._floor = max(self._floor, self._served[ticket.tenant])

    def move(self, ticket: Ticket, lane: Hashable) -> None:
        """Moves a waiting ticket to another lane."""
        self._extract(ticket)
        ticket.lane = lane
        self._insert(ticket)

    def _insert(self, ticket: Ticket) -> None:
        line = self._waiting.setdefault(ticket.priority, {}).setdefault(ticket.tenant, _Line())
        line.lanes.setdefault(ticket.lane, _Lane()).add(ticket)
        line.num += 1
        self._tickets.add(ticket)
        insort(self._priorities, ticket.priority)
        insort(self._priorities_in.setdefault(ticket.lane, []), ticket.priority)

    def _extract(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)
        by_tenant, of_lane = self._waiting[ticket.priority], self._priorities_in[ticket.lane]
        line = by_tenant[ticket.tenant]
        line.lanes[ticket.lane].remove(ticket)
        line.num -= 1
        for priorities in (self._priorities, of_lane):
            del priorities[bisect_left(priorities, ticket.priority)]
        if not line.lanes[ticket.lane].by_arrival:
            del line.lanes[ticket.lane]
        if not line.num:
            del by_tenant[ticket.tenant]
        if not by_tenant:
            del self._waiting[ticket.priority]
        if not of_lane:
            del self._priorities_in[ticket.lane]

    def in_order(self, limit: int | None = None, now_s: float = math.inf) -> list[Ticket]:
        """The next tickets, at most `limit`, as of now; without `now_s` no ticket is due at any time."""
        return list(itertools.islice(self.ordered(now_s), limit))

    def ordered(self, now_s: float, is_closed: Callable[[Hashable], bool] = lambda lane: False) -> Iterator[Ticket]:
        """Yields the tickets in their order as of now, without those in closed lanes. None may come or leave
        meanwhile."""
        lanes, priority = {lane for lane in self._priorities_in if not is_closed(lane)}, -math.inf
        while True:
            of_lanes = [self._priorities_in[lane] for lane in lanes]
            later = [each[index] for each in of_lanes if (index := bisect_right(each, priority)) < len(each)]
            if not later:
                return
            priority = min(later)
            yield from self._ordered_at(priority, lanes, now_s)

    def _ordered_at(self, priority: int, lanes: Container[Hashable], now_s: float) -> Iterator[Ticket]:
        by_tenant = self._waiting[priority]
        beyond = self._beyond_share(by_tenant) if priority != URGENT else frozenset()
        turns = [
            (tenant in beyond, self._served[tenant], line.first_arrival, tenant) for tenant, line in by_tenant.items()
        ]
        heapq.heapify(turns)
        while turns:
            *_, tenant = heapq.heappop(turns)
            yield from by_tenant[tenant].in_order(lanes, now_s)

    def _beyond_share(self, tenants: Collection[str]) -> frozenset[str]:
        """Those of these waiting tenants that one more slot would take beyond their share of all slots that they have,
        that slot included. Never all of them, and never one that has no slot."""
        held = {tenant: self._num_held_of[tenant] for tenant in tenants}
        slots_per_weight = (sum(held.values()) + 1) / sum(map(self._weight, tenants))
        return frozenset(
            tenant
            for tenant, num in held.items()
            if num >= max(math.ceil(slots_per_weight * self._weight(tenant) - _ROUNDING), 1)
        )

    def begin(self, ticket: Ticket) -> None:
        """Charges the tenant for the prompt, when the sequence gets its first slot."""
        ticket.siblings.have_begun = True
        if not ticket.is_charged:
            ticket.is_charged = True
            self._charge(ticket.tenant, ticket.num_prompt_tokens)

    def take_slot(self, tenant: str) -> None:
        """Counts a slot given to the tenant, until `leave_slot`."""
        self._num_held_of[tenant] += 1

    def leave_slot(self, tenant: str) -> None:
        """Reverses one `take_slot`."""
        assert self._num_held_of[tenant] > 0, "left more slots than were taken"
        self._num_held_of[tenant] -= 1
        if not self._num_held_of[tenant]:
            del self._num_held_of[tenant]

    def count_output(self, tenant: str, num_tokens: int) -> None:
        """Charges the tenant for generated tokens."""
        self._charge(tenant, num_tokens * OUTPUT_TOKEN_PRICE)

    def _charge(self, tenant: str, num_tokens: float) -> None:
        if tenant in self._served or len(self._served) < TENANTS_MAX:
            served = self._served.get(tenant, self._floor)
            self._served[tenant] = served + num_tokens / self._weight(tenant)

    def num_before(self, priority: int) -> int:
        """Number of sequences that wait at lower priority numbers."""
        return bisect_left(self._priorities, priority)

    def num_ahead(self, priority: int, tenant: str) -> float:
        """Number of sequences that would go before a newcomer's, if nobody else comes."""
        num = float(self.num_before(priority))
        lines = self._waiting.get(priority, {})
        num_own = lines[tenant].num if tenant in lines else 0
        # While the tenant's own go, each other tenant has as many by its weight, and at most all that it has waiting.
        return num + num_own + sum(
            min(line.num, num_own * self._weight(each) / self._weight(tenant) + 1)
            for each, line in lines.items() if each != tenant
        )  # fmt: skip

    def less_entitled_than(self, newcomer: Ticket) -> Ticket | None:
        """The ticket to refuse in favour of a newcomer: the newest one of the tenant with most waiting for its weight,
        at the last priority. None if that would be the newcomer itself."""
        end = len(self._priorities)
        while end:
            priority = self._priorities[end - 1]
            end = bisect_left(self._priorities, priority, 0, end)
            if priority < newcomer.priority:
                return None
            lines = self._waiting[priority]
            found = [
                (line.num / self._weight(tenant), tenant, newest)
                for tenant, line in lines.items()
                if (newest := line.newest).is_sheddable
            ]
            if not found:
                continue
            share, _, newest = max(found, key=itemgetter(0, 1))
            own = lines[newcomer.tenant].num if newcomer.tenant in lines else 0
            if priority > newcomer.priority or share > (own + 1) / self._weight(newcomer.tenant):
                return newest
        return None

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_some(self) -> None:
        """Forgets the tenants that were served least: they would start at the floor anyway, or little above it."""
        if len(self._served) < TENANTS_MAX:
            return
        idle = sorted((tenant for tenant in self._served if tenant not in self._num_waiting_of),
                      key=self._served.__getitem__)  # fmt: skip
        for tenant in idle[: len(self._served) - TENANTS_MAX // 2]:
            del self._served[tenant]
            self._latest_s.pop(tenant, None)
