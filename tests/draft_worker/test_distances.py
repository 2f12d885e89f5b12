"""How far away targets are."""

from draft_worker.distances import PINGS_KEPT, TARGETS_MAX, Distances


def test_the_least_of_the_last_round_trips_counts() -> None:
    distances = Distances()
    distance = distances.to("a:1")
    assert distances.record_text() == ""
    for round_trip_s in (0.020, 0.003, 0.150):
        distance.pong(distance.ping(1.0), 1.0 + round_trip_s)
    assert distances.record_text() == "a:1=3000"
    for _ in range(PINGS_KEPT):
        distance.pong(distance.ping(5.0), 5.008)
    assert distances.record_text() == "a:1=8000"


def test_answers_that_nobody_asked_for_say_nothing() -> None:
    distances = Distances()
    distance = distances.to("a:1")
    number = distance.ping(1.0)
    distance.pong(number + 1, 1.1)
    late, again = number, distance.ping(2.0)
    distance.pong(late, 2.1)
    assert distances.record_text() == ""
    distance.pong(again, 2.1)
    distance.pong(again, 2.0001)
    assert distances.record_text() == "a:1=100000"


def test_what_is_remembered_is_bounded() -> None:
    distances = Distances()
    for number in range(2 * TARGETS_MAX):
        distance = distances.to(f"a:{number}")
        distance.pong(distance.ping(0.0), 0.001)
        distances.to("a:0")
    told = distances.record_text().split()
    assert len(told) == TARGETS_MAX
    assert "a:0=1000" in told
