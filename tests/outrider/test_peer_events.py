"""Events of peers wait in queues of their own, and leave in turns."""

from __future__ import annotations

from outrider.concurrency.round_robin import RoundRobin


def fill(events: RoundRobin[int], peer: str, num_streams: int, size: int = 1) -> int:
    """Puts what there is room for, over so many streams; returns how much it was."""
    number = 0
    while events.has_room(peer):
        assert events.put(peer, number % num_streams, number, size)
        number += 1
    return number


def test_one_peer_with_many_streams_shuts_nobody_out() -> None:
    events = RoundRobin[int](32_768)
    assert fill(events, "flood", 32) == 32_768 // 2
    assert fill(events, "another", 64) > 32_768 // 5
    assert events.has_room("honest")
    assert events.put("honest", 0, -1)
    assert -1 in [events.take() for _ in range(3)], "one of each goes before"


def test_an_honest_peer_has_room_for_what_64_sessions_send_in_a_long_step() -> None:
    events = RoundRobin[int](1 << 18)
    for number in range(1680):
        assert events.has_room("honest")
        assert events.put("honest", 1, number, 9)
    assert [events.take() for _ in range(1680)] == list(range(1680))


def test_more_than_the_room_is_refused() -> None:
    events = RoundRobin[int](3)
    assert [events.put(str(number), 0, number) for number in range(5)] == [True, True, True, False, False]
    assert not events.has_room("late")
    events.take()
    assert events.put("late", 0, 9)


def test_sizes_count() -> None:
    events = RoundRobin[int](100)
    assert fill(events, "large", 1, 10) == 5
    assert fill(events, "small", 1) == 25
    while events.take() is not None:
        pass
    assert fill(events, "large", 1, 10) == 5, "all of it is free again"


def test_the_streams_of_a_peer_take_turns() -> None:
    events = RoundRobin[int](100)
    for number in range(4):
        events.put("a", 1, number)
    events.put("a", 2, 10)
    assert [events.take() for _ in range(6)] == [0, 10, 1, 2, 3, None]


def test_a_stream_that_has_ended_leaves_the_others_and_its_room() -> None:
    events = RoundRobin[int](10)
    for number in range(4):
        events.put("a", number % 2, number)
    events.forget("a", 0)
    assert [events.take(), events.take(), events.take()] == [1, 3, None]
    events.forget("a", 1)
    events.forget("nobody", 1)
    assert fill(events, "a", 1) == 5
    events.forget("a", 0)
    assert len(events) == 0
    assert fill(events, "a", 1) == 5
