"""An engine tells its hint server of commits as often as somebody waits for them."""

from __future__ import annotations

from typing import Any

from outrider.engines.engine_hints import TELL_S, EngineHints
from outrider.engines.frames import FrameKind
from outrider.engines.hinted_requests import Fed, HintedRequests
from protos.outrider.v1 import draft_pb2, hints_pb2

VOCAB_SIZE = 100
STEP_S = TELL_S / 10


class Link:
    """The engine's end of a connection that keeps what it is to send."""

    is_open = True

    def __init__(self) -> None:
        self.hints: list[tuple[hints_pb2.HintFrame, float]] = []
        self.commits: list[hints_pb2.CommitFrame] = []

    def open(self, now: float) -> bool:
        return False

    def flush(self, now: float) -> None: ...

    def close(self) -> None: ...

    def send(self, kind: FrameKind, body: bytes, number: int = 0) -> None:
        if kind is FrameKind.COMMITS:
            self.commits.append(hints_pb2.CommitFrame.FromString(body))

    def receive(self, now: float) -> list[tuple[hints_pb2.HintFrame, float]]:
        received, self.hints = self.hints, []
        return received


class Engine:
    """An engine with one request, of which each step takes `STEP_S` and makes one token."""

    def __init__(self) -> None:
        self.now = 100.0
        self.link = Link()
        link: Any = self.link
        self.hints = EngineHints(HintedRequests(VOCAB_SIZE, may_pause=False), link, lambda: self.now)
        self.text = [1, 2, 3]
        self.hints.open("a", self.text, draft_pb2.AttachRequest(), frozenset(), is_sampled=False)

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
