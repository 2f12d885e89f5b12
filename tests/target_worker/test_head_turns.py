"""When a draft head beside the model drafts: the ladder from a draft worker over the head to plain steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
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
from target_worker.scheduling.head_turns import (
    MAX_ROWS,
    MEASURED_DEPTH,
    NUM_MEASURED_TURNS,
    NUM_REFUSED,
    NUM_TRIAL_TURNS,
    Asking,
    best_depth,
)
from target_worker.scheduling.scheduler import Scheduler
from tests.target_worker.fakes import END, VOCAB_SIZE, FakeHead, FakeModel, greedy_text, next_token, start

LIMITS = SchedulerLimits(
    has_lookup=False,
    may_pause=False,
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
        decision = self.scheduler.next_step(self.now)
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


# How far to draft.


def test_a_free_head_that_is_mostly_right_drafts_as_far_as_it_may() -> None:
    asking = [Asking(0.0, [0.9, 1.7, 2.4, 3.0], 1)]
    assert best_depth(asking, 0, 0.0, 0, StepLine(10.0, 0.01), StepLine(1e-6, 1e-9)).num_tokens == 4


def test_a_head_that_costs_more_than_it_gains_does_not_draft() -> None:
    asking = [Asking(0.0, [0.5, 0.7, 0.8], 1)]
    assert best_depth(asking, 0, 0.0, 0, STEP, StepLine(6.0, 0.0)).num_tokens == 0


def test_a_head_drafts_as_far_as_each_pass_pays() -> None:
    """One pass of 1 ms in a step of 10 must gain a tenth of the tokens so far."""
    asking = [Asking(0.0, [0.6, 0.9, 0.95, 0.96], 1)]
    assert best_depth(asking, 0, 0.0, 0, StepLine(10.0, 0.001), StepLine(1.0, 0.0)).num_tokens == 2


def test_sessions_that_need_no_head_make_its_time_dearer() -> None:
    asking, head = [Asking(0.0, [0.7, 1.2], 1)], StepLine(2.0, 0.0)
    assert best_depth(asking, 0, 0.0, 0, STEP, head).num_tokens > 0
    assert best_depth(asking, 7, 14.0, 14, STEP, head).num_tokens == 0


def test_nobody_asks() -> None:
    assert best_depth([], 3, 2.0, 4, STEP, StepLine(0.1, 0.0)).num_tokens == 0


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
    assert len(world.steps) < 60
    assert stats.num_accepted_head_tokens > 130
    assert stats.num_accepted_head_tokens <= stats.num_head_tokens
    assert stats.num_draft_tokens == 0
    assert set(sources(world.steps[2:])) == {common_pb2.HINT_SOURCE_HEAD}


def test_a_wrong_head_is_soon_passed_over_and_tried_again_rarely() -> None:
    world = World(FakeHead(is_right=False))
    world.start(start("a", **LONG))
    world.run()
    assert NUM_MEASURED_TURNS < len(world.head.turns) < 30


def test_a_dear_head_drafts_only_until_its_time_is_known() -> None:
    world = World(FakeHead(pass_ms=50.0))
    world.start(start("a", **LONG))
    world.run()
    assert len(world.head.turns) <= NUM_MEASURED_TURNS + NUM_TRIAL_TURNS


def test_a_head_that_was_slow_is_measured_anew() -> None:
    head = FakeHead(pass_ms=50.0)
    world = World(head)
    world.start(start("a", max_tokens=500, ignore_eos=True))
    while len(world.steps) < NUM_MEASURED_TURNS + 20:
        world.turn()
    head.pass_ms = 0.1  # the machine was busy
    num_turns = len(head.turns)
    world.run()
    assert len(head.turns) > num_turns
    assert world.steps[NUM_MEASURED_TURNS + NUM_REFUSED // 2].hint_source == 0
    assert sum(step.hint_source == common_pb2.HINT_SOURCE_HEAD for step in world.steps[-20:]) > 10


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
    assert world.steps[-1].sources[0].num_accepted == MEASURED_DEPTH  # its time is not known yet
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
