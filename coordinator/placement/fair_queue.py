"""Order of the sequences that wait for a slot at a target: by priority, then by the tenants' shares. Pure.

Lower priority numbers go first. Within a priority the tenant that has been served least for its weight goes first: the
virtual token counters of Sheng et al., 2401.00588. A tenant that had nothing waiting starts at the lowest counter of
those that wait, so nobody saves up. One tenant's requests keep the order of their arrival, except that those whose
first token is due by an objective change places with others of their tenant and priority (`objective.by_due`).

A tenant also has a share of the slots, by the same weights. Among those that wait at one priority, a tenant that
another slot would take beyond its share, rounded up, goes after all others: it gets a free slot only if no sequence of
the others fits. So a tenant that is alone may take every slot, no running sequence is ended, and no usable slot is kept
free. Sequences that have begun are not held back. Only slots given out by this replica count: it does not know those
that tenants have through others.

Invariant: memory is bounded by the waiting tickets, the slots given out and TENANTS_MAX.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from outrider.objective import Turn, by_due

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
    arrival: int = field(default=0, init=False)  # set by the queue, once
    is_charged: bool = field(default=False, init=False)

    @property
    def turn(self) -> Turn:
        """Decides when it goes among its tenant's of the same priority; one that has begun is due no more."""
        return Turn(None, self.since_s, math.inf if self.priority == URGENT else self.due_s)

    @property
    def is_sheddable(self) -> bool:
        """Whether the ticket's request may be refused now: none of its sequences has begun."""
        return self.may_be_shed and not self.siblings.have_begun


class FairQueue:
    """Tickets in the order in which they are given slots."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants are above 0; a tenant without one has weight 1."""
        self._weights = dict(weights or {})
        self._waiting: dict[int, dict[str, list[Ticket]]] = {}  # by priority and tenant
        self._tickets: set[Ticket] = set()  # all that wait; a search in their lists is long
        self._num_waiting_of: Counter[str] = Counter()
        self._num_held_of: Counter[str] = Counter()  # slots
        self._served: dict[str, float] = {}  # virtual tokens by tenant
        self._floor = 0.0  # counter at which a new tenant starts
        self._arrivals = itertools.count(1)

    def __len__(self) -> int:
        return self._num_waiting_of.total()

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def push(self, ticket: Ticket) -> None:
        """Adds a ticket; one that comes back keeps its position."""
        if not ticket.arrival:
            ticket.arrival = next(self._arrivals)
        if ticket.tenant not in self._num_waiting_of:
            counters = [self._served[tenant] for tenant in self._num_waiting_of]
            self._floor = min(counters, default=self._floor)
            self._forget_some()
            self._served[ticket.tenant] = max(self._served.get(ticket.tenant, 0.0), self._floor)
        line = self._waiting.setdefault(ticket.priority, {}).setdefault(ticket.tenant, [])
        insort(line, ticket, key=lambda each: each.arrival)
        self._tickets.add(ticket)
        self._num_waiting_of[ticket.tenant] += 1

    def remove(self, ticket: Ticket) -> None:
        """Removes a ticket that has a slot or no longer waits."""
        by_tenant = self._waiting[ticket.priority]
        by_tenant[ticket.tenant].remove(ticket)
        self._tickets.remove(ticket)
        if not by_tenant[ticket.tenant]:
            del by_tenant[ticket.tenant]
        if not by_tenant:
            del self._waiting[ticket.priority]
        self._num_waiting_of[ticket.tenant] -= 1
        if not self._num_waiting_of[ticket.tenant]:
            del self._num_waiting_of[ticket.tenant]
            if not self._num_waiting_of:
                self._floor = max(self._floor, self._served[ticket.tenant])

    def in_order(self, limit: int | None = None, now_s: float = math.inf) -> list[Ticket]:
        """The next tickets, at most `limit`, as of now; without `now_s` no ticket is due at any time."""
        return list(itertools.islice(self._ordered(now_s), limit))

    def _ordered(self, now_s: float) -> Iterator[Ticket]:
        for priority in sorted(self._waiting):
            by_tenant = self._waiting[priority]
            beyond = self._beyond_share(by_tenant) if priority != URGENT else frozenset()
            sort_keys = {
                tenant: (tenant in beyond, self._served[tenant], line[0].arrival) for tenant, line in by_tenant.items()
            }
            for tenant in sorted(sort_keys, key=sort_keys.__getitem__):
                yield from by_due(by_tenant[tenant], [each.turn for each in by_tenant[tenant]], now_s)

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
        return sum(len(line) for each, lines in self._waiting.items() if each < priority for line in lines.values())

    def num_ahead(self, priority: int, tenant: str) -> float:
        """Number of sequences that would go before a newcomer's, if nobody else comes."""
        num = float(self.num_before(priority))
        lines = self._waiting.get(priority, {})
        num_own = len(lines.get(tenant, ()))
        # While the tenant's own go, each other tenant has as many by its weight, and at most all that it has waiting.
        return num + num_own + sum(
            min(len(line), num_own * self._weight(each) / self._weight(tenant) + 1)
            for each, line in lines.items() if each != tenant
        )  # fmt: skip

    def less_entitled_than(self, newcomer: Ticket) -> Ticket | None:
        """The ticket to refuse in favour of a newcomer: the newest one of the tenant with most waiting for its weight,
        at the last priority. None if that would be the newcomer itself."""
        for priority in sorted(self._waiting, reverse=True):
            lines = self._waiting[priority]
            found = [
                (len(line) / self._weight(tenant), tenant) for tenant, line in lines.items() if line[-1].is_sheddable
            ]
            if priority < newcomer.priority:
                return None
            if not found:
                continue
            share, tenant = max(found)
            own = (len(lines.get(newcomer.tenant, ())) + 1) / self._weight(newcomer.tenant)
            if priority > newcomer.priority or share > own:
                return lines[tenant][-1]
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
