"""Which hints go to an engine next: each draft worker has turns, and what one sends beyond them displaces its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from outrider.hint_service.pending_hints import (
    ENGINE_NODES,
    NODES_MAX,
    PEER_NODES,
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

    def put(self, request: Request, peer: Hashable, base_len: int, count: int) -> int:
        num_dropped = self.add(request, peer, base_len, hints(count), 0.0)
        self.queue(request)
        return num_dropped

    def send(self, nodes_max: int = MANY) -> list[tuple[str, int]]:
        frame = self.take(nodes_max, MANY)
        if frame:
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
    for index, request in enumerate(requests):
        pending.put(request, f"10.0.0.{index % 10}", 10, NODES_MAX)
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


def test_an_engine_that_takes_little_in_a_step_has_honest_hints_beside_a_flood_over_64_requests() -> None:
    """It takes what it may at once: 12 frames. The window is full of the flood's."""
    pending, honest = Pending(), Request("honest")
    flooded = [Request("flooded") for _ in range(64)]
    under_way, late = list[tuple[int, list[tuple[str, int]]]](), list[int]()
    for step in range(40):
        length = 20 + step
        for request in flooded:
            pending.put(request, FLOOD, length, NODES_MAX)
        while frame := pending.send(128):
            under_way.append((step, frame))
        pending.put(honest, HONEST, length, 7)
        while frame := pending.send(128):
            under_way.append((step, frame))
        taken, under_way = under_way[:12], under_way[12:]
        late += [step + 1 - since for since, frame in taken if ("honest", 7) in frame]
        pending.taken(len(taken))
    assert len(late) == 40
    assert set(late) == {1}, "the next step has them"


def test_one_connection_has_a_quarter_of_what_may_be_under_way() -> None:
    pending = Pending()
    for _ in range(100):
        pending.put(Request("flooded"), FLOOD, 10, NODES_MAX)
    num_sent = 0
    while frame := pending.send(128):
        num_sent += sum(count for _, count in frame)
    assert num_sent == PEER_NODES == ENGINE_NODES // 4
    pending.put(Request("honest"), HONEST, 10, 7)
    assert pending.send() == [("honest", 7)]
    pending.taken(1)
    assert sum(count for _, count in pending.send()) == 128, "as much as was taken"


def test_waiting_hints_that_the_tokens_contradict_are_dropped_and_others_are_not() -> None:
    pending, request = Pending(), Request("a")
    tree = [Hint(1, 0, 5), Hint(2, 1, 6), Hint(3, 1, 7), Hint(4, 2, 8), Hint(5, 3, 9), Hint(6, 99, 4)]
    pending.add(request, HONEST, 3, tree, 0.0)
    pending.queue(request)
    pending.commit(request, [1, 2, 3])
    assert [hint.node_id for hint in request.waiting.hints] == [1, 2, 3, 4, 5, 6]
    pending.commit(request, [1, 2, 3, 5, 6])
    assert [hint.node_id for hint in request.waiting.hints] == [1, 2, 4, 6], "below another root, or on the way"
    pending.commit(request, [1, 2, 3, 5, 6, 1])
    assert [hint.node_id for hint in request.waiting.hints] == [1, 2, 6]


def test_a_request_all_of_whose_hints_were_dropped_leaves_its_turn_to_others() -> None:
    pending, request = Pending(), Request("a")
    pending.put(request, HONEST, 3, 5)
    pending.commit(request, [1, 2, 3, 4])
    assert pending.send() == []
    pending.put(request, HONEST, 4, 5)
    assert pending.send() == [("a", 5)]


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
