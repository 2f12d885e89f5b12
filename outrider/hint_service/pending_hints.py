"""Hints on their way to an engine that takes a bounded amount in a step: which go next. Pure.

Of each request only the newest tree is kept, and of it as many hints as a tree holds. Draft workers' connections take
turns, and so do the requests of each. Only so many hints are under way that the engine has not taken: what a draft
worker sends beyond its turns waits here. Newer hints of its own replace it there, never those of others, and committed
tokens that contradict it drop it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from outrider.hints.hint_tree import ROOT_ID, Hint

NODES_MAX: Final = 512
"""Hints that wait of one request: as many as a hint tree holds."""
TURN_NODES: Final = 64
"""Most hints of a request in one turn."""
REQUEST_NODES: Final = 128
"""Hints of one request that may be under way. A step verifies far fewer, and they come first."""
ENGINE_NODES: Final = 4096
"""Hints of all requests that may be under way."""
PEER_NODES: Final = ENGINE_NODES // 4
"""Those of them that one connection may have: those of others come soon after."""
STEP_NODES: Final = 8
"""One connection may have so many for each open request, up to half of all: a step takes them however short it is."""


@dataclass(slots=True)
class WaitingHints:
    """The hints of one request that have not been sent."""

    peer: Hashable = 0  # the connection that they came on
    base_len: int = 0
    hints: list[Hint] = field(default_factory=list)
    arrived_at: float = 0.0  # the newest of them, seconds
    num_under_way: int = 0  # those that were sent and not taken


class HasHints(Protocol):
    @property
    def waiting(self) -> WaitingHints: ...


R = TypeVar("R", bound=HasHints)
Sent = list[tuple[R, list[Hint]]]
"""A frame: hints by request, below the request's `waiting.base_len`."""


class PendingHints(Generic[R]):
    """The hints of all requests of one engine."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, dict[R, None]] = {}  # requests that may send, those first whose turn it is
        # Frames that the engine has not taken: how many hints of which request and connection.
        self._sent: deque[list[tuple[R, Hashable, int]]] = deque()
        self._num_under_way: dict[Hashable, int] = {}  # by connection; none is 0

    def add(self, request: R, peer: Hashable, base_len: int, hints: list[Hint], arrived_at: float) -> int:
        """Keeps hints until the request has a turn (`queue`); returns how many are dropped, because a tree holds no
        more."""
        waiting = request.waiting
        if base_len < waiting.base_len:
            return 0  # stale
        if base_len > waiting.base_len:
            waiting.hints.clear()
        if peer != waiting.peer:
            self._end_turn(request)
        waiting.peer, waiting.base_len, waiting.arrived_at = peer, base_len, arrived_at
        room = NODES_MAX - len(waiting.hints)
        waiting.hints += hints[:room]
        return max(len(hints) - room, 0)

    def clear(self, request: R) -> None:
        """Drops the hints of a request that wait. Others may follow below any root."""
        self._end_turn(request)
        request.waiting.hints.clear()
        request.waiting.base_len = 0

    def commit(self, request: R, token_ids: Sequence[int]) -> None:
        """Drops the waiting hints that a request's committed tokens contradict."""
        waiting = request.waiting
        if not waiting.hints or not 0 < waiting.base_len < len(token_ids):
            return
        depths, left = {ROOT_ID: 0}, set[int]()  # of nodes that the tokens lead to; nodes that they have left
        kept = list[Hint]()
        for hint in waiting.hints:
            depth = depths.get(hint.parent_id)
            position = len(token_ids) if depth is None else waiting.base_len + depth
            if hint.parent_id in left or (position < len(token_ids) and token_ids[position] != hint.token_id):
                left.add(hint.node_id)
                continue
            if depth is not None:
                depths[hint.node_id] = depth + 1
            kept.append(hint)
        waiting.hints[:] = kept
        if not kept:
            self._end_turn(request)

    def queue(self, request: R) -> None:
        """Gives a request a turn, if it has hints and may send any."""
        waiting = request.waiting
        if waiting.hints and waiting.num_under_way < REQUEST_NODES:
            self._turns.setdefault(waiting.peer, {}).setdefault(request)

    def _end_turn(self, request: R) -> None:
        requests = self._turns.get(request.waiting.peer, {})
        requests.pop(request, None)
        if not requests:
            self._turns.pop(request.waiting.peer, None)

    def take(self, nodes_max: int, requests_max: int, num_open: int = 0) -> Sent[R]:
        """Returns what the next frame has. If it is sent, `sent` must follow at once. num_open: open requests."""
        chosen: Sent[R] = []
        peer_nodes = max(PEER_NODES, min(STEP_NODES * num_open, ENGINE_NODES // 2))
        nodes_max = min(nodes_max, ENGINE_NODES - sum(self._num_under_way.values()))
        while nodes_max > 0 and len(chosen) < requests_max:
            peer = next((each for each in self._turns if self._num_under_way.get(each, 0) < peer_nodes), None)
            if peer is None:
                break
            room = min(nodes_max, peer_nodes - self._num_under_way.get(peer, 0))
            request = next(iter(self._turns[peer]))
            waiting = request.waiting
            hints = waiting.hints[: min(room, TURN_NODES, REQUEST_NODES - waiting.num_under_way)]
            del waiting.hints[: len(hints)]
            waiting.num_under_way += len(hints)
            self._num_under_way[peer] = self._num_under_way.get(peer, 0) + len(hints)
            nodes_max -= len(hints)
            chosen.append((request, hints))
            self._end_turn(request)
            if peer in self._turns:
                self._turns[peer] = self._turns.pop(peer)  # others go first
            self.queue(request)
        return chosen

    def sent(self, frame: Sent[R]) -> None:
        """Notes that a frame was sent, perhaps one without hints."""
        self._sent.append([(request, request.waiting.peer, len(hints)) for request, hints in frame])

    def taken(self, num_frames: int) -> None:
        """Notes that the engine has taken so many frames, those first that were sent first."""
        for _ in range(min(num_frames, len(self._sent))):
            for request, peer, num_hints in self._sent.popleft():
                self._num_under_way[peer] -= num_hints
                if not self._num_under_way[peer]:
                    del self._num_under_way[peer]
                request.waiting.num_under_way -= num_hints
                self.queue(request)

    def lose_engine(self) -> None:
        """Nothing that was sent arrives any more."""
        self.taken(len(self._sent))
        self._turns.clear()
