"""Levels, arrival times and the order of turns."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise

import pytest

from command_line.load.load import Level, Loop, Plan, arrivals, parse_levels, turns
from outrider.errors import InvalidRequest

CLOSED_2, OPEN_5 = Level(Loop.CLOSED, 2.0), Level(Loop.OPEN, 5.0)


def plan(**changes: object) -> Plan:
    usual = {
        "levels": (CLOSED_2,),
        "num_rounds": 1,
        "num_requests": None,
        "duration_s": None,
        "num_warmup": None,
    }
    return Plan(**{**usual, "seed": 0, **changes})  # type: ignore[arg-type]


class TestLevels:
    def test_levels_come_in_the_order_given(self) -> None:
        assert [level.value for level in parse_levels(Loop.CLOSED, "8, 1,32")] == [8, 1, 32]
        assert [str(level) for level in parse_levels(Loop.OPEN, "0.5,5")] == [
            "0.5 requests/s",
            "5 requests/s",
        ]

    @pytest.mark.parametrize(
        ("loop", "text"),
        [
            (Loop.CLOSED, ""), (Loop.CLOSED, "1,,2"), (Loop.CLOSED, "0"), (Loop.CLOSED, "-1"), (Loop.CLOSED, "1.5"),
            (Loop.CLOSED, "5000"), (Loop.OPEN, "0"), (Loop.OPEN, "nan"), (Loop.OPEN, "inf"), (Loop.OPEN, "fast"),
        ],
    )  # fmt: skip
    def test_what_is_no_level_is_refused(self, loop: Loop, text: str) -> None:
        with pytest.raises(InvalidRequest, match="is not a"):
            parse_levels(loop, text)

    def test_a_level_given_twice_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="twice"):
            parse_levels(Loop.CLOSED, "1,8,1")


class TestPlan:
    @pytest.mark.parametrize(
        ("changes", "level", "num_requests"),
        [
            ({}, CLOSED_2, 16),
            ({}, Level(Loop.CLOSED, 32.0), 256),
            ({}, Level(Loop.OPEN, 2.6), 21),
            ({"num_requests": 3}, CLOSED_2, 3),
            ({"duration_s": 1.0}, CLOSED_2, None),
            ({"duration_s": 1.0, "num_requests": 3}, CLOSED_2, 3),
        ],
    )
    def test_some_bound_holds_always(self, changes: dict[str, object], level: Level, num_requests: int | None) -> None:
        assert plan(**changes).num_requests_at(level) == num_requests

    def test_every_connection_is_warmed_unless_somebody_says_otherwise(self) -> None:
        assert plan().num_warmup_at(CLOSED_2) == 2
        assert plan().num_warmup_at(OPEN_5) == 1
        assert plan(num_warmup=0).num_warmup_at(CLOSED_2) == 0


class TestArrivals:
    def test_they_begin_at_once_and_are_repeatable(self) -> None:
        first, again, other = (
            list(arrivals(5.0, seed=seed, num_requests=20, duration_s=None)) for seed in ("a", "a", "b")
        )
        assert first[0] == 0
        assert len(first) == 20
        assert first == sorted(first)
        assert first == again
        assert first != other

    def test_gaps_are_exponential_with_the_mean_of_the_rate(self) -> None:
        times = list(arrivals(4.0, seed="0", num_requests=20_000, duration_s=None))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
        assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03), "as wide as its mean, as exponentials are"

    def test_the_duration_ends_them(self) -> None:
        times = list(arrivals(100.0, seed="0", num_requests=None, duration_s=0.5))
        assert times[-1] < 0.5
        assert times == list(islice(arrivals(100.0, seed="0", num_requests=10**6, duration_s=None), len(times)))
        assert len(list(arrivals(100.0, seed="0", num_requests=3, duration_s=0.5))) == 3

    def test_without_an_end_there_is_no_beginning(self) -> None:
        with pytest.raises(ValueError, match="without an end"):
            next(arrivals(1.0, seed="0", num_requests=None, duration_s=None))


def test_servers_take_turns_and_go_first_in_turn() -> None:
    levels = (CLOSED_2, Level(Loop.CLOSED, 4.0))
    taken = list(turns(plan(levels=levels, num_rounds=2), 2))
    assert [(turn.number, turn.level.value, turn.server) for turn in taken] == [
        (0, 2, 0), (0, 2, 1), (0, 4, 0), (0, 4, 1), (1, 2, 1), (1, 2, 0), (1, 4, 1), (1, 4, 0),
    ]  # fmt: skip
