"""Long prompts hold those who decode up for a chunk's time at most, and get on all the same."""

from __future__ import annotations

import random

import pytest

from outrider.engine.chunk_cost import MIN_CHUNK_LEN, Chunk
from outrider.engine.kv.kv_cache import BlockAllocator
from target_worker.limits import SchedulerLimits
from target_worker.messages import SessionEnded, Step, TokensCommitted
from target_worker.scheduling.scheduler import Scheduler
from target_worker.scheduling.step_composition import CHUNK_SHARE
from tests.target_worker.fakes import VOCAB_SIZE, FakeModel, start

NUM_RUNNING, NUM_PROMPTS, PROMPT_LEN, BUDGET = 4, 8, 600, 64
LIMITS = SchedulerLimits(
    max_num_seqs=16,
    max_num_batched_tokens=BUDGET,
    max_model_len=4000,
    hint_wait_ms_max=0.0,
    has_lookup=False,
)
PLAIN_MS, TOKEN_MS = 2.0, 0.2
READ_MS = 1.0  # of a thousand tokens: late chunks cost several times what early ones do


def chunks_of(step: Step) -> list[Chunk]:
    return [item.chunk for item in step.items if item.chunk is not None]


def ms(chunk: Chunk) -> float:
    return TOKEN_MS * chunk.num_tokens + READ_MS * chunk.num_read


class Serving:
    """A scheduler whose steps take the time that their tokens cost, and the longest gap of each stream."""

    def __init__(self) -> None:
        num_blocks = 1 + 16 * 64
        self.scheduler = Scheduler(LIMITS, BlockAllocator(num_blocks, 16), VOCAB_SIZE)
        self.model = FakeModel(num_blocks * 16)
        self.now = 0.0
        self.heard_at: dict[str, float] = {}
        self.gaps_ms: list[float] = []  # of streams that had begun
        self.steps: list[list[Chunk]] = []
        self.ended: set[str] = set()
        self.chance = random.Random(1)

    def ask(self, name: str, length: int, max_tokens: int) -> None:
        prompt = self.chance.choices(range(VOCAB_SIZE - 1), k=length)
        self.scheduler.handle(start(name, prompt, max_tokens=max_tokens, ignore_eos=True), self.now)

    def turn(self) -> bool:
        step = self.scheduler.next_step(self.now)
        if step is None:
            return False
        assert isinstance(step, Step)
        assert step.num_tokens <= BUDGET
        chunks = chunks_of(step)
        self.steps.append(chunks)
        step_ms = PLAIN_MS + sum(map(ms, chunks))
        self.now += step_ms / 1e3
        for action in self.scheduler.finish_step(step, self.model.run(step, step_ms), self.now):
            if isinstance(action, TokensCommitted):
                if action.session_id in self.heard_at:
                    self.gaps_ms.append((self.now - self.heard_at[action.session_id]) * 1e3)
                self.heard_at[action.session_id] = self.now
            elif isinstance(action, SessionEnded):
                self.ended.add(action.session_id)
        return True

    def run(self, *, until: set[str]) -> None:
        while not until <= self.ended:
            assert self.turn()


def running(num_streams: int = NUM_RUNNING) -> Serving:
    """Some streams decode, and one long prompt has shown what chunks cost."""
    serving = Serving()
    for index in range(num_streams):
        serving.ask(f"stream {index}", 5, max_tokens=3000)
    for _ in range(20):
        serving.turn()
    serving.ask("first", PROMPT_LEN, max_tokens=1)
    serving.run(until={"first"})
    return serving


def test_whoever_decodes_waits_for_a_chunk_at_most() -> None:
    serving = running()
    serving.gaps_ms.clear()
    names = {f"long {index}" for index in range(NUM_PROMPTS)}
    for name in sorted(names):
        serving.ask(name, PROMPT_LEN, max_tokens=1)
    serving.run(until=names)
    # One that begins a prompt and uses up what the decoding streams leave.
    one_chunk_ms = ms(Chunk(0, BUDGET - NUM_RUNNING))
    assert len(serving.gaps_ms) > NUM_PROMPTS * PROMPT_LEN / BUDGET * NUM_RUNNING
    assert max(serving.gaps_ms) <= PLAIN_MS + one_chunk_ms
    late_ms = ms(Chunk(PROMPT_LEN - BUDGET, BUDGET - NUM_RUNNING))
    assert late_ms > 2 * one_chunk_ms, "there was something to be cut"


def test_every_chunk_gets_on_and_late_ones_are_shorter() -> None:
    serving = running()
    serving.steps.clear()
    serving.ask("long", PROMPT_LEN, max_tokens=1)
    serving.run(until={"long"})
    (*chunks, last) = [chunk for chunks in serving.steps for chunk in chunks]
    assert sum(chunk.num_tokens for chunk in (*chunks, last)) == PROMPT_LEN
    assert min(chunk.num_tokens for chunk in chunks) >= MIN_CHUNK_LEN
    assert CHUNK_SHARE * (BUDGET - NUM_RUNNING) <= chunks[0].num_tokens < BUDGET - NUM_RUNNING
    assert chunks[-1].num_tokens < 0.6 * chunks[0].num_tokens


def test_nobody_is_spared_where_nobody_decodes() -> None:
    serving = running(num_streams=0)
    serving.steps.clear()
    serving.ask("long", PROMPT_LEN, max_tokens=1)
    serving.run(until={"long"})
    assert [chunk.num_tokens for (chunk,) in serving.steps[:-1]] == [BUDGET] * (PROMPT_LEN // BUDGET)


@pytest.mark.parametrize("length", [2, 10, 40])
def test_short_prompts_share_a_step_as_far_as_tokens_and_time_go(length: int) -> None:
    serving = running()
    serving.steps.clear()
    for index in range(6):
        serving.ask(f"short {index}", length, max_tokens=1)
    serving.turn()
    (chunks,) = serving.steps
    budget_ms = CHUNK_SHARE * ms(Chunk(0, BUDGET - NUM_RUNNING))
    spent_ms = sum(map(ms, chunks))
    assert spent_ms < 1.02 * budget_ms
    is_all = sum(chunk.num_tokens for chunk in chunks) == 6 * length
    assert is_all or spent_ms > budget_ms - MIN_CHUNK_LEN * TOKEN_MS
    assert is_all == (length == 2)
