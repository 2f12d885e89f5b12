"""The watch over a client's pace, with a clock and timers of the test's own."""

from __future__ import annotations

import asyncio
import heapq
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Message

from coordinator.api.http.client_connection import PART_BYTES_MAX, ClientConnection
from coordinator.output.client_pace import CUT_AFTER, PACE_BYTES, PaceWatch


@dataclass
class Timers:
    """Stands for an event loop: time passes when the test says so."""

    now_s: float = 0.0
    due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = field(default_factory=list)

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> Any:
        return self.call_at(self.now_s + delay_s, call, *arguments)

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
    monkeypatch.setattr(asyncio, "current_task", lambda: None)
    return timers


class Measured:
    """A watch with a limit of 30 s, and the interval that it measures."""

    def __init__(self, timers: Timers) -> None:
        self.since_s: float | None = None
        self.stalls: list[float] = []
        self.watch = PaceWatch(lambda: self.since_s, 30.0, lambda: self.stalls.append(timers.now_s))
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


class Server:
    """The parts of a uvicorn server that a client's connection uses; the client reads one part every `part_s`
    seconds."""

    def __init__(self, timers: Timers, part_s: float) -> None:
        self.cut_s: float | None = None
        self.num_unread = 0
        self._timers = timers
        self._part_s = part_s
        self.transport = self  # of its one cycle, which it is itself
        self.cycle = self

    async def receive(self) -> Message:
        raise AssertionError("nothing else comes")

    async def send(self, message: Message) -> None:
        until_s = self._timers.now_s + self._part_s
        self._timers.pass_until(until_s)

    def get_extra_info(self, name: str) -> socket.socket | None:
        return None

    def get_protocol(self) -> Server:
        return self

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def abort(self) -> None:
        self.cut_s = self._timers.now_s


STALL_MAX_S = 30.0
WITHIN_S = CUT_AFTER * STALL_MAX_S


def sent(timers: Timers, part_s: float, num_bytes: int) -> tuple[ClientConnection, Server]:
    server = Server(timers, part_s)
    connection = ClientConnection(server.receive, server.send, STALL_MAX_S, lambda: None)
    sending = connection.send({"type": "http.response.body", "body": bytes(num_bytes)})
    with pytest.raises(StopIteration):  # nothing in it has to wait for a loop
        sending.send(None)
    return connection, server


@pytest.mark.parametrize("num_bytes", [PACE_BYTES, 8 * PACE_BYTES])
def test_a_finished_answer_is_not_kept_for_one_who_takes_a_little_of_it_at_a_time(
    timers: Timers, num_bytes: int
) -> None:
    connection, server = sent(timers, WITHIN_S - 1, num_bytes)
    assert connection.is_cut
    assert server.cut_s is not None
    assert server.cut_s <= WITHIN_S * (1 + num_bytes / PACE_BYTES)


def test_a_large_answer_may_take_as_long_as_its_size_permits(timers: Timers) -> None:
    part_s = WITHIN_S * PART_BYTES_MAX / PACE_BYTES
    connection, server = sent(timers, part_s, 8 * PACE_BYTES)
    connection.end()
    timers.pass_until(timers.now_s + 1000)
    assert server.cut_s is None
    assert timers.now_s >= 8 * WITHIN_S


def test_an_answer_of_one_part_has_the_whole_limit(timers: Timers) -> None:
    connection, _ = sent(timers, WITHIN_S - 1, PART_BYTES_MAX)
    assert not connection.is_cut


@pytest.mark.parametrize("num_unread", [0, 1])
def test_the_rest_of_an_answer_has_to_be_taken_within_the_limit(timers: Timers, num_unread: int) -> None:
    connection, server = sent(timers, 0.1, PACE_BYTES)
    server.num_unread = 2 * PART_BYTES_MAX
    connection.end()
    timers.pass_until(timers.now_s + WITHIN_S - 1)
    server.num_unread = num_unread
    timers.pass_until(timers.now_s + 2)
    assert connection.is_cut == bool(num_unread)
