"""Objectives: what is asked for, what is met, and who goes first for them."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.objective import (
    NO_OBJECTIVE,
    PATIENCE_S,
    Objective,
    Turn,
    by_due,
    parse_tenant_objective,
)


class TestObjective:
    @pytest.mark.parametrize("value", [0.0, -1.0, -math.inf, math.nan, 3_600_001.0])
    @pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
    def test_a_time_that_cannot_be_meant_is_refused_by_its_name(self, name: str, value: float) -> None:
        with pytest.raises(InvalidRequest) as caught:
            Objective(**{name: value})
        assert caught.value.parameter == f"slo.{name}"

    def test_the_default_fills_what_is_not_asked_for(self) -> None:
        default = Objective(ttft_ms=500.0, tpot_ms=40.0)
        assert Objective(tpot_ms=20.0).or_else(default) == Objective(500.0, 20.0)
        assert NO_OBJECTIVE.or_else(default) == default
        assert not NO_OBJECTIVE.or_else(NO_OBJECTIVE)

    def test_it_survives_the_wire(self) -> None:
        for objective in (NO_OBJECTIVE, Objective(ttft_ms=500.0), Objective(tpot_ms=12.5), Objective(1.0, 2.0)):
            assert Objective.from_proto(objective.to_proto()) == objective

    def test_a_first_token_that_is_late_already_is_not_asked_for(self) -> None:
        assert Objective(500.0, 40.0).since(200.0) == Objective(300.0, 40.0)
        assert Objective(500.0, 40.0).since(500.0) == Objective(tpot_ms=40.0)

    def test_only_what_is_asked_for_is_met_or_missed(self) -> None:
        assert Objective(500.0, 40.0).outcome(500.0, 41.0) == {"ttft": True, "tpot": False}
        assert Objective(tpot_ms=40.0).outcome(9999.0, None) == {"tpot": True}
        assert Objective(ttft_ms=40.0).outcome(None, None) == {"ttft": False}
        assert NO_OBJECTIVE.outcome(1.0, 1.0) == {}


class TestTenantObjective:
    def test_one_or_both_times_are_parsed(self) -> None:
        assert parse_tenant_objective("gold=ttft:500,tpot:40") == ("gold", Objective(500.0, 40.0))
        assert parse_tenant_objective("*=tpot:12.5") == ("*", Objective(tpot_ms=12.5))
        assert parse_tenant_objective("a=b=ttft:1") == ("a=b", Objective(ttft_ms=1.0))

    @pytest.mark.parametrize(
        "text", ["gold", "gold=", "gold=500", "gold=ttft", "gold=itl:3", "gold=ttft:x", "gold=ttft:1,ttft:2"]
    )
    def test_others_are_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(ValueError, match="such as gold=ttft:500,tpot:40"):
            parse_tenant_objective(text)

    @pytest.mark.parametrize("text", ["gold=ttft:0", "gold=tpot:-3", "gold=tpot:1e9", "gold=tpot:inf"])
    def test_times_out_of_bounds_are_refused_with_the_bounds(self, text: str) -> None:
        with pytest.raises(ValueError, match="permitted: above 0, at most 3600000"):
            parse_tenant_objective(text)


NOW = 100.0
TURNS = st.lists(
    st.tuples(st.sampled_from("ab"), st.one_of(st.just(math.inf), st.floats(NOW - 5, NOW + 20))), max_size=12
)


class TestByDue:
    @given(groups=st.lists(st.sampled_from("abc"), max_size=12), sinces=st.lists(st.floats(0, NOW), min_size=12))
    def test_without_objectives_the_order_stays(self, groups: list[str], sinces: list[float]) -> None:
        """Even where clocks disagree with it."""
        turns = [Turn(group, since) for group, since in zip(groups, sinces, strict=False)]
        assert by_due(range(len(turns)), turns, NOW) == list(range(len(turns)))

    @given(given=TURNS)
    def test_places_of_a_group_stay_its_own(self, given: list[tuple[str, float]]) -> None:
        turns = [Turn(group, NOW - 1.0, due_at) for group, due_at in given]
        ordered = by_due(range(len(turns)), turns, NOW)
        assert sorted(ordered) == list(range(len(turns)))
        assert [turns[index].group for index in ordered] == [turn.group for turn in turns]
        own: dict[object, list[float]] = defaultdict(list)
        for index in ordered:
            due_at = turns[index].due_at
            own[turns[index].group].append(min(due_at if due_at > NOW else math.inf, NOW - 1.0 + PATIENCE_S))
        assert all(due == sorted(due) for due in own.values())

    def test_the_first_due_goes_first_and_what_is_over_is_not_due(self) -> None:
        turns = [Turn(0, NOW), Turn(0, NOW, NOW + 2), Turn(0, NOW, NOW - 1), Turn(0, NOW, NOW + 1)]
        assert by_due("abcd", turns, NOW) == ["d", "b", "a", "c"]

    def test_patience_ends(self) -> None:
        urgent = Turn(0, NOW, NOW + 1.0)
        assert by_due("ab", [Turn(0, NOW - PATIENCE_S + 2.0), urgent], NOW) == ["b", "a"]
        assert by_due("ab", [Turn(0, NOW - PATIENCE_S + 0.5), urgent], NOW) == ["a", "b"]
