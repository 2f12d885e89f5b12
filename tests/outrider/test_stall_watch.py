"""A model that is stuck is told apart from a process that was paused."""

from __future__ import annotations

from outrider.worker.stall_watch import StallWatch


def test_a_stuck_model_counts_from_the_moment_it_was_asked() -> None:
    watch = StallWatch(interval_s=1.0, now_s=100.0)
    assert [watch.look(float(n), 101.0 + n) for n in range(40)] == [float(n) for n in range(40)]


def test_a_process_that_was_paused_does_not_blame_its_model() -> None:
    """It owes a sign for the whole pause, in which it could not give one."""
    watch = StallWatch(interval_s=1.0, now_s=100.0)
    assert watch.look(0.0, 101.0) == 0.0
    assert watch.look(61.0, 162.0) == 2.0
    assert watch.look(0.0, 163.0) == 0.0


def test_a_model_that_stays_stuck_after_a_pause_is_found_out() -> None:
    watch = StallWatch(interval_s=1.0, now_s=100.0)
    watch.look(0.0, 101.0)
    assert [watch.look(60.0 + n, 161.0 + n) for n in range(30)][-1] == 31.0


def test_a_sign_of_life_ends_what_was_counted() -> None:
    watch = StallWatch(interval_s=1.0, now_s=0.0)
    for n in range(10):
        watch.look(float(n), 1.0 + n)
    assert watch.look(0.0, 11.0) == 0.0
    assert watch.look(1.0, 12.0) == 1.0
