"""The watch over a client's pace, with a clock and timers of the test's own."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.client_pace import StallWatch


@dataclass
class Timers:
    """Stands for an event loop: time passes when the test says so."""

    now_s: float = 0.0
    due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = field(default_factory=list)

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, call: Callable[..., object], *arguments: Any) -> Any:
        entry = (when_s, len(self.due), call, arguments)
        heapq.heappush(self.due, entry)
        timers = self

        class Handle:
            def cancel(self) -> None:
                timers.due.remove(entry)

        return Handle()

    def pass_until(self, until_s: float) -> None:
        """Every timer on time."""
        while self.due and self.due[0][0] <= until_s:
            self.now_s = max(self.now_s, self.due[0][0])
            self.fire()
        self.now_s = until_s

    def fire(self) -> None:
        _, _, call, arguments = heapq.heappop(self.due)
        call(*arguments)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: timers)
    return timers


class Measured:
    """What is watched, with a limit of 30 s."""

    def __init__(self, timers: Timers) -> None:
        self.since_s: float | None = None
        self.stalls: list[float] = []
        self.watch = StallWatch(lambda: self.since_s, 30.0, lambda: self.stalls.append(timers.now_s))
        self.watch.start()


def test_what_lasts_for_too_long_is_told_once_and_on_time(timers: Timers) -> None:
    measured = Measured(timers)
    timers.pass_until(12)
    measured.since_s = 12.0
    timers.pass_until(100)
    assert measured.stalls == [42.0]
    assert not timers.due


def test_what_begins_anew_is_measured_anew(timers: Timers) -> None:
    measured = Measured(timers)
    for begin_s in range(0, 300, 29):
        measured.since_s = float(begin_s)
        timers.pass_until(begin_s + 29)
    measured.since_s = None
    timers.pass_until(1000)
    assert measured.stalls == []


def test_an_event_loop_that_was_away_looks_again_before_it_blames(timers: Timers) -> None:
    measured = Measured(timers)
    measured.since_s = 0.0
    timers.now_s = 60.0  # stopped for half a minute too long
    timers.fire()
    assert measured.stalls == []
    measured.since_s = 60.0  # what lay ready has come through
    timers.pass_until(89)
    measured.since_s = None
    timers.pass_until(200)
    assert measured.stalls == []


def test_one_that_goes_on_stalling_after_that_is_told(timers: Timers) -> None:
    measured = Measured(timers)
    measured.since_s = 0.0
    timers.now_s = 60.0
    timers.fire()
    timers.pass_until(200)
    assert measured.stalls == [90.0]


def test_nothing_is_told_once_it_is_stopped(timers: Timers) -> None:
    measured = Measured(timers)
    measured.since_s = 0.0
    measured.watch.stop()
    timers.pass_until(100)
    assert measured.stalls == []
