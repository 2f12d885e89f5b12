"""The model of Kubernetes' autoscaler, held against what its documentation says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling.horizontal_autoscaler import SYNC_S, Autoscaler, Policy, Rules, Trigger

AT_ONCE = Rules(0, (Policy("Percent", 1000, 15),))


def scaler(
    up: Rules = AT_ONCE, down: Rules = AT_ONCE, *, least: int = 1, most: int = 100, cooldown_s: float = 300
) -> Autoscaler:
    return Autoscaler("x", least, most, cooldown_s, up, down, (Trigger("q", 10.0, 0.5),))


def decisions(made: Autoscaler, totals: list[float], current: int = 1, first_s: float = 0.0) -> list[int]:
    found = []
    for index, total in enumerate(totals):
        current = made.decide(first_s + index * SYNC_S, current, [total])
        found.append(current)
    return found


def test_replicas_are_the_total_over_the_threshold_rounded_up() -> None:
    assert decisions(scaler(), [10, 10.9, 11.5, 25, 99, 101]) == [1, 1, 2, 3, 10, 10]


def test_within_a_tenth_of_the_target_nothing_is_done() -> None:
    assert scaler().decide(0, 10, [109.9]) == 10
    assert scaler().decide(0, 10, [110.1]) == 12
    assert scaler().decide(0, 10, [90.1]) == 10
    assert scaler().decide(0, 10, [89.0]) == 9


def test_of_several_metrics_the_one_that_asks_for_most_counts() -> None:
    made = scaler()
    made.triggers = (Trigger("q", 10.0, 0.0), Trigger("r", 1.0, 0.0))
    assert made.decide(0, 1, [20, 7]) == 7


def test_shrinking_follows_the_largest_wish_of_its_window() -> None:
    made = scaler(down=Rules(60, (Policy("Percent", 100, 15),)))
    assert decisions(made, [50, 10, 30, 10, 10, 10, 10, 10, 10], current=5) == [5, 5, 5, 5, 5, 3, 3, 1, 1]


def test_growing_follows_the_smallest_wish_of_its_window() -> None:
    made = scaler(up=Rules(30, (Policy("Percent", 1000, 15),)))
    assert decisions(made, [10, 50, 50, 50]) == [1, 1, 1, 5]


def test_a_rate_holds_for_its_period_and_the_loosest_counts() -> None:
    made = scaler(up=Rules(0, (Policy("Percent", 100, 60), Policy("Pods", 4, 60))))
    # From 1: four more at the most in a minute, which is above the double; then, from 5, as many again.
    assert decisions(made, [1000] * 9) == [5, 5, 5, 5, 10, 10, 10, 10, 20]


def test_pods_leave_no_faster_than_told() -> None:
    made = scaler(down=Rules(0, (Policy("Pods", 1, 30),)))
    assert decisions(made, [0] * 6, current=4) == [3, 3, 2, 2, 1, 1]


def test_the_bounds_hold_whatever_is_wished() -> None:
    made = scaler(least=2, most=5)
    assert decisions(made, [0, 1000, 0], current=3) == [2, 5, 2]


def test_to_zero_after_the_cooldown_and_back_at_the_first_need() -> None:
    made = scaler(least=0, cooldown_s=60)
    assert decisions(made, [10, 0.4, 0, 0, 0, 0, 0, 20, 20]) == [1, 1, 1, 1, 0, 0, 0, 1, 2]


def test_kedas_own_steps_from_and_to_zero_use_up_nobodys_rate() -> None:
    rates = (Policy("Percent", 100, 60), Policy("Pods", 2, 60))
    up, down = Rules(0, rates), Rules(0, (Policy("Percent", 100, 15),))
    assert decisions(scaler(up, least=1), [1000] * 6) == [3, 3, 3, 3, 6, 6]
    # The one that KEDA adds is there when the first minute begins.
    assert decisions(scaler(up, least=0), [1000] * 6, current=0) == [1, 3, 3, 3, 3, 6]
    # The three that it takes have not been the autoscaler's either: there is one, so that two may come, not four.
    made = scaler(up, down, least=0, cooldown_s=15)
    assert decisions(made, [30, 0, 1000, 1000, 1000], current=3) == [3, 0, 1, 3, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["triggers"][0].update(type="cpu"),
        lambda spec: spec["triggers"][0].update(metricType="Value"),
        lambda spec: _growth(spec).update(selectPolicy="Min"),
    ],
)
def test_what_the_model_does_not_know_is_refused(change: object) -> None:
    rules = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 15}]}
    behavior = {"scaleUp": dict(rules), "scaleDown": dict(rules)}
    spec = {
        "minReplicaCount": 0,
        "maxReplicaCount": 2,
        "cooldownPeriod": 1,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [
            {"type": "prometheus", "name": "q", "metadata": {"query": "q", "threshold": "1"}},
        ],
    }
    manifest = {"metadata": {"name": "x"}, "spec": spec}
    assert Autoscaler.parse(manifest).name == "x"
    change(spec)  # type: ignore[operator]
    with pytest.raises(ValueError, match="not modelled"):
        Autoscaler.parse(manifest)


def _growth(spec: Any) -> Any:
    return spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]


@given(st.lists(st.floats(0, 500), min_size=1, max_size=100), st.integers(1, 10))
def test_a_steady_metric_is_met_and_then_left_alone(noise: list[float], replicas: int) -> None:
    """Whatever came before, an hour of the same metric ends at the replicas for it, and stays there."""
    made = scaler(Rules(30, (Policy("Percent", 100, 60),)), Rules(300, (Policy("Pods", 1, 60),)), most=10)
    current = 1
    for index, total in enumerate(noise):
        current = made.decide(index * SYNC_S, current, [total])
        assert 1 <= current <= 10
    steady = decisions(made, [10.0 * replicas - 5] * 240, current, len(noise) * SYNC_S)
    assert len(set(steady[-40:])) == 1
    assert abs(steady[-1] - replicas) <= 1
