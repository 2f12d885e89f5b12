"""Events of peer workers on their way to a worker's core: those of each peer in order, and peers in turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class PeerEvents(Generic[EventT]):
    """A bounded queue for each peer. Any thread may call each method."""

    def __init__(self, max_events: int) -> None:
        """max_events: that may wait of all peers together."""
        self._max_events = max_events
        self._num_events = 0
        self._queues: dict[Hashable, deque[EventT]] = {}  # peers with events, those first whose turn it is
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_events

    def put(self, peer: Hashable, event: EventT, room: int) -> bool:
        """Adds an event; returns False when there are too many, or `room` of its peer."""
        with self._lock:
            if self._num_events >= self._max_events or len(self._queues.get(peer, ())) >= room:
                return False
            self._queues.setdefault(peer, deque()).append(event)
            self._num_events += 1
            return True

    def take(self) -> EventT | None:
        """Removes and returns the next event; None when there is none."""
        with self._lock:
            if not self._queues:
                return None
            peer = next(iter(self._queues))
            queue = self._queues.pop(peer)
            event = queue.popleft()
            self._num_events -= 1
            if queue:
                self._queues[peer] = queue  # behind all others
            return event

    def forget(self, peer: Hashable) -> None:
        """Drops the events of a peer that has gone."""
        with self._lock:
            self._num_events -= len(self._queues.pop(peer, ()))
