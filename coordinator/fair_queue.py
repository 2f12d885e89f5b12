"""Whose turn it is where requests wait for a place at a target. Pure.

Lower priority numbers go first. Among equals it is the turn of the tenant that has been served least, by its weight:
the virtual token counters of Sheng et al., 2401.00588. A tenant that has had nothing waiting begins at the counter of
those that wait, so that nobody saves up. One tenant's requests keep the order of their arrival.

Invariant: what is remembered is bounded by what waits, and by TENANTS_MAX.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

URGENT: Final = -(2**31)
"""Priority of a text that has begun: its client has seen tokens, and waits for the next one."""
OUTPUT_TOKEN_PRICE: Final = 2.0
"""Of a generated token, in prompt tokens, as 2401.00588 has it."""
TENANTS_MAX: Final = 4096


@dataclass(slots=True, eq=False)
class Ticket:
    """One text's place in the queue."""

    priority: int = 0
    tenant: str = ""
    num_prompt_tokens: int = 0
    may_be_shed: bool = True  # for one whose turn would come earlier, where there is no room for both
    arrival: int = field(default=0, init=False)  # set by the queue, once
    has_had_turn: bool = field(default=False, init=False)


class FairQueue:
    """Tickets in the order of their turns."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants, above 0; 1 for those that it does not name."""
        self._weights = dict(weights or {})
        self._waiting: dict[int, dict[str, list[Ticket]]] = {}  # by priority and tenant
        self._num_waiting_of: Counter[str] = Counter()
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

    def turns(self, limit: int) -> list[Ticket]:
        """The next ones, at most `limit`, as things stand."""
        return list(itertools.islice(self._in_order(), limit))

    def _in_order(self) -> Iterator[Ticket]:
        for priority in sorted(self._waiting):
            by_tenant = self._waiting[priority]
            for tenant in sorted(
                by_tenant, key=lambda each: (self._served[each], by_tenant[each][0].arrival)
            ):
                yield from by_tenant[tenant]

    def begin(self, ticket: Ticket) -> None:
        """Counts what its prompt takes, at its first turn."""
        if not ticket.has_had_turn:
            ticket.has_had_turn = True
            self._charge(ticket.tenant, ticket.num_prompt_tokens)

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
        num_equal = sum(map(len, lines.values()))
        shares = sum(self._weight(each) for each in {*lines, tenant})
        num_own = len(lines.get(tenant, ()))
        return num + min(num_equal, num_own * shares / self._weight(tenant) + len(lines.keys() - {tenant}))

    def less_entitled_than(self, newcomer: Ticket) -> Ticket | None:
        """The ticket to turn away in favour of a newcomer: of the last priority, of the tenant with most waiting for
        its weight, the newest. None when the newcomer itself is that one."""
        for priority in sorted(self._waiting, reverse=True):
            lines = self._waiting[priority]
            found = [
                (len(line) / self._weight(tenant), tenant)
                for tenant, line in lines.items()
                if line[-1].may_be_shed
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
