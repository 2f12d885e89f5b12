"""A step of a session that decodes reads as much of a long text as of a short one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.logit_edits import edits_of
from outrider.engine.sampling.verdict import Verdict
from outrider.hints.hint_tree import Branch, Hint
from outrider.sampling_params import SamplingParams
from target_worker import runner
from target_worker.limits import SchedulerLimits
from target_worker.messages import Step, StepItem, StepResult
from target_worker.scheduling.scheduler import Scheduler
from target_worker.scheduling.session import Session
from tests.counting import CountingList
from tests.target_worker.fakes import start

VOCAB_SIZE, BLOCK_SIZE = 1000, 16
LIMITS = SchedulerLimits(max_model_len=60_000, hint_wait_ms_max=0.0)
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "bad_words": ((1, 2, 3),),
}


class Decoding:
    """A session with a long prompt that decodes, and the tokens and block ids that each step reads of it."""

    def __init__(self, length: int) -> None:
        self.chance = random.Random(1)
        self.scheduler = Scheduler(LIMITS, BlockAllocator(4000, BLOCK_SIZE), VOCAB_SIZE)
        prompt = self.chance.choices(range(VOCAB_SIZE), k=length)
        self.scheduler.handle(start("a", prompt, max_tokens=1000, ignore_eos=True, **PENALTIES), 0.0)
        while self.step() is None:
            pass
        self.session: Session = self.scheduler._sessions["a"]
        self.tokens, self.blocks = CountingList(self.session.token_ids), CountingList(self.session.kv.block_ids)
        self.session.token_ids = self.tokens  # type: ignore[assignment]
        self.session.kv.block_ids = self.blocks  # type: ignore[assignment]

    def step(self) -> int | None:
        """Returns the number of committed tokens; None while the prompt is computed."""
        step = self.scheduler.next_step(0.0)
        assert isinstance(step, Step)
        (item,) = step.items
        item.kv.slots(item.kv.length - len(item.token_ids), item.kv.length)  # where the engine writes
        verdict = None
        if item.num_decided:
            edits_of(item.sampling, item.context, VOCAB_SIZE)
            said = [hint.token_id for hint in item.hints[: min(self.chance.randint(0, 2), item.num_fed_on_path)]]
            verdict = Verdict([*said, self.chance.randrange(VOCAB_SIZE)], len(said), len(said))
        self.scheduler.finish_step(step, StepResult([verdict], 1.0), 0.0)
        return None if verdict is None else len(verdict.token_ids)

    def most_read(self, num_steps: int = 100) -> tuple[int, int]:
        """The most tokens and block ids that a step has read."""
        num_tokens, num_blocks = [], []
        for _ in range(num_steps):
            self.step()
            num_tokens.append(self.tokens.take_num_read())
            num_blocks.append(self.blocks.take_num_read())
        return max(num_tokens), max(num_blocks)


@pytest.mark.parametrize("length", [2_000, 50_000])
def test_a_step_reads_as_much_of_a_long_text_as_of_a_short_one(length: int) -> None:
    num_tokens, num_blocks = Decoding(length).most_read()
    assert num_tokens <= 100
    assert num_blocks <= 10


def test_moving_an_accepted_branch_reads_the_blocks_of_what_was_fed() -> None:
    decoding = Decoding(20_000)
    kv, session = decoding.session.kv, decoding.session
    kv.extend(4)
    branches = [Branch(Hint(number, 0, number), 0, (number - 1,)) for number in (1, 2)]
    context = session.logit_context([], 2)
    item = StepItem("a", kv, [1] * 4, 4, 4, [], context, SamplingParams(), 1, branches=branches)
    moved: list[tuple[object, object]] = []

    class Engine:
        def move_entries(self, sources: object, destinations: object) -> None:
            moved.append((sources, destinations))

    expected = kv.slots(0, kv.length)
    sources, destinations = item.moved_entries(Verdict([1, 2], 0, 0, trail=(1,)))
    decoding.blocks.take_num_read()
    runner._move_entries(Engine(), [item], [Verdict([1, 2], 0, 0, trail=(1,))])  # type: ignore[arg-type]
    assert decoding.blocks.take_num_read() <= 2
    ((from_slots, to_slots),) = moved
    np.testing.assert_array_equal(from_slots, expected[sources])
    np.testing.assert_array_equal(to_slots, expected[destinations])
