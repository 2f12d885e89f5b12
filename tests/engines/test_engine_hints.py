"""An engine tells its hint server of commits as often as somebody waits for them; hints have a share of its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.engines.engine_hints import FRAME_REQUESTS, TAKE_S, TAKE_SHARE, TELL_S, EngineHints
from outrider.engines.frames import FrameKind
from outrider.engines.hinted_requests import Fed, HintedRequests
from protos.outrider.v1 import draft_pb2, hints_pb2

VOCAB_SIZE = 100
STEP_S = TELL_S / 10


class Link:
    """The engine's end of a connection that keeps what it is to send."""

    is_open = True
    is_busy = False

    def __init__(self) -> None:
        self.hints = deque[tuple[hints_pb2.HintFrame, float]]()
        self.commits: list[hints_pb2.CommitFrame] = []
        self.opened: list[int] = []
        self.on_wait: Callable[[float], None] = lambda longest_s: None

    def open(self, now: float) -> bool:
        return False

    def flush(self, now: float) -> None: ...

    def close(self) -> None: ...

    def send(self, kind: FrameKind, body: bytes, number: int = 0) -> None:
        if kind is FrameKind.COMMITS:
            self.commits.append(hints_pb2.CommitFrame.FromString(body))
        else:
            self.opened.append(number)

    def receive(self, now: float) -> Iterator[tuple[hints_pb2.HintFrame, float]]:
        while self.hints:
            yield self.hints.popleft()

    def wait(self, longest_s: float) -> None:
        self.on_wait(longest_s)


class Engine:
    """An engine with one request, of which each step takes `STEP_S` and makes one token."""

    def __init__(self) -> None:
        self.now = 100.0
        self.link = Link()
        link: Any = self.link
        self.computed_s = 0.0
        self.requests = HintedRequests(VOCAB_SIZE, may_pause=False)
        self.hints = EngineHints(self.requests, link, lambda: self.now, lambda: self.computed_s, self.sleep)
        self.text = [1, 2, 3]
        self.hints.open("a", self.text, draft_pb2.AttachRequest(), frozenset(), is_sampled=False)

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)  # as a real clock: it never stands

    def flood(self, frame_s: float, num_frames: int = 20_000) -> list[int]:
        """Many frames have arrived, and taking each computes for so long. Returns the list of their numbers to which
        those that are taken are added."""
        taken = list[int]()

        def take(frame: hints_pb2.HintFrame, at: float) -> None:
            taken.append(frame.ping)
            self.computed_s += frame_s
            self.now += frame_s

        self.requests.take = take  # type: ignore[method-assign]
        self.link.hints = deque((hints_pb2.HintFrame(ping=number), self.now) for number in range(num_frames))
        return taken

    def run(self, num_steps: int) -> list[hints_pb2.CommitFrame]:
        """Runs steps; returns what the hint server was told of their commits."""
        self.link.commits.clear()
        for _ in range(num_steps):
            self.hints.collect()
            self.now += STEP_S
            self.text.append(len(self.text) % VOCAB_SIZE)
            self.hints.finish_step([Fed("a", 0)], 1, STEP_S * 1e3, only_decodes=True)
        return list(self.link.commits)

    def attach(self) -> None:
        frame = hints_pb2.HintFrame()
        frame.subscribe.add(channel=1, attachment=1)
        self.link.hints.append((frame, self.now))


def tokens(frames: list[hints_pb2.CommitFrame]) -> list[int]:
    return [token_id for frame in frames for commit in frame.commits for token_id in commit.token_ids]


def test_commits_that_no_draft_worker_waits_for_are_told_a_few_times_a_second() -> None:
    engine = Engine()
    told = engine.run(100)
    assert 9 <= len(told) <= 11
    assert tokens(told) == engine.text[3 : 3 + len(tokens(told))], "none is left out"
    assert len(tokens(told)) >= 90


def test_a_draft_worker_that_follows_is_told_of_each_step_and_of_all_before() -> None:
    engine = Engine()
    before = engine.run(15)
    engine.attach()
    after = engine.run(5)
    assert len(after) == 6, "at once when it attaches, and after each step"
    assert tokens(before + after) == engine.text[3:]


def test_the_end_of_a_request_is_told_at_once() -> None:
    engine = Engine()
    engine.run(15)
    engine.link.commits.clear()
    engine.hints.close("a", in_step=False)
    assert [commit.is_finished for frame in engine.link.commits for commit in frame.commits][-1:] == [True]


@pytest.mark.parametrize("frame_s", [2e-5, 1e-4, 0.003])
def test_a_flood_has_its_share_of_the_engines_time_and_the_rest_waits(frame_s: float) -> None:
    engine = Engine()
    taken = engine.flood(frame_s)
    num_steps, longest_s, began, step_s = 200, 0.0, engine.now, TAKE_S / TAKE_SHARE / 2
    for _ in range(num_steps):
        before = engine.computed_s
        engine.hints.collect()
        longest_s = max(longest_s, engine.computed_s - before)
        engine.now += step_s
    assert longest_s <= TAKE_S + frame_s, "what one step spends"
    assert 0.8 * TAKE_SHARE < engine.computed_s / (engine.now - began) < TAKE_SHARE + 2 * TAKE_S / (num_steps * step_s)
    assert taken == list(range(len(taken))), "none is lost or taken twice"


@pytest.mark.parametrize("step_s", [0.001, 0.004, 0.010])
def test_the_hints_of_every_request_are_taken_in_each_step_however_short_it_is(step_s: float) -> None:
    engine, num_requests = Engine(), 128
    taken = engine.flood(1.46e-4, 0)
    fed = [Fed(f"other-{index}", 0) for index in range(num_requests)]
    num_frames = num_requests // FRAME_REQUESTS
    for step in range(200):
        engine.hints.finish_step(fed, num_requests, step_s * 1e3, only_decodes=True)
        engine.link.hints += [(hints_pb2.HintFrame(ping=step), engine.now)] * num_frames
        engine.hints.collect()
        assert len(taken) == (step + 1) * num_frames
        engine.now += step_s


def test_hints_that_came_late_catch_up_in_short_steps() -> None:
    engine, num_requests, step_s = Engine(), 256, 0.004
    num_frames = num_requests // FRAME_REQUESTS
    taken = engine.flood(1.46e-4, 8)
    fed = [Fed(f"other-{index}", 0) for index in range(num_requests)]
    for _ in range(20):
        engine.hints.finish_step(fed, num_requests, step_s * 1e3, only_decodes=True)
        engine.link.hints += [(hints_pb2.HintFrame(), engine.now)] * num_frames
        engine.hints.collect()
        engine.now += step_s
    assert len(taken) == 8 + 20 * num_frames, "nothing is left for a later step"


def test_a_flood_over_one_request_has_no_more_than_its_share_in_short_steps() -> None:
    engine, step_s = Engine(), 0.001
    taken, began = engine.flood(1.46e-4), engine.now
    for _ in range(200):
        engine.hints.finish_step([Fed("other", 0)], 1, step_s * 1e3, only_decodes=True)
        engine.hints.collect()
        engine.now += step_s
    assert engine.computed_s / (engine.now - began) < TAKE_SHARE + TAKE_S / (200 * step_s)
    assert taken == list(range(len(taken)))


def test_hints_of_a_quiet_step_are_all_taken_at_once() -> None:
    engine = Engine()
    taken = engine.flood(1e-5, 50)
    engine.hints.collect()
    assert len(taken) == 50


def test_time_in_which_others_have_the_processor_is_not_counted() -> None:
    engine = Engine()
    taken = engine.flood(0.0, 50)

    def take(frame: hints_pb2.HintFrame, at: float) -> None:
        taken.append(frame.ping)
        engine.now += 0.1

    engine.requests.take = take  # type: ignore[method-assign]
    engine.hints.collect()
    assert len(taken) == 50


def test_a_flood_neither_ends_a_wait_for_hints_nor_keeps_the_engine_busy_in_it() -> None:
    engine = Engine()
    taken = engine.flood(1e-4)
    until, waits = engine.now + 0.05, list[float]()
    engine.link.on_wait = waits.append
    engine.requests.wait_until = lambda limits, num_running, now: until if now < until else None  # type: ignore[method-assign]
    engine.hints.wait({"a": 7}, 1)
    assert until <= engine.now < until + TAKE_S
    assert engine.computed_s <= TAKE_S + TAKE_SHARE * 0.05 + 2e-4
    assert len(taken) > 20, "hints go on to be taken, honest ones among them"
    assert len(waits) < 5, "while the share is used up it does not look for more"


def test_after_the_loss_of_a_hint_server_requests_are_announced_over_several_steps() -> None:
    engine = Engine()
    for number in range(50):
        engine.hints.open(f"r{number}", [1] * 10, draft_pb2.AttachRequest(), frozenset(), is_sampled=False)
    engine.requests.disconnect()
    engine.link.opened.clear()
    engine.link.is_busy = True
    engine.hints.collect()
    assert engine.link.opened == []
    engine.link.is_busy = False
    steps = 0
    real_now = engine.hints._now

    def now() -> float:
        engine.now += 0.0003
        return real_now()

    engine.hints._now = now
    while len(engine.link.opened) < 51:
        before = len(engine.link.opened)
        engine.hints.collect()
        assert before < len(engine.link.opened) <= before + 5
        steps += 1
    assert steps > 10
    assert sorted(engine.link.opened) == list(range(1, 52)), "each once"
