"""Whose turn it is where requests wait for a place at a target. Pure.

Lower priority numbers go first. Among equals it is the turn of the tenant that has been served least, by its weight:
the virtual token counters of Sheng et al., 2401.00588. A tenant that has had nothing waiting begins at the counter of
those that wait, so that nobody saves up. One tenant's requests keep the order of their arrival.

A tenant has a share of the slots as well, by the same weights. Of those that wait at one priority, those that another
slot would take beyond their share, rounded up, have their turns after all others: a free slot is theirs only where no
sequence of the others fits. So a tenant that is alone may hold everything, nothing that runs is ended, and a slot that
somebody could use is never kept free. Sequences that have begun are not held back. The slots are those that one replica
has given out: it does not know what tenants hold through others.

Invariant: what is remembered is bounded by what waits and what is held, and by TENANTS_MAX.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

URGENT: Final = -(2**31)
"""Priority of a text that has begun: its client has seen tokens, and waits for the next one."""
OUTPUT_TOKEN_PRICE: Final = 2.0
"""Of a generated token, in prompt tokens, as 2401.00588 has it."""
TENANTS_MAX: Final = 4096
_ROUNDING: Final = 1e-9  # of a share that is a whole number


@dataclass(slots=True, eq=False)
class Siblings:
    """The sequences of one request, which fails as a whole."""

    have_begun: bool = False  # one of them has had its turn


@dataclass(slots=True, eq=False)
class Ticket:
    """One text's place in the queue."""

    priority: int = 0
    tenant: str = ""
    num_prompt_tokens: int = 0
    may_be_shed: bool = True  # for one whose turn would come earlier, where there is no room for both
    siblings: Siblings = field(default_factory=Siblings)
    arrival: int = field(default=0, init=False)  # set by the queue, once
    has_had_turn: bool = field(default=False, init=False)

    @property
    def is_sheddable(self) -> bool:
        """Whether its request may be refused now: nothing of it has begun."""
        return self.may_be_shed and not self.siblings.have_begun


class FairQueue:
    """Tickets in the order of their turns."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants, above 0; 1 for those that it does not name."""
        self._weights = dict(weights or {})
        self._waiting: dict[int, dict[str, list[Ticket]]] = {}  # by priority and tenant
        self._num_waiting_of: Counter[str] = Counter()
        self._num_held_of: Counter[str] = Counter()  # slots
        self._served: dict[str, float] = {}  # virtual tokens by tenant
        self._floor = 0.0  # of the counter of whoever comes anew
        self._arrivals = itertools.count(1)

    def __len__(self) -> int:
        return self._num_waiting_of.total()

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._waiting.get(ticket.priority, {}).get(ticket.tenant, ())

    def push(self, ticket: Ticket) -> None:
        """One that comes back has the turn that it had."""
        if not ticket.arrival:
            ticket.arrival = next(self._arrivals)
        if ticket.tenant not in self._num_waiting_of:
            counters = [self._served[tenant] for tenant in self._num_waiting_of]
            self._floor = min(counters, default=self._floor)
            self._forget_some()
            self._served[ticket.tenant] = max(self._served.get(ticket.tenant, 0.0), self._floor)
        line = self._waiting.setdefault(ticket.priority, {}).setdefault(ticket.tenant, [])
        insort(line, ticket, key=lambda each: each.arrival)
        self._num_waiting_of[ticket.tenant] += 1

    def remove(self, ticket: Ticket) -> None:
        """It has had its turn, or does not wait any longer."""
        by_tenant = self._waiting[ticket.priority]
        by_tenant[ticket.tenant].remove(ticket)
        if not by_tenant[ticket.tenant]:
            del by_tenant[ticket.tenant]
        if not by_tenant:
            del self._waiting[ticket.priority]
        self._num_waiting_of[ticket.tenant] -= 1
        if not self._num_waiting_of[ticket.tenant]:
            del self._num_waiting_of[ticket.tenant]
            if not self._num_waiting_of:
                self._floor = max(self._floor, self._served[ticket.tenant])

    def turns(self, limit: int | None = None) -> list[Ticket]:
        """The next ones, at most `limit`, as things stand."""
        return list(itertools.islice(self._in_order(), limit))

    def _in_order(self) -> Iterator[Ticket]:
        for priority in sorted(self._waiting):
            by_tenant = self._waiting[priority]
            beyond = self._beyond_share(by_tenant) if priority != URGENT else frozenset()
            turns = {
                tenant: (tenant in beyond, self._served[tenant], line[0].arrival)
                for tenant, line in by_tenant.items()
            }
            for tenant in sorted(turns, key=turns.__getitem__):
                yield from by_tenant[tenant]

    def _beyond_share(self, tenants: Collection[str]) -> frozenset[str]:
        """Those of these tenants, all of which wait, that one more slot would take beyond their share of all that they
        hold, that slot included. Never all of them, and never one that holds nothing."""
        held = {tenant: self._num_held_of[tenant] for tenant in tenants}
        slots_per_weight = (sum(held.values()) + 1) / sum(map(self._weight, tenants))
        return frozenset(
            tenant
            for tenant, num in held.items()
            if num >= max(math.ceil(slots_per_weight * self._weight(tenant) - _ROUNDING), 1)
        )

    def begin(self, ticket: Ticket) -> None:
        """Counts what its prompt takes, at its first turn."""
        ticket.siblings.have_begun = True
        if not ticket.has_had_turn:
            ticket.has_had_turn = True
            self._charge(ticket.tenant, ticket.num_prompt_tokens)

    def take_slot(self, tenant: str) -> None:
        """A sequence of the tenant's has a slot, until `leave_slot`."""
        self._num_held_of[tenant] += 1

    def leave_slot(self, tenant: str) -> None:
        """Reverses one `take_slot`."""
        assert self._num_held_of[tenant] > 0, "left more slots than were taken"
        self._num_held_of[tenant] -= 1
        if not self._num_held_of[tenant]:
            del self._num_held_of[tenant]

    def count_output(self, tenant: str, num_tokens: int) -> None:
        """Counts tokens that were generated for it."""
        self._charge(tenant, num_tokens * OUTPUT_TOKEN_PRICE)

    def _charge(self, tenant: str, num_tokens: float) -> None:
        if tenant in self._served or len(self._served) < TENANTS_MAX:
            served = self._served.get(tenant, self._floor)
            self._served[tenant] = served + num_tokens / self._weight(tenant)

    def num_ahead(self, priority: int, tenant: str) -> float:
        """Of a newcomer: how many have their turns before it, if nobody else comes."""
        num = float(sum(
            len(line) for each, lines in self._waiting.items() if each < priority for line in lines.values()
        ))  # fmt: skip
        lines = self._waiting.get(priority, {})
        num_own = len(lines.get(tenant, ()))
        # While its own have their turns, another tenant has as many by its weight, and no more than it has waiting.
        return num + num_own + sum(
            min(len(line), num_own * self._weight(each) / self._weight(tenant) + 1)
            for each, line in lines.items() if each != tenant
        )  # fmt: skip

    def less_entitled_than(self, newcomer: Ticket) -> Ticket | None:
        """The ticket to turn away in favour of a newcomer: of the last priority, of the tenant with most waiting for
        its weight, the newest. None when the newcomer itself is that one."""
        for priority in sorted(self._waiting, reverse=True):
            lines = self._waiting[priority]
            found = [
                (len(line) / self._weight(tenant), tenant)
                for tenant, line in lines.items()
                if line[-1].is_sheddable
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
        """Those that were served least: they would begin at the floor anyway, or not far above it."""
        if len(self._served) < TENANTS_MAX:
            return
        idle = sorted((tenant for tenant in self._served if tenant not in self._num_waiting_of),
                      key=self._served.__getitem__)  # fmt: skip
        for tenant in idle[: len(self._served) - TENANTS_MAX // 2]:
            del self._served[tenant]
