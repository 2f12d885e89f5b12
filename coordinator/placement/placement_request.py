"""A sequence that needs a slot at a target. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.placement.fair_queue import URGENT, Ticket
from coordinator.placement.slot_search import Restrictions
from outrider.registry.worker_record import WorkerRecord


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """A sequence that needs a slot."""

    model: str
    ticket: Ticket
    rank: Callable[[], Sequence[WorkerRecord]]  # targets as of now, the one to take first in front
    is_hopeless: Callable[[], bool]  # whether waiting is useless if `rank` names no target
    token: str  # of its reservation, unique
    since_s: float  # since when it needs one
    deadline_s: float
    # Together with the live workers these determine `rank()`: the length in tokens, and other restrictions.
    num_tokens: int
    restrictions: Callable[[], Restrictions]
    is_background: bool = False  # it leaves slots of each target free, and makes room for others
    entry: int = field(default=0, init=False)  # counts up with each time that one enters the queue

    @property
    def is_urgent(self) -> bool:
        """Whether the sequence has begun."""
        return self.ticket.priority == URGENT
