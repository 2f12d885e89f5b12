"""Replacing pods never takes more of them away, or adds more, than the strategy permits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.rolling_update import Counts, Step, Strategy, next_step, strategy_of

NOBODY = Counts(0, 0)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), st.data())
def test_a_rolling_update_keeps_its_bounds_and_ends(
    num_wanted: int, num_surplus_max: int, num_unavailable_max: int, data: st.DataObject
) -> None:
    if not num_surplus_max:
        num_unavailable_max = max(1, num_unavailable_max)
    strategy = Strategy(num_wanted, num_surplus_max, num_unavailable_max)
    old, new, num_loading = num_wanted, 0, 0
    for _ in range(200):
        step = next_step(strategy, Counts(new + num_loading, new), Counts(old, old), 0)
        assert not step.num_new_to_end
        num_loading += step.num_new
        old -= step.num_old_to_end
        assert old + new >= num_wanted - num_unavailable_max
        assert old + new + num_loading <= num_wanted + num_surplus_max
        if not old and new == num_wanted:
            return
        num_ready = data.draw(st.integers(0, num_loading)) if step != Step() else num_loading
        new, num_loading = new + num_ready, num_loading - num_ready
    pytest.fail("it does not end")


def test_the_charts_workers_are_replaced_one_by_one() -> None:
    strategy = Strategy(1, 1, 0)
    assert next_step(strategy, NOBODY, Counts(1, 1), 0) == Step(num_new=1)
    assert next_step(strategy, Counts(1, 0), Counts(1, 1), 0) == Step()
    assert next_step(strategy, Counts(1, 1), Counts(1, 1), 0) == Step(num_old_to_end=1)


def test_a_broken_old_pod_does_not_hold_the_update_up() -> None:
    assert next_step(Strategy(1, 1, 0), Counts(1, 1), Counts(1, 0), 0) == Step(num_old_to_end=1)


def test_recreation_waits_until_the_old_pods_are_gone() -> None:
    strategy = Strategy(1, 1, 0, is_recreating=True)
    assert next_step(strategy, NOBODY, Counts(1, 1), 0) == Step(num_old_to_end=1)
    assert next_step(strategy, NOBODY, NOBODY, 1) == Step()
    assert next_step(strategy, NOBODY, NOBODY, 0) == Step(num_new=1)


def test_superfluous_pods_end() -> None:
    assert next_step(Strategy(1, 1, 0), Counts(3, 3), NOBODY, 0) == Step(num_new_to_end=2)


def test_strategies_are_read_from_deployments() -> None:
    spec = {"replicas": 2, "minReadySeconds": 5, "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}
    assert strategy_of({"spec": spec}) == Strategy(2, 1, 0, False, 5)
    assert strategy_of({"spec": {"strategy": {"type": "Recreate"}}}).is_recreating
    with pytest.raises(ValueError, match="25%"):
        strategy_of({"spec": {"strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}}}})
