"""The queue as it is defined, without any thought of what it costs: each look sorts all that wait.

Tests compare it with `coordinator.placement`, which keeps what waits in order.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from coordinator.placement.fair_queue import OUTPUT_TOKEN_PRICE, URGENT, Ticket
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.slot_search import SlotSearch
from outrider.objective import Turn, by_due
from outrider.registry.worker_record import WorkerRecord


class ReferenceQueue:
    """As `FairQueue`, with tickets of its own."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._waiting: dict[int, dict[str, list[Ticket]]] = {}
        self._num_waiting_of: Counter[str] = Counter()
        self._num_held_of: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        self._floor = 0.0
        self._arrivals = itertools.count(1)

    def push(self, ticket: Ticket) -> None:
        if not ticket.arrival:
            ticket.arrival = next(self._arrivals)
        if ticket.tenant not in self._num_waiting_of:
            self._floor = min((self._served[tenant] for tenant in self._num_waiting_of), default=self._floor)
            self._served[ticket.tenant] = max(self._served.get(ticket.tenant, 0.0), self._floor)
        line = self._waiting.setdefault(ticket.priority, {}).setdefault(ticket.tenant, [])
        insort(line, ticket, key=lambda each: each.arrival)
        self._num_waiting_of[ticket.tenant] += 1

    def remove(self, ticket: Ticket) -> None:
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

    def ordered(self, now_s: float) -> Iterator[Ticket]:
        for priority in sorted(self._waiting):
            by_tenant = self._waiting[priority]
            beyond = self._beyond_share(by_tenant) if priority != URGENT else frozenset()
            sort_keys = {
                tenant: (tenant in beyond, self._served[tenant], line[0].arrival) for tenant, line in by_tenant.items()
            }
            for tenant in sorted(sort_keys, key=sort_keys.__getitem__):
                line = by_tenant[tenant]
                due_s = [math.inf if priority == URGENT else each.due_s for each in line]
                yield from by_due(line, [Turn(None, each.since_s, due) for each, due in zip(line, due_s, strict=True)], now_s)  # fmt: skip  # noqa: E501

    def _beyond_share(self, tenants: Collection[str]) -> frozenset[str]:
        held = {tenant: self._num_held_of[tenant] for tenant in tenants}
        slots_per_weight = (sum(held.values()) + 1) / sum(map(self._weight, tenants))
        return frozenset(
            tenant
            for tenant, num in held.items()
            if num >= max(math.ceil(slots_per_weight * self._weight(tenant) - 1e-9), 1)
        )

    def begin(self, ticket: Ticket) -> None:
        ticket.siblings.have_begun = True
        if not ticket.is_charged:
            ticket.is_charged = True
            self._charge(ticket.tenant, ticket.num_prompt_tokens)

    def take_slot(self, tenant: str) -> None:
        self._num_held_of[tenant] += 1

    def leave_slot(self, tenant: str) -> None:
        self._num_held_of[tenant] -= 1

    def count_output(self, tenant: str, num_tokens: int) -> None:
        self._charge(tenant, num_tokens * OUTPUT_TOKEN_PRICE)

    def _charge(self, tenant: str, num_tokens: float) -> None:
        self._served[tenant] = self._served.get(tenant, self._floor) + num_tokens / self._weight(tenant)

    def num_before(self, priority: int) -> int:
        return sum(len(line) for each, lines in self._waiting.items() if each < priority for line in lines.values())

    def num_ahead(self, priority: int, tenant: str) -> float:
        lines = self._waiting.get(priority, {})
        num_own = len(lines.get(tenant, ()))
        return self.num_before(priority) + num_own + sum(
            min(len(line), num_own * self._weight(each) / self._weight(tenant) + 1)
            for each, line in lines.items() if each != tenant
        )  # fmt: skip

    def less_entitled_than(self, newcomer: Ticket) -> Ticket | None:
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


def reference_pass(
    requests: Sequence[PlacementRequest], has_room: Callable[[WorkerRecord], bool]
) -> Iterator[tuple[PlacementRequest, Sequence[WorkerRecord]]]:
    """Yields the offers of one pass over `requests`, each with the targets that are asked, until one has a slot."""
    search = SlotSearch()
    for request in requests:
        if search.is_in_vain(request.num_tokens, request.restrictions()):
            continue
        ranked = request.rank()
        asked = search.not_full(ranked)
        yield request, asked
        if any(map(has_room, asked)):
            return
        restrictions = request.restrictions()
        search.found_full(request.num_tokens, restrictions, ranked)
        alike = (each for each in requests if each.restrictions() == restrictions)
        search.look_shorter(restrictions, min(alike, key=lambda each: each.num_tokens).rank())
