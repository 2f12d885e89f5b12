"""The thread that a worker's model runs in: order, bounds, failures, wake times, stop."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.concurrency.loop_share import LoopShare
from outrider.worker.model_thread import PEERS_EVENTS, PEERS_S, PEERS_SIZE, ModelThread

TIMEOUT_S = 20.0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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

    def __init__(
        self,
        core: FakeCore,
        max_events: int = 65536,
        max_peers_size: int = PEERS_SIZE,
        share: LoopShare | None = None,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self.core = core
        self.delivered: queue.Queue[str] = queue.Queue()
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self.thread: ModelThread[int, str] = ModelThread(
            core,
            self._deliver,
            self.failures.put,
            name="test-model",
            max_events=max_events,
            max_peers_size=max_peers_size,
            peers_share=share,
            processor=processor,
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


def test_what_peers_say_has_a_room_of_its_own() -> None:
    """I7. A peer that floods a worker shuts its callers out of nothing."""
    shell = Shell(FakeCore(), max_events=3, max_peers_size=2)
    assert [shell.thread.submit(i, peer="a") for i in range(4)] == [True, True, False, False]
    assert [shell.thread.submit(i) for i in range(4)] == [True, True, True, False]
    assert shell.thread.submit(9, is_release=True)


@dataclass(frozen=True)
class Streamed:
    """An event of one peer's stream."""

    stream_id: int
    number: int = 0
    hints: tuple[int, ...] = ()


def test_hints_count_as_what_they_are() -> None:
    shell = Shell(FakeCore(), max_peers_size=100)
    submit: Any = shell.thread.submit
    assert submit(Streamed(1, hints=(7,) * 60), peer="flood")
    assert not shell.thread.has_room("flood")
    assert shell.thread.has_room("honest")


class Stepping(FakeCore):
    """A core whose steps are always due. Events of peers compute for `event_s`; nothing else does."""

    def __init__(self, event_s: float) -> None:
        super().__init__()
        self.heard: list[Any] = self.events
        self.computed_s = 0.0
        self.event_s = event_s
        self.num_heard: list[int] = []  # of peers, at each turn
        self.has_events: list[bool] = []
        self.at_turn: dict[int, Callable[[], object]] = {}
        self.thread: Any = None
        self.on_event = self._compute
        self.next_turn = self._step

    def _compute(self, event: Any) -> list[str]:
        self.computed_s += self.event_s if isinstance(event, Streamed) else 0.0
        return []

    def _step(self, now: float) -> tuple[list[str], float | None]:
        self.num_heard.append(sum(isinstance(event, Streamed) for event in self.heard))
        self.has_events.append(self.thread.has_events())
        self.at_turn.get(len(self.num_heard), lambda: None)()
        return ["turn"], 0.0


def stepping(event_s: float, share: LoopShare | None) -> tuple[Stepping, Shell]:
    core = Stepping(event_s)
    shell = Shell(core, share=share, processor=lambda: core.computed_s)
    core.thread = shell.thread
    return core, shell


def run_turns(core: Stepping, shell: Shell, num_turns: int) -> None:
    start: Any = "start"
    shell.thread.submit(start)
    shell.start()
    while len(core.num_heard) < num_turns:
        shell.next()
    shell.thread.stop(TIMEOUT_S)


# A share so small that it does not come back while a test runs: the tests count events, not time.
SMALL_SHARE = 1e-9


def test_while_steps_are_due_peers_have_their_share_in_turns_and_callers_never_wait_for_them() -> None:
    core, shell = stepping(0.002, LoopShare(SMALL_SHARE, PEERS_S))
    submit: Any = shell.thread.submit

    def flood() -> None:
        for i in range(1000):
            submit(Streamed(i % 32, i), peer="flood")
        submit(Streamed(99), peer="honest")

    core.at_turn[1] = flood
    core.at_turn[3] = lambda: submit("call")
    run_turns(core, shell, 5)
    num_at_once = round(PEERS_S / 0.002) + 1
    assert core.num_heard[:5] == [0, *[num_at_once] * 4], "the others wait"
    assert core.heard.index(Streamed(99)) == 2, "one of the flood's 32 streams, then its own"
    assert "call" in core.heard


def test_peers_that_have_to_wait_are_no_news_for_a_step() -> None:
    core, shell = stepping(0.002, LoopShare(SMALL_SHARE, PEERS_S))
    submit: Any = shell.thread.submit
    core.at_turn[1] = lambda: [submit(Streamed(1, i), peer="flood") for i in range(1000)]
    core.at_turn[3] = lambda: submit(Streamed(1, 1000), peer="flood")
    run_turns(core, shell, 5)
    assert core.has_events[1:5] == [False] * 4


@pytest.mark.parametrize("share", [None, LoopShare(SMALL_SHARE, PEERS_S)], ids=["a draft worker", "a target"])
def test_an_idle_thread_takes_all_that_peers_send(share: LoopShare | None) -> None:
    core, shell = stepping(0.002, share)
    submit: Any = shell.thread.submit
    core.next_turn = lambda now: ([], None)
    for i in range(256):
        submit(Streamed(1, i), peer="honest")
    shell.start()
    wait_until(lambda: len(core.heard) == 256)
    shell.thread.stop(TIMEOUT_S)
    assert [event.number for event in core.heard] == list(range(256))
    assert share is None or share.spent_s == 0.0, "what it heard while idle is no debt"


def test_an_idle_thread_wakes_for_each_event_of_a_peer() -> None:
    core: Any = FakeCore()
    shell = Shell(core)
    submit: Any = shell.thread.submit
    shell.start()
    for i in range(500):
        submit(Streamed(1, i), peer="honest")
        shell.next()
    shell.thread.stop(TIMEOUT_S)
    assert [event.number for event in core.events] == list(range(500))


def test_a_thread_that_waits_takes_all_that_peers_send() -> None:
    """A target whose next step waits for hints."""
    core, shell = stepping(0.002, LoopShare(SMALL_SHARE, PEERS_S))
    submit: Any = shell.thread.submit
    core.next_turn = lambda now: ([], now + 3600.0)
    shell.start()
    for i in range(256):
        submit(Streamed(1, i), peer="honest")
    wait_until(lambda: len(core.heard) == 256)
    shell.thread.stop(TIMEOUT_S)


def test_a_draft_workers_thread_takes_all_between_two_steps() -> None:
    core, shell = stepping(0.002, None)
    submit: Any = shell.thread.submit
    core.at_turn[1] = lambda: [submit(Streamed(0, i), peer=f"target-{i % 2}") for i in range(256)]
    core.at_turn[2] = lambda: [submit(Streamed(0, i), peer="target-0") for i in range(2 * PEERS_EVENTS)]
    run_turns(core, shell, 4)
    assert core.num_heard[:3] == [0, 256, 256 + PEERS_EVENTS], "and no more than so many, that steps go on"


def test_a_caller_waits_for_a_share_of_a_flood_though_no_step_is_due() -> None:
    core, shell = stepping(0.002, LoopShare(SMALL_SHARE, PEERS_S))
    submit: Any = shell.thread.submit
    core.next_turn = lambda now: ([], None)
    for i in range(1000):
        submit(Streamed(1, i), peer="flood")
    compute = core.on_event

    def call_soon(event: Any) -> list[str]:
        if event == Streamed(1, 10):
            submit("call")
        return compute(event)

    core.on_event = call_soon
    shell.start()
    wait_until(lambda: "call" in core.heard)
    shell.thread.stop(TIMEOUT_S)
    assert core.heard.index("call") <= 11 + round(PEERS_S / 0.002) + 1


def test_the_end_of_a_stream_comes_after_all_of_it() -> None:
    core: Any = FakeCore()
    shell = Shell(core)
    submit: Any = shell.thread.submit
    for i in range(3):
        submit(Streamed(1, i), peer="a")
    submit(Streamed(2, 7), peer="a")
    submit(Streamed(1, 99), is_release=True, peer="a")
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
