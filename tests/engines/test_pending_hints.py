"""Which hints go to an engine next: each draft worker has turns, and what one sends beyond them displaces its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.hint_service.pending_hints import (
    ENGINE_NODES,
    NODES_MAX,
    REQUEST_NODES,
    TURN_NODES,
    PendingHints,
    WaitingHints,
)
from outrider.hints.hint_tree import Hint

FLOOD, HONEST = 1, 2
MANY = 1 << 20


@dataclass(eq=False)
class Request:
    name: str
    waiting: WaitingHints = field(default_factory=WaitingHints)


def hints(count: int, first: int = 1) -> list[Hint]:
    return [Hint(first + index, first + index - 1, 9) for index in range(count)]


class Pending(PendingHints[Request]):
    """As `FollowedRequests` uses it."""

    def put(self, request: Request, stream_id: int, base_len: int, count: int) -> int:
        num_dropped = self.add(request, stream_id, base_len, hints(count), 0.0)
        self.queue(request)
        return num_dropped

    def send(self, nodes_max: int = MANY) -> list[tuple[str, int]]:
        frame = self.take(nodes_max, MANY)
        self.sent(frame)
        return [(request.name, len(sent)) for request, sent in frame]


def test_a_newer_tree_takes_the_place_of_an_older_one_that_waits() -> None:
    pending, request = Pending(), Request("a")
    pending.put(request, FLOOD, 10, 5)
    pending.put(request, FLOOD, 12, 3)
    pending.put(request, FLOOD, 11, 4)
    assert pending.send() == [("a", 3)]
    assert request.waiting.base_len == 12


def test_no_more_waits_than_a_tree_holds() -> None:
    pending, request = Pending(), Request("a")
    assert [pending.put(request, FLOOD, 10, 200) for _ in range(4)] == [0, 0, 600 - NODES_MAX, 200]
    assert len(request.waiting.hints) == NODES_MAX


def test_a_request_has_only_so_many_under_way_until_they_are_taken() -> None:
    pending, request = Pending(), Request("a")
    pending.put(request, FLOOD, 10, 300)
    assert sum(count for _, count in pending.send()) == REQUEST_NODES
    assert pending.send() == []
    pending.taken(1)
    assert sum(count for _, count in pending.send()) == REQUEST_NODES


def test_an_engine_that_takes_nothing_is_sent_only_so_much() -> None:
    pending = Pending()
    requests = [Request(str(number)) for number in range(200)]
    for request in requests:
        pending.put(request, FLOOD, 10, NODES_MAX)
    num_sent = 0
    while frame := pending.send(128):
        num_sent += sum(count for _, count in frame)
    assert num_sent == ENGINE_NODES


def test_an_honest_stream_has_its_turn_beside_one_that_has_a_hundred_full_trees_to_send() -> None:
    pending, honest = Pending(), Request("honest")
    flooded = [Request("flooded") for _ in range(100)]
    for request in flooded:
        pending.put(request, FLOOD, 10, NODES_MAX)
    for length in range(20, 40):
        pending.put(honest, HONEST, length, 7)
        assert ("honest", 7) in pending.send(2 * TURN_NODES)
        pending.taken(1)
        for request in flooded:
            pending.put(request, FLOOD, length, NODES_MAX)


def test_the_requests_of_a_stream_take_turns() -> None:
    pending = Pending()
    for name in "abc":
        pending.put(Request(name), FLOOD, 10, 100)
    assert pending.send(4 * TURN_NODES)[:4] == [(name, TURN_NODES) for name in "abc"] + [("a", 100 - TURN_NODES)]


def test_a_request_that_has_ended_leaves_its_turn_to_others() -> None:
    pending, gone = Pending(), Request("gone")
    pending.put(gone, FLOOD, 10, 100)
    pending.put(Request("here"), FLOOD, 10, 10)
    assert pending.send(1) == [("gone", 1)]
    pending.clear(gone)
    assert pending.send() == [("here", 10)]
    pending.taken(2)
    assert pending.send() == []


def test_another_engine_is_sent_as_much_as_the_first() -> None:
    pending, request = Pending(), Request("a")
    for base_len in (10, 11):
        pending.put(request, FLOOD, base_len, 300)
        assert sum(count for _, count in pending.send()) == REQUEST_NODES
        pending.lose_engine()
        pending.clear(request)
