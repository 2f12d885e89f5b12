"""Queue of several owners: items of a stream leave in order, an owner's streams take turns, and so do the owners.

An owner is a peer that sends events to a worker's core, or a tenant whose requests cost work. It may have as much
waiting as is still free. So one that floods takes half of the room at most, two take a third each, and one with little
to say always finds some, whatever number of streams the others open.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class _Owner(Generic[ItemT]):
    """The waiting items of one owner, each with its size."""

    size: int = 0
    streams: dict[Hashable, deque[tuple[ItemT, int]]] = field(default_factory=dict)  # first whose turn it is


class RoundRobin(Generic[ItemT]):
    """A queue for each stream of each owner. Any thread may call each method."""

    def __init__(self, max_size: float = math.inf) -> None:
        """max_size: of the items that may wait of all owners together."""
        self._max_size = max_size
        self._size = 0
        self._num_items = 0
        self._owners: dict[Hashable, _Owner[ItemT]] = {}  # owners with items, those first whose turn it is
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_items

    def has_room(self, owner: Hashable) -> bool:
        """Whether the owner may have more waiting now. Otherwise some of its items have to be taken first."""
        with self._lock:
            waiting = self._owners.get(owner)
            return (0 if waiting is None else waiting.size) < self._max_size - self._size

    def put(self, owner: Hashable, stream: Hashable, item: ItemT, size: int = 1) -> bool:
        """Adds an item of this size; returns False when too much waits of all owners together."""
        with self._lock:
            if self._size >= self._max_size:
                return False
            waiting = self._owners.setdefault(owner, _Owner())
            waiting.streams.setdefault(stream, deque()).append((item, size))
            waiting.size += size
            self._size += size
            self._num_items += 1
            return True

    def take(self, rank: Callable[[Hashable], int] | None = None) -> ItemT | None:
        """Removes and returns the next item; None when there is none. Owners of the lowest `rank` go first."""
        with self._lock:
            if not self._owners:
                return None
            # `min` returns the first of several that are alike.
            owner = next(iter(self._owners)) if rank is None else min(self._owners, key=rank)
            waiting = self._owners.pop(owner)
            stream = next(iter(waiting.streams))
            queue = waiting.streams.pop(stream)
            item, size = queue.popleft()
            if queue:
                waiting.streams[stream] = queue  # behind all others
            self._leave(waiting, 1, size)
            if waiting.streams:
                self._owners[owner] = waiting
            return item

    def forget(self, owner: Hashable, stream: Hashable) -> None:
        """Drops the items of a stream that has ended."""
        with self._lock:
            waiting = self._owners.get(owner)
            if waiting is None:
                return
            queue = waiting.streams.pop(stream, deque())
            self._leave(waiting, len(queue), sum(size for _, size in queue))
            if not waiting.streams:
                del self._owners[owner]

    def _leave(self, waiting: _Owner[ItemT], num_items: int, size: int) -> None:
        waiting.size -= size
        self._size -= size
        self._num_items -= num_items
