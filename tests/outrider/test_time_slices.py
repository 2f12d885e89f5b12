"""The length of a thread's turns."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from outrider.concurrency import time_slices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduler")


def in_a_thread(function: object) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(function()))  # type: ignore[operator]
    thread.start()
    thread.join(10.0)
    return found


def test_nothing_but_the_slice_changes() -> None:
    def change() -> tuple[int, int, bool]:
        time_slices.use_short_slices()
        time_slices.use_default_slices()
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), True

    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), True
    assert in_a_thread(change) == [before]


def test_another_policy_is_left_alone() -> None:
    def change() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return time_slices.use_short_slices(), os.sched_getscheduler(0)

    assert in_a_thread(change) == [(False, os.SCHED_BATCH)]
