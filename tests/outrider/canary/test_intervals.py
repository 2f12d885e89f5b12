"""Intervals beside those of scipy, and what they promise, counted over many seeded trials."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.canary.intervals import (
    Interval,
    Ratio,
    contrast_bounds,
    difference_interval,
    imbalance_evidence,
    rank_bounds,
    ratio_interval,
    share_interval,
    student_of_normal,
)
from outrider.canary.statistics import NUM_CLUSTERS

NUM_TRIALS = 2000


def mean_of(values: np.ndarray) -> Ratio:
    """Each is a cluster of its own."""
    return Ratio.of_clusters((value, 1.0) for value in values.tolist())


@pytest.mark.parametrize("degrees", [5, 8, 30, 1000])
@pytest.mark.parametrize("share", [0.9, 0.975, 0.995])
def test_quantiles_of_t_are_those_of_scipy(share: float, degrees: float) -> None:
    found = student_of_normal(stats.norm.ppf(share), degrees)
    assert found == pytest.approx(stats.t.ppf(share, degrees), rel=0.01)


@pytest.mark.parametrize("degrees", [5, 20, 1000])
def test_as_far_out_as_a_confidence_sequence_looks_they_are_hardly_too_small(degrees: float) -> None:
    wanted = stats.t.isf(stats.norm.sf(4.5), degrees)
    assert 0.99 * wanted < student_of_normal(4.5, degrees) < 1.07 * wanted
    assert student_of_normal(-4.5, degrees) == -student_of_normal(4.5, degrees)
    assert math.isfinite(student_of_normal(1e9, degrees))


def test_the_mean_and_welchs_difference_are_those_of_scipy() -> None:
    chance = np.random.default_rng(1)
    first, second = chance.normal(5, 1, 40), chance.normal(4, 3, 15)
    found = difference_interval(mean_of(first), mean_of(second), 0.95)
    wanted = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-2)
    mean = ratio_interval(mean_of(first), 0.95)
    wanted_mean = stats.t.interval(0.95, 39, first.mean(), stats.sem(first))
    assert (mean.low, mean.high) == pytest.approx(wanted_mean, rel=1e-4)


def test_of_too_few_numbers_nothing_is_known() -> None:
    five, six = (mean_of(np.arange(1.0, num + 1)) for num in (5, 6))
    nothing, unknown = Ratio.of_clusters([]), Interval(None, None)
    assert nothing == Ratio.of_clusters([(0.0, 0.0)])
    for few in (five, nothing, Ratio.of_clusters([(3.0, 1.0)])):
        assert ratio_interval(few, 0.95) == difference_interval(few, six, 0.95) == unknown
        assert contrast_bounds(six, few, 1.0, 0.05) == unknown
    assert share_interval(0, 0, 0.95) == unknown
    assert ratio_interval(six, 0.95).low == pytest.approx(3.5 - stats.t.ppf(0.975, 5) * 1.8708 / 6**0.5, rel=0.01)


def test_degrees_of_freedom_are_those_of_the_clusters_that_outweigh_the_rest() -> None:
    assert Ratio.of_clusters([(1.0, 1.0), (2.0, 1.0)] * 8).degrees == pytest.approx(15)
    heavy = Ratio.of_clusters([(500.0, 100.0), (300.0, 100.0)] + [(1.0, 1.0)] * 50)
    assert heavy.degrees < 2


@pytest.mark.parametrize(("num", "num_all"), [(0, 10), (3, 200), (200, 200)])
def test_a_shares_interval_is_wilsons(num: int, num_all: int) -> None:
    wanted = stats.binomtest(num, num_all).proportion_ci(0.95, "wilson")
    found = share_interval(num, num_all, 0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@settings(deadline=None)
@given(st.integers(0, 3000), st.sampled_from([0.5, 0.9, 0.99]))
def test_ranks_around_a_quantile_are_the_closest_that_miss_it_rarely_enough(num: int, share: float) -> None:
    low, high = rank_bounds(num, share, 0.95)
    # The value of rank r lies above the quantile when fewer than r values lie below it.
    ranks = np.arange(1, num + 1)
    chances = stats.binom.cdf(ranks - 1, num, share)
    assert low == max(ranks[chances <= 0.025], default=None)
    assert high == min(ranks[chances >= 0.975], default=None)


def test_the_p99_of_a_few_requests_has_no_upper_end() -> None:
    assert rank_bounds(100, 0.99, 0.95)[1] is None
    assert rank_bounds(1_000_000, 0.99, 0.95) == pytest.approx((989_805, 990_196), abs=2)


@pytest.mark.parametrize("num_keys", [40, 400])
def test_intervals_of_a_mean_hold_where_requests_of_a_key_resemble_each_other(num_keys: int) -> None:
    chance, num_requests = np.random.default_rng(2), 4000
    num_right = num_right_as_if_alone = 0
    for _ in range(NUM_TRIALS // 4):
        key = chance.integers(0, num_keys, num_requests)
        # Each key has its own mean, 10 on average.
        values = chance.gamma(4, 2.5, num_keys)[key] * chance.lognormal(-0.125, 0.5, num_requests)
        (totals,) = clustered(values, chance.integers(0, NUM_CLUSTERS, num_keys)[key], np.array([num_requests]))
        num_right += holds(ratio_interval(Ratio.of_clusters(totals), 0.95), 10.0)
        num_right_as_if_alone += holds(ratio_interval(mean_of(values), 0.95), 10.0)
    assert num_right >= stats.binom.ppf(1e-4, NUM_TRIALS // 4, 0.93)
    assert num_right_as_if_alone < 0.7 * NUM_TRIALS / 4


def holds(interval: Interval, truth: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= truth <= interval.high


def clustered(
    values: np.ndarray, clusters: np.ndarray, at: np.ndarray, mask: np.ndarray | None = None
) -> Iterator[list[tuple[float, float]]]:
    """Sum and number of the values in each cluster, of the first so many."""
    mask = np.ones_like(values, bool) if mask is None else mask
    cells = np.searchsorted(at, np.arange(values.size), side="right")[mask] * NUM_CLUSTERS + clusters[mask]
    shape = (-1, NUM_CLUSTERS)
    size = (len(at) + 1) * NUM_CLUSTERS
    sums = np.bincount(cells, values[mask], size).reshape(shape).cumsum(0)
    nums = np.bincount(cells, None, size).reshape(shape).cumsum(0)
    for row in range(len(at)):
        yield list(zip(sums[row].tolist(), nums[row].tolist(), strict=True))


def looks(
    chance: np.random.Generator, num: int, effect: float, share: float, num_keys: int | None = None
) -> list[tuple[Ratio, Ratio]]:
    """Ratios of the canary arm and of control after every 100 requests, from the 400th on. Without `num_keys` each
    request has a key of its own; else each key has its own mean."""
    key = np.arange(num) if num_keys is None else chance.integers(0, num_keys, num)
    is_canary, clusters = (chance.random(num) < share)[key], chance.integers(0, NUM_CLUSTERS, num)[key]
    values = chance.lognormal(0.0, 0.5, num) * np.where(is_canary, 1 + effect, 1.0)
    if num_keys is not None:
        values *= chance.lognormal(0.0, 0.4, num_keys)[key]
    at = np.arange(400, num + 1, 100)
    both = [map(Ratio.of_clusters, clustered(values, clusters, at, mask)) for mask in (is_canary, ~is_canary)]
    return list(zip(*both, strict=True))


def excludes(interval: Interval, truth: float) -> bool:
    return (interval.low or -math.inf) > truth or (interval.high or math.inf) < truth


@pytest.mark.parametrize("num_keys", [None, 30, 300])
def test_a_confidence_sequence_misses_the_truth_at_any_of_many_looks_as_rarely_as_it_says(
    num_keys: int | None,
) -> None:
    chance, alpha, num_trials = np.random.default_rng(3), 0.05, 300
    num_missed = num_missed_by_welch = 0
    for _ in range(num_trials):
        seen = looks(chance, 6000, 0.0, 0.3, num_keys)
        num_missed += any(excludes(contrast_bounds(*each, 1.0, alpha), 0.0) for each in seen)
        num_missed_by_welch += any(excludes(difference_interval(*each, 1 - alpha), 0.0) for each in seen)
    assert num_missed <= stats.binom.ppf(0.9999, num_trials, alpha)
    # What it is for: the interval made for one look is wrong at some look several times as often as it says, unless
    # all looks are at the same few keys.
    assert num_keys == 30 or num_missed_by_welch > 2 * alpha * num_trials


def test_a_confidence_sequence_tightens_around_the_truth() -> None:
    seen = looks(np.random.default_rng(4), 40_000, 0.1, 0.3)
    bounds = contrast_bounds(*seen[-1], 1.1, 0.05)
    assert holds(bounds, 0.0)
    assert (bounds.high or 0) - (bounds.low or 0) < 0.1
    compared = contrast_bounds(*seen[-1], 1.0, 0.05)
    assert compared.low is not None
    assert compared.low > 0


def test_however_many_requests_some_keys_send_the_bounds_stay_as_far_apart_as_the_keys_are() -> None:
    def width(each: tuple[Ratio, Ratio]) -> float:
        bounds = contrast_bounds(*each, 1.0, 0.05)
        return (bounds.high or 0) - (bounds.low or 0)

    few, many = (looks(np.random.default_rng(4), 40_000, 0.0, 0.3, num) for num in (300, None))
    assert width(few[-1]) > 0.8 * width(few[100])
    assert width(many[-1]) < 0.6 * width(many[100])


def test_where_no_value_differs_from_another_there_is_no_doubt() -> None:
    ones, twos = (mean_of(np.full(10, value)) for value in (1.0, 2.0))
    assert contrast_bounds(twos, ones, 1.5, 0.05) == Interval(0.5, 0.5)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_failures_by_chance_ever_reach_the_evidence_as_rarely_as_ville_says(share: float) -> None:
    chance, alpha = np.random.default_rng(5), 0.02
    num_reached = 0
    for _ in range(NUM_TRIALS):
        nums = np.cumsum(chance.random(300) < share)
        num_reached += any(
            imbalance_evidence(int(num), count, share) >= math.log(1 / alpha) for count, num in enumerate(nums, start=1)
        )
    assert num_reached <= stats.binom.ppf(0.9999, NUM_TRIALS, alpha)


def test_failures_on_one_side_are_evidence_soon() -> None:
    assert imbalance_evidence(3, 3, 0.1) > math.log(100)
    assert imbalance_evidence(3, 30, 0.1) < 0
