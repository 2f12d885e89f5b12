"""What a session could feed next, the most urgent first. Pure."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Candidate(NamedTuple):
    """A node, or a node's likeliest alternative, which is to become one. Ordered by its first two."""

    rank: float  # minus its priority
    number: int  # unlike any other's; of equal ranks the older comes first
    node_id: int
    is_alternative: bool  # the likeliest one below `node_id`, instead of the node itself
    reach: float  # how likely it is to be reached


class Candidates:
    """Of one session."""

    def __init__(self) -> None:
        self._heap: list[Candidate] = []
        self._num_added = 0

    def clear(self) -> None:
        self._heap = []

    def add(self, priority: float, node_id: int, reach: float, *, is_alternative: bool) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, Candidate(-priority, self._num_added, node_id, is_alternative, reach))

    @property
    def highest_priority(self) -> float:
        """0.0 where there is none."""
        return -self._heap[0].rank if self._heap else 0.0

    def take(self) -> Candidate:
        """The most urgent one; there must be one."""
        return heapq.heappop(self._heap)
