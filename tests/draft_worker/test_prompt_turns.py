"""A draft worker's prompts go by turns of tenants, and what a commit costs does not grow with the text."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from draft_worker.limits import DraftLimits
from draft_worker.messages import CommitReceived, DetachSession, Expansion, StepItem
from draft_worker.scheduler import DraftScheduler
from draft_worker.session import DraftSession
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.logit_edits import edits_of
from outrider.sampling_params import SamplingParams
from tests.counting import CountingList
from tests.draft_worker.test_scheduler import attach

VOCAB_SIZE, BLOCK_SIZE = 1000, 16
LIMITS = DraftLimits(max_num_seqs=30, max_num_batched_tokens=128, max_model_len=1200, max_nodes=40, max_chain_nodes=0)


class Drafting:
    """A draft scheduler over a model for which token 1 always comes next, then token 2."""

    def __init__(self, limits: DraftLimits = LIMITS, num_blocks: int = 4000) -> None:
        self.scheduler = DraftScheduler(limits, BlockAllocator(num_blocks, BLOCK_SIZE), VOCAB_SIZE)
        self.chance = random.Random(1)
        self.fed: list[dict[str, int]] = []  # of prompts, in each step

    def attach(self, name: str, length: int, owner: str = "", **sampling: object) -> None:
        prompt = tuple(self.chance.choices(range(VOCAB_SIZE), k=length))
        event = replace(attach(name, prompt), owner=owner)
        if sampling:
            event = replace(event, sampling=SamplingParams(temperature=0.0, max_tokens=2000, **sampling))  # type: ignore[arg-type]
        self.scheduler.handle(event)

    def session(self, name: str) -> DraftSession:
        session = self.scheduler.progress(name)
        assert session is not None
        return session

    def turn(self) -> bool:
        step = self.scheduler.next_step()
        if step is None:
            return False
        self.fed.append({item.session_id: len(item.token_ids) for item in step.items if item.paths is None})
        self.scheduler.finish_step(step, [self.expand(item) for item in step.items])
        return True

    @staticmethod
    def expand(item: StepItem) -> list[Expansion]:
        item.kv.slots(item.kv.length - len(item.token_ids), item.kv.length)  # where the engine writes
        if item.node_ids:
            edits_of(item.sampling, item.context, VOCAB_SIZE)
        return [Expansion([1, 2], [0.8, 0.1])] * len(item.node_ids)

    def steps_until(self, name: str) -> int:
        num_steps = 0
        while self.session(name).num_pending:
            assert self.turn()
            num_steps += 1
        return num_steps

    def rest(self) -> None:
        while self.turn():
            pass

    def commit(self, name: str, *token_ids: int) -> None:
        from_len = self.session(name).committed_len
        self.scheduler.handle(CommitReceived(name, from_len, list(token_ids), True, False))


@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_short_prompt_does_not_wait_for_long_ones(owner: str) -> None:
    drafting = Drafting()
    for number in range(12):
        drafting.attach(f"long {number}", 1000, "a")
    drafting.turn()
    drafting.attach("short", 3, owner)
    assert drafting.steps_until("short") == 1


def test_a_tenants_stream_of_short_prompts_does_not_keep_anothers_waiting() -> None:
    drafting = Drafting()
    drafting.attach("b", 1000, "b")
    num_steps = 0
    while drafting.session("b").num_pending:
        for number in range(6):  # more than a step computes
            drafting.attach(f"a {num_steps} {number}", 60, "a")
        drafting.turn()
        for name in [each for each in drafting.scheduler._sessions if each != "b"]:
            if not drafting.session(name).num_pending:
                drafting.scheduler.handle(DetachSession(name, 1))
        num_steps += 1
    assert num_steps <= 2 * 1000 / LIMITS.max_num_batched_tokens + 2


def test_a_session_whose_tree_was_left_waits_for_no_tenants_turn() -> None:
    drafting = Drafting()
    drafting.attach("a", 900, "a")
    drafting.rest()  # the tenant has taken much
    drafting.attach("b", 1000, "b")
    drafting.attach("c", 1000, "c")
    drafting.commit("a", 777)  # never guessed
    drafting.turn()
    assert drafting.session("a").num_pending == 0


@pytest.mark.parametrize("length", [2_000, 50_000])
def test_a_commit_and_a_step_read_as_much_of_a_long_text_as_of_a_short_one(length: int) -> None:
    limits = replace(LIMITS, max_num_seqs=1, max_num_batched_tokens=512, max_model_len=60_000, max_lookahead=6)
    drafting = Drafting(limits)
    drafting.attach("a", length, repetition_penalty=1.1, presence_penalty=0.3, ignore_eos=True)
    drafting.rest()
    session = drafting.session("a")
    session.token_ids = tokens = CountingList(session.token_ids)  # type: ignore[assignment]
    session.kv.block_ids = blocks = CountingList(session.kv.block_ids)  # type: ignore[assignment]
    num_moves = 0
    for token_ids in [(1, 1), (1, 2), (777,), (2,), (1, 1, 1)] * 12:
        drafting.commit("a", *token_ids)
        step = drafting.scheduler.next_step()
        if step is not None:
            num_moves += len(step.moves)
            drafting.scheduler.finish_step(step, [drafting.expand(item) for item in step.items])
        drafting.rest()
        assert tokens.take_num_read() <= 100
        assert blocks.take_num_read() <= 100
    assert num_moves > 0, "entries were moved"
    np.testing.assert_array_equal(np.unique(session.kv.slots(0, session.kv.length)).size, session.kv.length)
