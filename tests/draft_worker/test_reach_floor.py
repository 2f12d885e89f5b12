"""How unlikely the nodes are that a draft worker feeds, beside targets with short and long steps."""

from __future__ import annotations

import pytest

from draft_worker.tree.reach_floor import LOWERED, SLOW_TARGET, ReachFloor


def floor_after(interval_s: float, step_ms: float, num_commits: int = 20) -> float:
    floor, least = ReachFloor(0.04), 0.0
    for number in range(num_commits):
        least = floor.after_commit(100.0 + number * interval_s, step_ms)
    return least


def test_beside_a_target_with_long_steps_less_likely_nodes_are_fed() -> None:
    assert floor_after(1.1 * SLOW_TARGET * 2.0 / 1e3, 2.0) == pytest.approx(0.04 * LOWERED)


def test_beside_one_with_short_steps_the_setting_holds() -> None:
    assert floor_after(0.9 * SLOW_TARGET * 2.0 / 1e3, 2.0) == 0.04


@pytest.mark.parametrize(("num_commits", "step_ms"), [(1, 2.0), (20, 0.0)])
def test_so_it_does_while_nothing_was_measured(num_commits: int, step_ms: float) -> None:
    assert floor_after(0.05, step_ms, num_commits) == 0.04


def test_a_pause_does_not_make_a_target_slow() -> None:
    floor = ReachFloor(0.04)
    for number in range(20):
        floor.after_commit(number * 0.004, 2.0)
    assert floor.after_commit(500.0, 2.0) == 0.04
