"""Which draft worker an engine's request is attached to."""

from __future__ import annotations

import pytest

from outrider.engines.hint_server.draft_pool import EMPTY_S, FULL_S, PAUSES_S, REFUSED_S, DraftPool


def test_the_worker_with_the_fewest_sessions_is_chosen() -> None:
    pool = DraftPool(["a:1", "b:1"])
    pool.workers[0].num_sessions = 2
    chosen = pool.choose(0.0)
    assert chosen is pool.workers[1]


def test_ties_take_turns() -> None:
    pool = DraftPool(["a:1", "b:1", "c:1"])
    assert {pool.choose(0.0) for _ in range(3)} == set(pool.workers)


def test_a_worker_that_fails_is_left_alone_for_longer_and_longer() -> None:
    pool = DraftPool(["a:1"])
    (worker,) = pool.workers
    now = 0.0
    for number, pause_s in enumerate((*PAUSES_S, PAUSES_S[-1])):
        assert pool.fail(worker, now) is (number == 0), "the first of several in a row is reported"
        assert not pool.fail(worker, now), "its other sessions report the same failure"
        assert pool.choose(now) is None
        assert pool.wait_s(now) == pytest.approx(pause_s)
        now += pause_s
        assert pool.choose(now) is worker
    pool.succeed(worker)
    assert pool.fail(worker, now)
    assert pool.wait_s(now) == pytest.approx(PAUSES_S[0])


def test_others_take_over_from_one_that_is_full_or_refuses() -> None:
    pool = DraftPool(["a:1", "b:1"])
    first, second = pool.workers
    pool.fill(first, 0.0)
    assert pool.choose(0.0) is second
    assert pool.refuse(second, 0.0)
    assert not pool.refuse(second, 1.0)
    assert pool.choose(FULL_S) is first
    pool.fail(first, FULL_S)
    assert pool.choose(FULL_S) is None
    pool.fill(second, FULL_S)
    assert second.away_until >= REFUSED_S, "it is not there sooner for that"


def test_one_that_cannot_follow_a_request_is_not_chosen_for_it() -> None:
    pool = DraftPool(["a:1", "b:1"])
    first, second = pool.workers
    second.num_sessions = 5
    assert pool.choose(0.0, {first}) is second
    pool.fill(second, 0.0)
    assert pool.choose(0.0, {first}) is None
    assert pool.wait_s(0.0, {first}) == pytest.approx(FULL_S)
    assert pool.wait_s(0.0) == 0.0
    assert pool.choose(1.0, {first, second}) is None
    assert pool.wait_s(1.0, {first, second}) == pytest.approx(EMPTY_S), "until another one may have come"


def test_workers_come_and_go_and_those_that_stay_are_remembered() -> None:
    pool = DraftPool(())
    assert pool.choose(0.0) is None
    assert pool.wait_s(0.0) == EMPTY_S
    pool.replace(["a:1", "b:1"])
    first, _ = pool.workers
    pool.fail(first, 0.0)
    pool.replace(["c:1", "a:1"])
    assert [each.address for each in pool.workers] == ["c:1", "a:1"]
    assert pool.workers[1] is first
    chosen = pool.choose(0.0)
    assert chosen is not None
    assert chosen.address == "c:1"


def test_one_address_is_one_worker() -> None:
    assert len(DraftPool(["a:1", "a:1"]).workers) == 1
