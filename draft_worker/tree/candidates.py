"""Nodes that a session could feed next, ordered by priority. Pure."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Candidate(NamedTuple):
    """A node, or a node's likeliest alternative, which becomes a node when taken. Ordered by rank, then number."""

    rank: float  # the negative priority
    number: int  # unique; of equal ranks the older comes first
    node_id: int
    is_alternative: bool  # the likeliest alternative of `node_id`, instead of the node itself
    reach: float  # probability that the committed tokens reach it


class Candidates:
    """Priority queue of the candidates of one session."""

    def __init__(self) -> None:
        self._heap: list[Candidate] = []
        self._num_added = 0

    def clear(self) -> None:
        self._heap = []

    def add(self, priority: float, node_id: int, reach: float, *, is_alternative: bool) -> None:
        """Adds a node to expand; `reach` is the probability that the committed tokens reach it."""
        self._num_added += 1
        heapq.heappush(self._heap, Candidate(-priority, self._num_added, node_id, is_alternative, reach))

    @property
    def highest_priority(self) -> float:
        """Priority of the first candidate; 0.0 where there is none."""
        return -self._heap[0].rank if self._heap else 0.0

    def take(self) -> Candidate:
        """Removes and returns the candidate of highest priority; the queue must not be empty."""
        return heapq.heappop(self._heap)
