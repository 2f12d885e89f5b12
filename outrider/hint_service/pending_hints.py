"""Hints on their way to an engine that takes a bounded amount in a step: which go next. Pure.

Of each request only the newest tree is kept, and of it as many hints as a tree holds. Streams of draft workers take
turns, and so do the requests of each. Only so many hints are under way that the engine has not taken: what a stream
sends beyond its turns waits here, where newer hints of its own replace it, and not before those of others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from outrider.hint_service.messages import StreamId
from outrider.hints.hint_tree import Hint

NODES_MAX: Final = 512
"""Hints that wait of one request: as many as a hint tree holds."""
TURN_NODES: Final = 64
"""Most hints of a request in one turn."""
REQUEST_NODES: Final = 128
"""Hints of one request that may be under way. A step verifies far fewer, and they come first."""
ENGINE_NODES: Final = 4096
"""Hints of all requests that may be under way."""


@dataclass(slots=True)
class WaitingHints:
    """The hints of one request that have not been sent."""

    stream_id: StreamId = 0  # that they came on
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
        self._turns: dict[StreamId, dict[R, None]] = {}  # requests that may send, those first whose turn it is
        self._sent: deque[Sent[R]] = deque()  # frames that the engine has not taken
        self._num_under_way = 0

    def add(self, request: R, stream_id: StreamId, base_len: int, hints: list[Hint], arrived_at: float) -> int:
        """Keeps hints until the request has a turn (`queue`); returns how many are dropped, because a tree holds no
        more."""
        waiting = request.waiting
        if base_len < waiting.base_len:
            return 0  # stale
        if base_len > waiting.base_len:
            waiting.hints.clear()
        if stream_id != waiting.stream_id:
            self._end_turn(request)
        waiting.stream_id, waiting.base_len, waiting.arrived_at = stream_id, base_len, arrived_at
        room = NODES_MAX - len(waiting.hints)
        waiting.hints += hints[:room]
        return max(len(hints) - room, 0)

    def clear(self, request: R) -> None:
        """Drops the hints of a request that wait. Others may follow below any root."""
        self._end_turn(request)
        request.waiting.hints.clear()
        request.waiting.base_len = 0

    def queue(self, request: R) -> None:
        """Gives a request a turn, if it has hints and may send any."""
        waiting = request.waiting
        if waiting.hints and waiting.num_under_way < REQUEST_NODES:
            self._turns.setdefault(waiting.stream_id, {}).setdefault(request)

    def _end_turn(self, request: R) -> None:
        requests = self._turns.get(request.waiting.stream_id, {})
        requests.pop(request, None)
        if not requests:
            self._turns.pop(request.waiting.stream_id, None)

    def take(self, nodes_max: int, requests_max: int) -> Sent[R]:
        """Returns what the next frame has. If it is sent, `sent` must follow at once."""
        chosen: Sent[R] = []
        nodes_max = min(nodes_max, ENGINE_NODES - self._num_under_way)
        while self._turns and nodes_max > 0 and len(chosen) < requests_max:
            stream_id = next(iter(self._turns))
            request = next(iter(self._turns[stream_id]))
            waiting = request.waiting
            hints = waiting.hints[: min(nodes_max, TURN_NODES, REQUEST_NODES - waiting.num_under_way)]
            del waiting.hints[: len(hints)]
            waiting.num_under_way += len(hints)
            nodes_max -= len(hints)
            chosen.append((request, hints))
            self._end_turn(request)
            if stream_id in self._turns:
                self._turns[stream_id] = self._turns.pop(stream_id)  # other streams go first
            self.queue(request)
        return chosen

    def sent(self, frame: Sent[R]) -> None:
        """Notes that a frame was sent, perhaps one without hints."""
        self._sent.append(frame)
        self._num_under_way += sum(len(hints) for _, hints in frame)

    def taken(self, num_frames: int) -> None:
        """Notes that the engine has taken so many frames, those first that were sent first."""
        for _ in range(min(num_frames, len(self._sent))):
            for request, hints in self._sent.popleft():
                self._num_under_way -= len(hints)
                request.waiting.num_under_way -= len(hints)
                self.queue(request)

    def lose_engine(self) -> None:
        """Nothing that was sent arrives any more."""
        self.taken(len(self._sent))
        self._turns.clear()
