"""Tests of slot turnover: estimated waits are right on average, and lower bounds are hardly ever too long."""

from __future__ import annotations

import heapq
import random

import pytest

from outrider.concurrency.turnover import RETRY_S_MAX, RETRY_S_MIN, Turnover, retry_after_s


def of_stay(stay_s: float) -> Turnover:
    turnover = Turnover()
    for _ in range(30):
        turnover.leave(stay_s)
    return turnover


def test_before_anybody_has_left_nothing_is_known() -> None:
    assert Turnover().stay_s() == 0.0
    assert Turnover().stay_s(otherwise=3.0) == 3.0
    assert Turnover().least_wait_s(5, [1.0, 2.0]) == 0.0


def test_it_is_the_mean_of_those_who_left_lately() -> None:
    turnover = of_stay(2.0)
    assert turnover.stay_s(otherwise=9.0) == pytest.approx(2.0)
    for _ in range(100):
        turnover.leave(4.0)
    assert turnover.stay_s() == pytest.approx(4.0, abs=0.05)


def test_a_refusal_says_neither_at_once_nor_never() -> None:
    assert [retry_after_s(wait_s) for wait_s in (0.0, 3.0, 1e9)] == [RETRY_S_MIN, 3.0, RETRY_S_MAX]


def test_nobody_has_to_end_for_one_that_finds_a_place() -> None:
    assert of_stay(10.0).least_wait_s(0, [0.0]) == 0.0


@pytest.mark.parametrize("num_places", [1, 4, 32])
@pytest.mark.parametrize("num_ends", [1, 3, 20, 60])
def test_the_wait_is_hardly_ever_shorter_where_places_come_free_at_random(num_ends: int, num_places: int) -> None:
    rng = random.Random(num_ends)
    turnover, num_shorter, num_rounds = of_stay(1.0), 0, 2000
    for _ in range(num_rounds):
        ages_s = [rng.expovariate(1.0) for _ in range(num_places)]
        wait_s = sum(rng.expovariate(num_places) for _ in range(num_ends))
        num_shorter += wait_s < turnover.least_wait_s(num_ends, ages_s)
    assert num_shorter <= 0.02 * num_rounds


@pytest.mark.parametrize("age_s", [0.0, 5.0, 9.99])
@pytest.mark.parametrize("num_ends", [1, 8, 9, 20])
def test_the_wait_is_never_shorter_where_all_end_together(num_ends: int, age_s: float) -> None:
    """Slots become free together if their sequences started together and are equally long."""
    wait_s = (num_ends - 1) // 8 * 10.0 + (10.0 - age_s)
    assert of_stay(10.0).least_wait_s(num_ends, [age_s] * 8) <= wait_s + 1e-9


def test_it_is_something_all_the_same() -> None:
    """The bound is above 0: a forecast of 0 would pass the tests of a lower bound, too."""
    ages_s = [0.1 * index for index in range(10)]
    assert of_stay(10.0).least_wait_s(20, ages_s) > 10.0


@pytest.mark.parametrize("seed", range(5))
def test_predictions_come_true_on_average(seed: int) -> None:
    """Sixteen slots, exponential times of 3 s, always twenty waiting: predicted and true waits agree within 15 %."""
    rng, turnover, now_s = random.Random(seed), Turnover(), 0.0
    running: list[tuple[float, float]] = []
    for _ in range(16):
        heapq.heappush(running, (rng.expovariate(1 / 3), 0.0))
    waiting = [(0.0, 0.0)] * 20  # arrival, predicted
    predicted, true = [], []
    for number in range(4000):
        now_s, began_s = heapq.heappop(running)
        turnover.leave(now_s - began_s)
        arrived_s, wait_s = waiting.pop(0)
        heapq.heappush(running, (now_s + rng.expovariate(1 / 3), now_s))
        waiting.append((now_s, turnover.wait_s(19, 16)))
        if number > 200:
            predicted.append(wait_s)
            true.append(now_s - arrived_s)
    assert sum(predicted) / sum(true) == pytest.approx(1.0, abs=0.15)
