"""A stream's part of the event loop."""

from __future__ import annotations

import pytest

from outrider.concurrency.loop_share import BURST_S, SHARE_MAX, LoopShare


def test_little_work_never_waits() -> None:
    share, now = LoopShare(), 100.0
    for _ in range(10_000):
        assert share.wait_s(now) == 0.0
        share.spend(0.001, now)
        now += 0.001 / SHARE_MAX


def test_a_burst_is_free_and_what_goes_beyond_is_waited_for() -> None:
    share = LoopShare()
    share.spend(BURST_S, 5.0)
    assert share.wait_s(5.0) == 0.0
    share.spend(0.02, 5.0)
    assert share.wait_s(5.0) == pytest.approx(0.02 / SHARE_MAX)
    assert share.wait_s(5.0 + 0.02 / SHARE_MAX) == pytest.approx(0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("message_s", [0.0001, 0.03, 2.0])
def test_a_flood_takes_its_share_and_no_more(message_s: float) -> None:
    share, now, spent_s = LoopShare(), 0.0, 0.0
    while now < 1000.0:
        now += share.wait_s(now)
        now += message_s
        spent_s += message_s
        share.spend(message_s, now)
    assert 0.8 * SHARE_MAX < spent_s / now < 1.01 * SHARE_MAX


def test_what_was_saved_up_is_not_more_than_a_burst() -> None:
    share = LoopShare()
    share.spend(1.0, 0.0)
    share.spend(BURST_S + 0.1, 1e6)
    assert share.wait_s(1e6) == pytest.approx(0.1 / SHARE_MAX)
