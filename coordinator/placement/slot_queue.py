"""The queue of one model's sequences that wait for slots at targets, in one replica. Pure.

A sequence is sent to a target when there is a slot for it, and waits here until then. Priorities and the tenants'
shares decide who is next (`coordinator.placement.fair_queue`); the first target with room takes it. A sequence that
would wait too long is refused before any work, with the time to come back.

Every free slot is offered in the order of the queue. A sequence is passed only by those that fit where it does not: a
long one waits for a target with enough room and is offered every slot there before those behind it. Short ones behind
it still get slots at the other targets, however many long ones there are.

Reserving a slot takes time and happens elsewhere: `Round.next` names the request to try and its targets, and
`SlotQueue.take` receives the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from coordinator.placement.fair_queue import FairQueue, Ticket
from coordinator.placement.lanes import Lane, Lanes
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.routing import Router
from coordinator.placement.slot_search import SlotSearch
from outrider.concurrency.turnover import Turnover, retry_after_s
from outrider.errors import DeadlineExceeded, Overloaded, Unavailable
from outrider.registry.worker_record import WorkerRecord
from outrider.sampling_params import BACKGROUND_PRIORITY

URGENT_WAIT_S: Final = 1.0
"""Longest wait of a sequence that has begun, before it chooses again: targets that it had left may be possible then."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A reserved slot at a target for one sequence."""

    target: WorkerRecord
    token: str
    since_s: float  # since when it is reserved
    tenant: str = ""
    is_background: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A request to try now: the targets to ask, in order, each with the most sequences it may have."""

    request: PlacementRequest
    ranked: Sequence[WorkerRecord]  # all possible targets
    asked: Sequence[WorkerRecord]
    limits: Sequence[int]


class SlotQueue:
    """Waiting sequences and given slots of one model. Times are seconds on the caller's clock."""

    def __init__(self, model: str, router: Router, *, wait_max_s: float, weights: Mapping[str, float]) -> None:
        """`wait_max_s`: longest wait of a sequence that has not begun; `weights`: of tenants, by default 1."""
        self._model = model
        self._router = router
        self._wait_max_s = wait_max_s
        self._full_at_s = -math.inf  # when a target without room was last asked
        self.queue = FairQueue(weights)
        self.turnover = Turnover()
        self.lanes = Lanes()
        self.waiting: dict[Ticket, PlacementRequest] = {}
        self.num_entries = 0  # of the queue, so far
        self.num_held = 0  # slots, without those of background sequences

    def __len__(self) -> int:
        return len(self.queue)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait, without those of batches, for which nobody waits."""
        return self.queue.num_before(BACKGROUND_PRIORITY)

    @property
    def retry_after_s(self) -> float:
        """Time after which a refused request should come back: about when all that wait now have had slots."""
        return retry_after_s(self.turnover.wait_s(self.num_waiting, self.num_held))

    def push(self, request: PlacementRequest, now_s: float) -> float:
        """Queues the request; returns the moment until which it waits. Raises its `timeout_error` if that has passed,
        and Overloaded if its slot would come later."""
        if request.is_urgent:
            until_s = min(now_s + URGENT_WAIT_S, request.deadline_s)
        else:
            until_s = min(request.since_s + self._wait_max_s, request.deadline_s)
            if now_s >= until_s:
                raise self.timeout_error(request, now_s)
            self._check_wait(request.ticket, until_s - now_s, is_deadline=until_s == request.deadline_s)
        request.entry = self.num_entries = self.num_entries + 1
        self._enter(request)
        return until_s

    def forget(self, request: PlacementRequest) -> None:
        """Removes a request that no longer waits."""
        if self.waiting.pop(request.ticket, None) is not None:
            self.lanes.remove(request, lane_of(request))
            self.queue.remove(request.ticket)

    def _enter(self, request: PlacementRequest) -> None:
        request.ticket.lane = lane = self.lanes.lane_of(request)
        self.queue.push(request.ticket)
        self.lanes.add(request, lane)
        self.waiting[request.ticket] = request

    def change_lane(self, request: PlacementRequest) -> bool:
        """Moves a request to the lane of its restrictions as of now. False if it is there already."""
        before, after = lane_of(request), self.lanes.lane_of(request)
        if (after.restrictions, after.siblings) == (before.restrictions, before.siblings):
            return False
        self.lanes.remove(request, before)
        self.queue.move(request.ticket, after)
        self.lanes.add(request, after)
        return True

    def check_room(self, ticket: Ticket, time_left_s: float) -> None:
        """Raises Overloaded if `push` would, as of now."""
        if self.queue:
            self._check_wait(ticket, min(self._wait_max_s, time_left_s), is_deadline=time_left_s <= self._wait_max_s)

    def timeout_error(self, request: PlacementRequest, now_s: float) -> Overloaded | Unavailable | DeadlineExceeded:
        """The error for a request that has waited its longest without a slot."""
        if now_s >= request.deadline_s:
            return DeadlineExceeded("no target had a slot before the request's deadline")
        if not self.num_held and self._full_at_s < request.since_s:  # those that were there did not answer
            return Unavailable(f"no target of {self._model} has answered within {self._wait_max_s:g} s")
        return Overloaded(
            f"every target of {self._model} is full: none had a slot within {self._wait_max_s:g} s",
            self.retry_after_s,
        )

    def offer(self, request: PlacementRequest, now_s: float, search: SlotSearch | None = None) -> Offer:
        """Makes the offer of a request: the targets that may be asked, without those that a search has found full."""
        router, is_urgent, ranked = self._router, request.is_urgent, request.rank()
        self.lanes.learn(ranked)
        free = ranked if search is None else search.not_full(ranked)
        kind = {"is_urgent": is_urgent, "is_background": request.is_background}
        asked = [worker for worker in free if router.may_ask(worker, now_s, **kind)]
        limits = [router.slot_limit(worker, **kind) for worker in asked]
        return Offer(request, ranked, asked, limits)

    def take(self, offer: Offer, target: WorkerRecord | None, now_s: float) -> Slot | None:
        """Records the outcome of an offer: a reservation at one of the targets asked, or at none."""
        request = offer.request
        if target is None:
            if offer.ranked:
                self._full_at_s = now_s
            return None
        self._router.open_session(target)
        self.num_held += not request.is_background
        self.queue.take_slot(request.ticket.tenant)
        siblings, is_first = request.ticket.siblings, not request.ticket.siblings.have_begun
        self.queue.begin(request.ticket)
        for sibling in self.lanes.of_request(siblings) if is_first else ():
            self.change_lane(sibling)
        return Slot(target, request.token, now_s, request.ticket.tenant, request.is_background)

    def leave(self, slot: Slot, now_s: float) -> None:
        """Frees the slot of a sequence that has left its target."""
        self._router.close_session(slot.target)
        self.queue.leave_slot(slot.tenant)
        if not slot.is_background:  # others wait for no end of these
            self.num_held -= 1
            self.turnover.leave(now_s - slot.since_s)

    def shed_for(self, newcomer: Ticket, num: int) -> list[PlacementRequest]:
        """Takes `num` sequences less entitled than a newcomer's out of the queue; none if there are not so many."""
        shed: list[PlacementRequest] = []
        while len(shed) < num and (ticket := self.queue.less_entitled_than(newcomer)) is not None:
            shed.append(self.waiting[ticket])
            self.forget(shed[-1])
        if len(shed) < num:
            for request in shed:
                self._enter(request)
            return []
        return shed

    def _check_wait(self, ticket: Ticket, wait_max_s: float, *, is_deadline: bool) -> None:
        num_ahead = self.queue.num_ahead(ticket.priority, ticket.tenant)
        wait_s = self.turnover.wait_s(num_ahead, self.num_held)
        if wait_s > wait_max_s:
            limit = "its deadline allows" if is_deadline else f"the {self._wait_max_s:g} s that sequences wait"
            raise Overloaded(
                f"every target of {self._model} is taken; with {self.num_waiting} sequences waiting, this one would "
                f"have a slot in about {wait_s:.1f} s, which is more than {limit}",
                self.retry_after_s,
            )


class Round:
    """One pass over the queue in its order."""

    def __init__(self, slots: SlotQueue) -> None:
        self._slots = slots
        self._last_entry = slots.num_entries  # those that come later are for the next pass, so that this one ends
        self._search = SlotSearch()
        for lane in slots.lanes.of_one_request():
            while (first := slots.lanes.first(lane)) is not None and slots.change_lane(first):
                pass  # and so do its siblings

    def next(self, now_s: float) -> Offer | None:
        """The next request to try; None if no other could have a slot now."""
        slots = self._slots
        while (request := self._first(now_s)) is not None:
            if not slots.change_lane(request):
                return slots.offer(request, now_s, self._search)
        return None

    def _first(self, now_s: float) -> PlacementRequest | None:
        slots, search = self._slots, self._search
        for ticket in slots.queue.ordered(now_s, lambda lane: slots.lanes.is_in_vain(cast(Lane, lane), search)):
            request = slots.waiting[ticket]
            is_in_vain = search.is_in_vain(request.num_tokens, lane_of(request).restrictions)
            if not is_in_vain and request.entry <= self._last_entry:
                return request
        return None

    def found_full(self, offer: Offer) -> None:
        """Records that no target of the request had a slot."""
        slots, restrictions = self._slots, offer.request.restrictions()
        if offer.request.ticket in slots.waiting:  # they may have changed meanwhile
            slots.change_lane(offer.request)
        self._search.found_full(offer.request.num_tokens, restrictions, offer.ranked)
        while (shortest := slots.lanes.shortest(restrictions)) is not None:
            if not slots.change_lane(shortest):
                ranked = shortest.rank()
                slots.lanes.learn(ranked)
                self._search.look_shorter(restrictions, ranked)
                return


def lane_of(request: PlacementRequest) -> Lane:
    """The lane in which a request waits."""
    lane = request.ticket.lane
    assert isinstance(lane, Lane)
    return lane
