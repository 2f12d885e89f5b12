"""When a draft head beside the model drafts: the ladder from a draft worker over the head to plain steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.hints.hint_intake import NUM_FIRST_STEPS
from outrider.hints.hint_tree import Hint
from outrider.hints.step_cost import StepLine
from outrider.sampling_params import SpeculationSettings
from protos.outrider.v1 import common_pb2
from target_worker.hints.head_hints import NUM_PASSED_OVER, HeadHints
from target_worker.hints.local_source import NO_PROPOSAL
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    CloseStream,
    HintsArrived,
    SessionEnded,
    StartSession,
    Step,
    SubscribeDraft,
    TokensCommitted,
    WaitForHints,
)
from target_worker.scheduling.head_turns import MAX_ROWS
from target_worker.scheduling.scheduler import Scheduler
from tests.target_worker.fakes import END, VOCAB_SIZE, FakeHead, FakeModel, greedy_text, next_token, start

LIMITS = SchedulerLimits(
    has_lookup=False,
    max_num_seqs=4,
    max_model_len=600,
    num_speculative_tokens=4,
    hint_wait_ms_max=0.0,
    end_of_sequence_ids=frozenset({END}),
)
STEP = StepLine(10.0, 0.1)
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


class World:
    """A target with a head. A step takes 10 ms and 0.1 ms a token."""

    def __init__(self, head: FakeHead, limits: SchedulerLimits = LIMITS, num_blocks: int = 600) -> None:
        self.head, self.now = head, 0.0
        self.scheduler = Scheduler(limits, BlockAllocator(num_blocks, 4), VOCAB_SIZE, head)
        self.model = FakeModel(num_blocks * 4)
        self.texts: dict[str, list[int]] = {}
        self.steps: list[TokensCommitted] = []
        self.ended: dict[str, SessionEnded] = {}

        self.start(start("plain", **{**LONG, "max_tokens": NUM_FIRST_STEPS + 2}))  # steps to compare with
        self.run()
        self.head.turns.clear()
        self.steps.clear()
        self.ended.clear()

    def start(self, event: StartSession) -> None:
        self.texts[event.session_id] = list(event.token_ids)
        self.hear(self.scheduler.handle(event, self.now))

    def hear(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, TokensCommitted):
                self.texts[action.session_id] += action.token_ids
                self.steps.append(action)
            elif isinstance(action, SessionEnded):
                self.ended[action.session_id] = action

    def turn(self) -> Step | None:
        spent_ms = self.head.spent_ms
        decision = self.scheduler.next_step(self.now)
        self.now += (self.head.spent_ms - spent_ms) / 1e3
        assert not isinstance(decision, WaitForHints)
        if decision is not None:
            step_ms = STEP.step_ms(decision.num_tokens)
            self.now += step_ms / 1e3
            self.hear(self.scheduler.finish_step(decision, self.model.run(decision, step_ms), self.now))
        return decision

    def run(self) -> None:
        while self.turn() is not None:
            pass

    def send_right_hints(self, name: str, count: int) -> None:
        """Sends hints as a draft worker that is always right does."""
        text = list(self.texts[name])
        hints = []
        for number in range(1, count + 1):
            hints.append(Hint(number, number - 1, next_token(text)))
            text.append(hints[-1].token_id)
        base_len = len(self.texts[name])
        self.attachment = getattr(self, "attachment", 0) + 1
        self.scheduler.handle(HintsArrived(name, self.attachment, base_len, hints, self.now), self.now)


def sources(steps: Sequence[TokensCommitted]) -> list[int]:
    return [step.hint_source for step in steps]


# One session's hints.


def test_a_draft_is_proposed_behind_the_tokens_that_it_follows_alone() -> None:
    hints = HeadHints(None)
    hints.take(3, [7, 8, 9], [100, 90, 80])
    assert hints.propose([1, 2, 3], [], 2).token_ids == [7, 8]
    assert hints.propose([1, 2, 3], [7], 2) == NO_PROPOSAL
    assert hints.propose([1, 2, 3, 7], [], 2) == NO_PROPOSAL
    assert hints.propose([1, 2, 3], [], 0) == NO_PROPOSAL


def test_a_head_that_was_wrong_is_tried_anew_after_a_while() -> None:
    hints = HeadHints(None)
    for _ in range(20):
        hints.take(3, [7], [100])
        hints.observe(hints.propose([1, 2, 3], [], 1), num_matched=0, num_verified=1)
    low = hints.likely(1)[0]
    assert low < 0.2
    for _ in range(NUM_PASSED_OVER - 1):
        hints.pass_over()
    assert hints.likely(1)[0] == low
    hints.pass_over()
    assert hints.likely(1)[0] > 0.5


# A worker.


@pytest.mark.parametrize("is_right", [True, False])
def test_the_text_is_that_of_plain_decoding(is_right: bool) -> None:
    world = World(FakeHead(is_right=is_right))
    world.start(start("a", **LONG))
    world.run()
    assert world.texts["a"] == greedy_text((1, 2, 3), 203, frozenset())[0]


def test_a_right_head_saves_steps_and_is_counted() -> None:
    world = World(FakeHead())
    world.start(start("a", **LONG))
    world.run()
    stats = world.ended["a"].stats
    assert len(world.steps) < 100
    assert stats.num_accepted_head_tokens > 100
    assert stats.num_accepted_head_tokens <= stats.num_head_tokens
    assert stats.num_draft_tokens == 0
    assert set(sources(world.steps[2:40])) == {common_pb2.HINT_SOURCE_HEAD}


def test_a_wrong_head_is_soon_passed_over_and_tried_again_rarely() -> None:
    world = World(FakeHead(is_right=False))
    world.start(start("a", **LONG))
    world.run()
    assert 5 < len(world.head.turns) < 40


def test_a_dear_head_is_hardly_tried() -> None:
    world = World(FakeHead(pass_ms=50.0))
    world.start(start("a", **LONG))
    world.run()
    assert len(world.head.turns) <= 3


def test_a_head_that_was_slow_is_measured_anew() -> None:
    head = FakeHead(pass_ms=50.0)
    world = World(head)
    world.start(start("a", max_tokens=500, ignore_eos=True))
    while len(world.steps) < 30:
        world.turn()
    head.pass_ms = 0.1  # the machine was busy
    assert sources(world.steps[10:]) == [0] * 20
    world.run()
    assert sources(world.steps[-20:]).count(common_pb2.HINT_SOURCE_HEAD) > 10


def test_a_head_that_makes_steps_slower_is_found_out() -> None:
    """By speeds as they are: each pass promises more than its price, and something else makes it dear."""
    head = FakeHead(is_right=True, pass_ms=0.5, luck=3)
    world = World(head)
    world.start(start("a", max_tokens=590, ignore_eos=True))
    while world.turn() is not None:
        if head.turns and world.steps[-1].hint_source == common_pb2.HINT_SOURCE_HEAD:
            world.now += 0.1
    assert sources(world.steps[-20:]).count(common_pb2.HINT_SOURCE_HEAD) == 0


def test_a_plain_session_asks_no_head() -> None:
    world = World(FakeHead())
    world.start(start("a", speculation=SpeculationSettings(enabled=False), **LONG))  # no draft worker, all else
    world.start(replace(start("b", **LONG), speculation=SpeculationSettings(is_plain=True)))
    world.run()
    assert {item.session_id for turn in world.head.turns for item in turn.items} == {"a"}


def test_the_head_steps_in_with_the_very_next_step_when_the_draft_worker_is_lost() -> None:
    world = World(FakeHead())
    world.start(start("a", **LONG))
    world.scheduler.handle(SubscribeDraft(1, "a", 3), world.now)
    world.turn()  # the prompt
    for _ in range(12):
        world.send_right_hints("a", 5)
        world.turn()
    num_turns = len(world.head.turns)
    assert sources(world.steps[1:]) == [common_pb2.HINT_SOURCE_DRAFT] * 12
    world.scheduler.handle(CloseStream(1), world.now)
    world.turn()
    # What it had sent may still be there for one step; then the head drafts.
    world.turn()
    assert world.steps[-1].hint_source == common_pb2.HINT_SOURCE_HEAD
    assert world.steps[-1].sources[0].num_accepted == 4
    assert len(world.head.turns) > num_turns
    world.run()
    assert world.texts["a"] == greedy_text((1, 2, 3), 203, frozenset())[0]


def test_the_head_rests_while_a_draft_worker_promises_as_much() -> None:
    world = World(FakeHead())
    world.start(start("a", **LONG))
    world.scheduler.handle(SubscribeDraft(1, "a", 3), world.now)
    world.turn()
    for _ in range(20):
        world.send_right_hints("a", 5)
        world.turn()
    assert not world.head.turns


def test_a_long_prompt_is_read_in_parts_between_the_steps() -> None:
    world = World(FakeHead(num_blocks=2000))
    prompt = tuple(index % END for index in range(2 * MAX_ROWS + 10))
    world.start(start("a", prompt, max_tokens=30, ignore_eos=True))
    world.run()
    assert [(turn.items[0].start, turn.items[0].end) for turn in world.head.turns[:2]] == [
        (0, MAX_ROWS),
        (MAX_ROWS, 2 * MAX_ROWS),
    ]
    assert all(turn.items[0].context is None for turn in world.head.turns[:2])
    assert world.ended["a"].stats.num_accepted_head_tokens > 10
    assert world.texts["a"] == greedy_text(prompt, len(prompt) + 30, frozenset())[0]


def test_without_room_in_its_kv_the_head_does_not_draft() -> None:
    world = World(FakeHead(num_blocks=3))
    world.start(start("a", tuple([1] * 40), max_tokens=30, ignore_eos=True))
    world.run()
    assert not world.head.turns
    assert len(world.texts["a"]) == 70


def test_ends_cancellations_and_preemptions_return_its_kv() -> None:
    head = FakeHead()
    world = World(head, num_blocks=60)
    for name in "abcd":
        world.start(start(name, tuple([1] * 20), max_tokens=60, ignore_eos=True))
    world.run()
    assert world.scheduler.num_preemptions > 0
    assert len(world.ended) == 4
    assert head.allocator is not None
    head.allocator.check_integrity([])
    for name in "abcd":
        assert world.texts[name] == greedy_text(tuple([1] * 20), 80, frozenset())[0]


def test_an_empty_kv_of_a_head_is_no_kv_of_the_target() -> None:
    """A head without attention keeps none: only the last token counts."""
    assert HeadHints(None).num_pending(50) == 1
    assert HeadHints(KVSequence(BlockAllocator(9, 4))).num_pending(50) == 50
