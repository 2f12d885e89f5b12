"""Events of peer workers on their way to a worker's core: those of each stream in order, and peers in turns.

A peer may have as much waiting as is still free. So one that floods takes half of the room at most, two take a third
each, and one with little to say always finds some, whatever number of streams the others open.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


@dataclass(slots=True)
class _Peer(Generic[EventT]):
    """The waiting events of one peer, each with its size."""

    size: int = 0
    streams: dict[Hashable, deque[tuple[EventT, int]]] = field(default_factory=dict)  # first whose turn it is


class PeerEvents(Generic[EventT]):
    """A queue for each stream of each peer. Any thread may call each method."""

    def __init__(self, max_size: int) -> None:
        """max_size: of the events that may wait of all peers together."""
        self._max_size = max_size
        self._size = 0
        self._num_events = 0
        self._peers: dict[Hashable, _Peer[EventT]] = {}  # peers with events, those first whose turn it is
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_events

    def has_room(self, peer: Hashable) -> bool:
        """Whether the peer may send more now. Otherwise it has to wait until some of its events were taken."""
        with self._lock:
            waiting = self._peers.get(peer)
            return (0 if waiting is None else waiting.size) < self._max_size - self._size

    def put(self, peer: Hashable, stream: Hashable, event: EventT, size: int = 1) -> bool:
        """Adds an event of this size; returns False when too much waits of all peers together."""
        with self._lock:
            if self._size >= self._max_size:
                return False
            waiting = self._peers.setdefault(peer, _Peer())
            waiting.streams.setdefault(stream, deque()).append((event, size))
            waiting.size += size
            self._size += size
            self._num_events += 1
            return True

    def take(self) -> EventT | None:
        """Removes and returns the next event; None when there is none."""
        with self._lock:
            if not self._peers:
                return None
            peer = next(iter(self._peers))
            waiting = self._peers.pop(peer)
            stream = next(iter(waiting.streams))
            queue = waiting.streams.pop(stream)
            event, size = queue.popleft()
            if queue:
                waiting.streams[stream] = queue  # behind all others
            self._leave(waiting, 1, size)
            if waiting.streams:
                self._peers[peer] = waiting
            return event

    def forget(self, peer: Hashable, stream: Hashable) -> None:
        """Drops the events of a stream that has ended."""
        with self._lock:
            waiting = self._peers.get(peer)
            if waiting is None:
                return
            queue = waiting.streams.pop(stream, deque())
            self._leave(waiting, len(queue), sum(size for _, size in queue))
            if not waiting.streams:
                del self._peers[peer]

    def _leave(self, waiting: _Peer[EventT], num_events: int, size: int) -> None:
        waiting.size -= size
        self._size -= size
        self._num_events -= num_events
