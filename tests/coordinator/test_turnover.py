"""How long a wait for a place will be."""

from __future__ import annotations

import heapq
import random

import pytest

from coordinator.turnover import Turnover


def test_nothing_is_known_at_first() -> None:
    turnover = Turnover()
    assert turnover.wait_s(100) == 0.0
    turnover.begin()
    assert turnover.wait_s(100) == 0.0


def test_it_goes_by_how_long_places_are_held_and_how_many() -> None:
    turnover = Turnover()
    for _ in range(5):
        turnover.begin()
    turnover.end(8.0)
    assert turnover.wait_s(0) == pytest.approx(2.0)
    assert turnover.wait_s(9) == pytest.approx(20.0)


@pytest.mark.parametrize("seed", range(5))
def test_predictions_come_true_on_average(seed: int) -> None:
    """Sixteen places, exponential times of 3 s, always twenty waiting: predicted and true waits agree within 15 %."""
    rng, turnover, now_s = random.Random(seed), Turnover(), 0.0
    running: list[tuple[float, float]] = []
    for _ in range(16):
        turnover.begin()
        heapq.heappush(running, (rng.expovariate(1 / 3), 0.0))
    waiting = [(0.0, 0.0)] * 20  # arrival, predicted
    predicted, true = [], []
    for number in range(4000):
        now_s, began_s = heapq.heappop(running)
        turnover.end(now_s - began_s)
        arrived_s, wait_s = waiting.pop(0)
        turnover.begin()
        heapq.heappush(running, (now_s + rng.expovariate(1 / 3), now_s))
        waiting.append((now_s, turnover.wait_s(19)))
        if number > 200:
            predicted.append(wait_s)
            true.append(now_s - arrived_s)
    assert sum(predicted) / sum(true) == pytest.approx(1.0, abs=0.15)
