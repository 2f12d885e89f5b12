"""Lanes of the sequences that wait for a slot: one lane's fit the same targets, so one look finds them all full. Pure.

A lane is more a guess than a promise, so that it costs nothing to keep: a pass leaves it out only if its shortest and
its longest sequence are in vain, and looks at each sequence of the others. Where context lengths of targets are not
known yet, a lane is wider than it could be, and a pass looks at more.

What restricts a sequence may change while it waits, once its request has begun: the sequences of one request are bound
to the weights of the first, or one of them is lost with a target. So they have lanes of their own from then on, and
each pass looks at one sequence of these lanes, since all of a request change together.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final, NamedTuple

from coordinator.placement.fair_queue import Siblings
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.slot_search import Restrictions, SlotSearch
from outrider.registry.worker_record import WorkerRecord

LENGTHS_MAX: Final = 16
"""Most context lengths of targets that separate lanes."""


class Lane(NamedTuple):
    """Sequences with these restrictions that need targets of one context length."""

    restrictions: Restrictions
    siblings: Siblings | None  # of one request, if it has begun or is restricted
    fits_from: float  # the least known context length that is enough; infinite if none is


class Lanes:
    """The lanes of one queue, each with its sequences by length."""

    def __init__(self) -> None:
        self._members: dict[Lane, list[tuple[int, int, PlacementRequest]]] = {}  # by tokens, then by arrival
        self._siblings: dict[Siblings, dict[PlacementRequest, None]] = {}
        self._lengths: list[int] = []  # context lengths, in order

    def learn(self, targets: Iterable[WorkerRecord]) -> None:
        """Notes the context lengths of targets, for sequences that enter from now on."""
        for target in targets:
            place = bisect_left(self._lengths, target.max_model_len)
            if self._lengths[place : place + 1] != [target.max_model_len] and len(self._lengths) < LENGTHS_MAX:
                self._lengths.insert(place, target.max_model_len)

    def lane_of(self, request: PlacementRequest) -> Lane:
        """The lane that the request belongs to as of now."""
        restrictions, siblings = request.restrictions(), request.ticket.siblings
        place = bisect_left(self._lengths, request.num_tokens)
        return Lane(
            restrictions,
            siblings if restrictions or siblings.have_begun else None,
            self._lengths[place] if place < len(self._lengths) else math.inf,
        )

    def add(self, request: PlacementRequest, lane: Lane) -> None:
        insort(self._members.setdefault(lane, []), (request.num_tokens, request.ticket.arrival, request))
        self._siblings.setdefault(request.ticket.siblings, {})[request] = None

    def remove(self, request: PlacementRequest, lane: Lane) -> None:
        members, siblings = self._members[lane], self._siblings[request.ticket.siblings]
        del members[bisect_left(members, (request.num_tokens, request.ticket.arrival))]
        del siblings[request]
        if not members:
            del self._members[lane]
        if not siblings:
            del self._siblings[request.ticket.siblings]

    def of_request(self, siblings: Siblings) -> list[PlacementRequest]:
        """The sequences of one request."""
        return list(self._siblings.get(siblings, ()))

    def is_in_vain(self, lane: Lane, search: SlotSearch) -> bool:
        """Whether all targets of all its sequences are known to be full."""
        members = self._members[lane]
        return all(search.is_in_vain(length, lane.restrictions) for length, *_ in (members[0], members[-1]))

    def shortest(self, restrictions: Restrictions) -> PlacementRequest | None:
        """The shortest sequence of the lanes with these restrictions; None if there is none."""
        found = [members[0] for lane, members in self._members.items() if lane.restrictions == restrictions]
        return min(found)[-1] if found else None

    def of_one_request(self) -> list[Lane]:
        """The lanes of requests of their own, whose restrictions may change."""
        return [lane for lane in self._members if lane.siblings is not None]

    def first(self, lane: Lane) -> PlacementRequest | None:
        """The shortest sequence of a lane; None if it has none."""
        return self._members[lane][0][-1] if lane in self._members else None
