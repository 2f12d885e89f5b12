"""The thread that a worker's model runs in: order, bounds, failures, wake times, stop."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.worker.model_thread import PEERS_S, ModelThread

TIMEOUT_S = 20.0


class FakeCore:
    """Records what it is told; `next_turn` says what a turn answers."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.turns: list[tuple[float, int]] = []  # when, and how many events had been handled
        self.threads: set[int] = set()
        self.next_turn: Callable[[float], tuple[list[str], float | None]] = lambda now: ([], None)
        self.on_event: Callable[[int], list[str]] = lambda event: [f"heard {event}"]

    def handle(self, event: int, now: float) -> list[str]:
        self.threads.add(threading.get_ident())
        self.events.append(event)
        return self.on_event(event)

    def run_next(self, now: float) -> tuple[list[str], float | None]:
        self.threads.add(threading.get_ident())
        self.turns.append((now, len(self.events)))
        return self.next_turn(now)


class Shell:
    """A model thread around a fake core."""

    def __init__(self, core: FakeCore, max_events: int = 65536, max_stream_events: int = 1024) -> None:
        self.core = core
        self.delivered: queue.Queue[str] = queue.Queue()
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self.thread: ModelThread[int, str] = ModelThread(
            core,
            self._deliver,
            self.failures.put,
            name="test-model",
            max_events=max_events,
            max_stream_events=max_stream_events,
        )
        self.is_started = False

    def _deliver(self, actions: list[str]) -> None:
        for action in actions:
            self.delivered.put(action)

    def start(self) -> None:
        self.is_started = True
        self.thread.start()

    def next(self) -> str:
        return self.delivered.get(timeout=TIMEOUT_S)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def shell(core: FakeCore) -> Iterator[Shell]:
    made = Shell(core)
    yield made
    if made.is_started:
        made.thread.stop(TIMEOUT_S)
        assert not made.thread._thread.is_alive()


def test_events_are_handled_in_order_on_one_thread_that_is_not_the_callers(core: FakeCore, shell: Shell) -> None:
    shell.start()
    for number in range(500):
        assert shell.thread.submit(number)
    assert [shell.next() for _ in range(500)] == [f"heard {number}" for number in range(500)]
    assert core.events == list(range(500))
    assert len(core.threads) == 1
    assert threading.get_ident() not in core.threads


def test_events_that_came_before_the_start_are_not_lost(shell: Shell) -> None:
    assert shell.thread.submit(1)
    shell.start()
    assert shell.next() == "heard 1"


def test_a_core_can_know_that_there_is_news(shell: Shell) -> None:
    assert not shell.thread.has_events()
    assert shell.thread.submit(1)
    assert shell.thread.has_events()
    shell.start()
    shell.next()
    assert not shell.thread.has_events()


def test_inbox_is_bounded_and_says_when_it_is_full() -> None:
    """I7. Nothing takes events: the thread has not been started."""
    shell = Shell(FakeCore(), max_events=3)
    assert [shell.thread.submit(i) for i in range(5)] == [True, True, True, False, False]


def test_what_peers_say_finds_half_as_much_room() -> None:
    """I7. A peer that floods a worker shuts its callers out of nothing."""
    shell = Shell(FakeCore(), max_events=4)
    assert [shell.thread.submit(i, is_from_peer=True) for i in range(4)] == [True, True, False, False]
    assert [shell.thread.submit(i) for i in range(4)] == [True, True, True, False]
    assert shell.thread.submit(9, is_release=True)


@dataclass(frozen=True)
class Streamed:
    """An event of one peer's stream."""

    stream_id: int
    number: int = 0


def test_a_stream_that_floods_shuts_no_other_one_out() -> None:
    shell = Shell(FakeCore(), max_events=100, max_stream_events=3)
    submit: Any = shell.thread.submit
    assert [submit(Streamed(1, i), is_from_peer=True) for i in range(5)] == [True, True, True, False, False]
    assert submit(Streamed(2), is_from_peer=True)


def test_streams_take_turns_within_their_share_of_the_time_and_callers_never_wait_for_them() -> None:
    core: Any = FakeCore()
    shell = Shell(core, max_events=10_000, max_stream_events=2000)
    submit: Any = shell.thread.submit
    computed_s = 0.0

    def handle(event: Any) -> list[str]:
        nonlocal computed_s
        computed_s += 0.002 if isinstance(event, Streamed) else 0.0
        return []

    turns = list[int]()

    def turn(now: float) -> tuple[list[str], float | None]:
        turns.append(sum(isinstance(event, Streamed) for event in core.events))
        if len(turns) == 3:
            submit("call")
        return ["turn"], 0.0

    core.on_event, core.next_turn = handle, turn
    shell.thread._processor = lambda: computed_s
    for i in range(1000):
        submit(Streamed(1, i), is_from_peer=True)
    submit(Streamed(2), is_from_peer=True)
    shell.start()
    while "call" not in core.events:
        shell.next()
    shell.thread.stop(TIMEOUT_S)
    num_at_once = round(PEERS_S / 0.002) + 1
    assert turns[0] <= num_at_once, "the others wait for the next step"
    assert core.events.index(Streamed(2)) == 1, "one of the first's, then its own"
    flood = [event.number for event in core.events if event in (Streamed(1, i) for i in range(1000))]
    assert flood == list(range(len(flood)))
    assert core.events.index("call") <= turns[2] + 1


def test_what_is_left_of_peers_events_is_handled_though_nothing_else_comes() -> None:
    core: Any = FakeCore()
    shell = Shell(core)
    submit: Any = shell.thread.submit
    clock = itertools.count()
    shell.thread._processor = lambda: next(clock) * 0.003
    for i in range(20):
        submit(Streamed(1, i), is_from_peer=True)
    shell.start()
    for _ in range(20):
        shell.next()
    shell.thread.stop(TIMEOUT_S)
    assert [event.number for event in core.events] == list(range(20))


def test_the_end_of_a_stream_comes_after_all_of_it() -> None:
    core: Any = FakeCore()
    shell = Shell(core)
    submit: Any = shell.thread.submit
    for i in range(3):
        submit(Streamed(1, i), is_from_peer=True)
    submit(Streamed(2, 7), is_from_peer=True)
    submit(Streamed(1, 99), is_release=True)
    shell.start()
    for _ in range(2):
        shell.next()
    shell.thread.stop(TIMEOUT_S)
    assert core.events == [Streamed(1, 99), Streamed(2, 7)]


def test_inbox_takes_events_again_once_the_core_has_caught_up(core: FakeCore) -> None:
    shell = Shell(core, max_events=3)
    for i in range(4):
        shell.thread.submit(i)
    shell.start()
    assert [shell.next() for _ in range(3)] == ["heard 0", "heard 1", "heard 2"]
    assert shell.thread.submit(9)
    assert shell.next() == "heard 9"
    shell.thread.stop(TIMEOUT_S)


def test_a_core_without_work_is_left_alone_until_an_event_comes(core: FakeCore, shell: Shell) -> None:
    core.next_turn = lambda now: ([f"turn {len(core.turns)}"], None)
    shell.start()
    shell.thread.submit(1)
    assert [shell.next(), shell.next()] == ["heard 1", "turn 1"]
    with pytest.raises(queue.Empty):
        shell.delivered.get(timeout=0.1)
    assert len(core.turns) == 1


def test_a_core_with_work_is_called_again_at_once_and_events_come_in_between(core: FakeCore, shell: Shell) -> None:
    core.next_turn = lambda now: ([], 0.0)
    shell.start()
    shell.thread.submit(1)
    assert shell.next() == "heard 1"
    shell.thread.submit(2)
    assert shell.next() == "heard 2"


def test_a_wake_time_is_kept(core: FakeCore, shell: Shell) -> None:
    """Not before it, though the upper bound depends on the machine's load."""
    wait_s = 0.15

    def turn(now: float) -> tuple[list[str], float | None]:
        return ["woken"], (now + wait_s if len(core.turns) == 1 else None)

    core.next_turn = turn
    shell.start()
    shell.thread.submit(1)
    assert [shell.next() for _ in range(3)] == ["heard 1", "woken", "woken"]
    first, second = core.turns[0][0], core.turns[1][0]
    assert wait_s - 0.005 <= second - first < TIMEOUT_S


def test_an_event_ends_a_wait_early(core: FakeCore, shell: Shell) -> None:
    core.next_turn = lambda now: (["turn"], now + 3600.0)
    shell.start()
    shell.thread.submit(1)
    assert [shell.next(), shell.next()] == ["heard 1", "turn"]
    shell.thread.submit(2)
    assert [shell.next(), shell.next()] == ["heard 2", "turn"]


@pytest.mark.parametrize("where", ["handle", "run_next", "deliver"])
def test_a_failure_is_reported_once_with_its_cause_and_ends_the_thread(core: FakeCore, where: str) -> None:
    shell = Shell(core)
    cause = RuntimeError(f"broken in {where}")

    def fail(*_: object) -> list[str]:
        raise cause

    if where == "handle":
        core.on_event = fail
    elif where == "run_next":
        core.next_turn = fail  # type: ignore[assignment]
    else:
        shell.thread._deliver = fail  # type: ignore[assignment]
    shell.start()
    shell.thread.submit(1)
    assert shell.failures.get(timeout=TIMEOUT_S) is cause
    shell.thread._thread.join(TIMEOUT_S)
    assert not shell.thread._thread.is_alive()
    assert shell.failures.empty()


@pytest.mark.parametrize("state", ["idle", "waiting", "busy"])
def test_stop_ends_the_thread_whatever_it_does(core: FakeCore, state: str) -> None:
    answers: dict[str, Callable[[float], tuple[list[str], float | None]]] = {
        "idle": lambda now: ([], None),
        "waiting": lambda now: ([], now + 3600.0),
        "busy": lambda now: ([], 0.0),
    }
    core.next_turn = answers[state]
    shell = Shell(core)
    shell.start()
    shell.thread.submit(1)
    assert shell.next() == "heard 1"
    shell.thread.stop(TIMEOUT_S)
    assert not shell.thread._thread.is_alive()
    assert shell.failures.empty()


def test_a_step_that_does_not_end_can_be_seen_from_outside(core: FakeCore, shell: Shell) -> None:
    """The duration of a stall is visible to a watchdog while the step still runs."""
    entered, leave = threading.Event(), threading.Event()

    def turn(now: float) -> tuple[list[str], float | None]:
        if core.events == [1]:
            entered.set()
            leave.wait(TIMEOUT_S)
        return [], None

    def becomes_well() -> bool:
        deadline = time.monotonic() + TIMEOUT_S
        while (stalled_s := shell.thread.stalled_s()) > 0.0 and time.monotonic() < deadline:
            time.sleep(0.001)
        return stalled_s == 0.0

    core.next_turn = turn
    shell.start()
    assert becomes_well(), "it has nothing to do, and could"
    shell.thread.submit(1)
    assert entered.wait(TIMEOUT_S)
    shell.thread.stalled_s()
    time.sleep(0.05)
    assert shell.thread.stalled_s() >= 0.05
    leave.set()
    assert becomes_well()
    assert core.events == [1], "the core hears nothing of it"


def test_events_that_keep_coming_do_not_keep_steps_from_running(core: FakeCore, shell: Shell) -> None:
    """A peer that floods the worker with hints must not stop everyone's text (I7)."""
    limit = 5000

    def flood(event: int) -> list[str]:
        if event < limit:
            shell.thread.submit(event + 1)
        return []

    core.on_event = flood
    core.next_turn = lambda now: (["turn"], 0.0 if len(core.events) < limit else None)
    shell.start()
    shell.thread.submit(1)
    assert shell.next() == "turn"
    assert core.turns[0][1] < limit, "no step ran before the flood was over"


def test_a_sign_of_life_may_come_while_somebody_looks_for_it(core: FakeCore, shell: Shell) -> None:
    shell.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            assert shell.thread.stalled_s() >= 0.0
    finally:
        sys.setswitchinterval(interval_s)
