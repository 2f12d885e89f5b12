"""Sums that add up in any order, and what can be read from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.canary.statistics import (
    NUM_BUCKETS,
    NUM_CLUSTERS,
    RELATIVE_ERROR,
    ArmStatistics,
    Count,
    Figure,
    Loss,
    RequestFigures,
)

MILLISECONDS = st.floats(0.0, 1e7)
REQUESTS = st.builds(
    RequestFigures,
    ttft_ms=st.none() | MILLISECONDS,
    tpot_ms=st.none() | MILLISECONDS,
    e2e_ms=MILLISECONDS,
    num_draft_tokens=st.integers(0, 500),
    num_accepted_draft_tokens=st.integers(0, 500),
)


def request(e2e_ms: float = 100.0, num_draft_tokens: int = 0, num_accepted: int = 0) -> RequestFigures:
    return RequestFigures(
        ttft_ms=5.0, tpot_ms=None, e2e_ms=e2e_ms, num_draft_tokens=num_draft_tokens,
        num_accepted_draft_tokens=num_accepted,
    )  # fmt: skip


def statistics_of(requests: Sequence[RequestFigures], first_group: int = 0) -> ArmStatistics:
    """Each in the next group of keys."""
    found = ArmStatistics()
    for group, each in enumerate(requests, first_group):
        found.add(each, group)
    return found


def added(parts: Iterable[ArmStatistics]) -> ArmStatistics:
    sums = Counter[str]()
    for part in parts:
        sums.update(part.sums)
    return ArmStatistics(sums)


@settings(deadline=None)
@given(st.lists(REQUESTS, max_size=20), st.integers(0, 20))
def test_two_replicas_sums_are_those_of_one_that_saw_it_all(requests: list[RequestFigures], at: int) -> None:
    parts = [statistics_of(requests[:at]), statistics_of(requests[at:], at)]
    whole, joined, reversed_ = statistics_of(requests), added(parts), added(reversed(parts))
    assert whole.sums.keys() == joined.sums.keys() == reversed_.sums.keys()
    for name, value in whole.sums.items():
        assert joined.sums[name] == pytest.approx(value, rel=1e-9)
        assert reversed_.sums[name] == pytest.approx(value, rel=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_right_to_the_stated_error(values: list[float], share: float) -> None:
    found = statistics_of([request(value) for value in values])
    wanted = sorted(values)[max(math.ceil(share * len(values)), 1) - 1]
    assert found.quantile(Figure.E2E, share) == pytest.approx(wanted, rel=RELATIVE_ERROR * 1.001)


def test_values_beyond_all_bounds_add_no_names() -> None:
    found = statistics_of([request(10.0**power) for power in range(-30, 30)] + [request(0.0)])
    assert sum(name.startswith("e2e:b:") for name in found.sums) <= NUM_BUCKETS
    assert found.quantile(Figure.E2E, 0.0) == pytest.approx(1e-3, rel=0.02)
    assert found.quantile(Figure.E2E, 1.0) == pytest.approx(1e8, rel=0.02)


def test_a_quantiles_interval_holds_as_often_as_it_says() -> None:
    chance, num_right, num_trials = np.random.default_rng(1), 0, 400
    for _ in range(num_trials):
        found = statistics_of([request(value) for value in chance.exponential(100, 150)])
        interval = found.quantile_interval(Figure.E2E, 0.5, 0.95)
        assert interval.low is not None
        assert interval.high is not None
        num_right += interval.low <= 100 * math.log(2) <= interval.high
    assert num_right / num_trials > 0.91


def test_of_too_few_requests_a_side_is_not_known() -> None:
    found = statistics_of([request(value) for value in range(1, 101)])
    p99 = found.quantile_interval(Figure.E2E, 0.99, 0.95)
    assert p99.high is None
    assert p99.low == pytest.approx(96, rel=0.03)
    nothing = ArmStatistics()
    assert nothing.quantile(Figure.TPOT, 0.5) is None
    assert nothing.draft_acceptance_rate is None


def test_requests_are_counted_by_how_they_ended() -> None:
    found = statistics_of([request(), request()])
    for what in (Count.FAILED, Count.LATE, Count.LEFT, Count.REFUSED):
        found.lose(what, 0)
    found.count(Count.AUDITED)
    assert found.num_ended == 6
    assert found.num_judged == 5
    assert found.loss_rate(Loss.FAILURES) == pytest.approx(1 / 5)
    assert found.loss_rate(Loss.DEPARTURES) == pytest.approx(2 / 5)
    assert found.mean(Figure.TTFT).whole == 2
    assert found.mean(Figure.TPOT).whole == 0


def test_a_group_of_keys_that_loses_every_request_counts_once_for_each_kind_of_loss() -> None:
    found = ArmStatistics()
    for _ in range(9):
        for what in (Count.FAILED, Count.LATE, Count.LEFT, Count.REFUSED):
            found.lose(what, 7)
    found.lose(Count.LATE, 8)
    assert found.num_lost(Loss.FAILURES) == 9
    assert found.num_lost(Loss.DEPARTURES) == 19
    assert found.num_first(Loss.FAILURES) == 1
    assert found.num_first(Loss.DEPARTURES) == 2


def test_a_mean_weighs_requests_and_its_variance_keys() -> None:
    # A hundred requests each of six keys, which differ; within a key all are alike.
    found = ArmStatistics()
    for group in range(6):
        for _ in range(100):
            found.add(request(100.0 + group), group)
    mean = found.mean(Figure.E2E)
    assert mean.whole == 600
    assert mean.value == pytest.approx(102.5)
    assert mean.variance == pytest.approx(3.5 / 6)
    assert mean.degrees == pytest.approx(5)


def test_groups_beyond_the_number_of_clusters_share_one() -> None:
    found = ArmStatistics()
    for group in (1, 1 + NUM_CLUSTERS, 2):
        found.add(request(), group)
    assert found.mean(Figure.E2E).whole == 3
    assert sum(name.startswith("e2e:c:") for name in found.sums) == 2 * 2


def test_acceptance_weighs_hints_and_its_interval_requests() -> None:
    requests = [
        request(num_draft_tokens=100, num_accepted=90),
        request(num_draft_tokens=300, num_accepted=30),
    ] * 20
    found = statistics_of([*requests, request()])
    assert found.draft_acceptance_rate == pytest.approx(120 / 400)
    interval = found.draft_acceptance_interval(0.95)
    # By hand: residuals of a request are 60 and -60, of 40 requests with 200 hints each on average; as many weigh nine
    # times as much as the others, which leaves 23.4 degrees of freedom.
    deviation = math.sqrt(60**2 * 40 / 39 / 40) / 200
    assert interval.high == pytest.approx(0.3 + 2.0667 * deviation, rel=2e-3)
    assert interval.low == pytest.approx(0.3 - 2.0667 * deviation, rel=2e-3)
