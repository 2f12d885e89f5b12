"""Long prompts on a draft worker: sessions that run go on being guessed for, and the prompts get on all the same."""

from __future__ import annotations

import random

from draft_worker.limits import DraftLimits
from draft_worker.messages import CommitReceived, Expansion, Step
from draft_worker.scheduler import DraftScheduler
from outrider.engine.chunk_cost import MIN_CHUNK_LEN, Chunk
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.sampling_params import SamplingParams
from tests.draft_worker.test_scheduler import attach
from tests.target_worker.fakes import VOCAB_SIZE

PROMPT_LEN, BUDGET = 600, 512
LIMITS = DraftLimits(max_num_seqs=12, max_model_len=2000, max_nodes=40, max_lookahead=10, max_chain_nodes=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)
PLAIN_MS, TOKEN_MS, READ_MS = 1.0, 0.05, 0.2  # of a thousand tokens


class Drafting:
    """A scheduler whose steps take the time that their tokens cost. Token 1 always comes next."""

    def __init__(self) -> None:
        self.scheduler = DraftScheduler(LIMITS, BlockAllocator(3000, 16), VOCAB_SIZE)
        self.steps: list[tuple[float, list[Chunk], set[str]]] = []  # time, prompts' chunks, sessions with nodes

    def attach(self, name: str, *token_ids: int) -> None:
        self.scheduler.handle(attach(name, token_ids))

    def attach_long(self, *numbers: int) -> None:
        for number in numbers:
            chance = random.Random(number)
            self.attach(f"long {number}", *chance.choices(range(VOCAB_SIZE), k=PROMPT_LEN))

    def turn(self) -> bool:
        step = self.scheduler.next_step()
        if step is None:
            return False
        chunks = self.chunks_of(step)
        step_ms = PLAIN_MS + sum(TOKEN_MS * each.num_tokens + READ_MS * each.num_read for each in chunks)
        self.steps.append((step_ms, chunks, {item.session_id for item in step.items if item.node_ids}))
        self.scheduler.finish_step(
            step, [[Expansion([1, 2], [0.8, 0.1])] * len(item.node_ids) for item in step.items], step_ms
        )
        return True

    @staticmethod
    def chunks_of(step: Step) -> list[Chunk]:
        items = [item for item in step.items if item.paths is None]
        return [Chunk(item.kv.length - len(item.token_ids), len(item.token_ids)) for item in items]

    def commit(self, name: str, *token_ids: int) -> None:
        session = self.scheduler.progress(name)
        assert session is not None
        self.scheduler.handle(CommitReceived(name, len(session.token_ids), list(token_ids), True, False))

    def rest(self) -> None:
        while self.turn():
            pass


def running() -> Drafting:
    """Two sessions with trees, and a long prompt has shown what chunks cost."""
    drafting = Drafting()
    drafting.attach_long(0)
    drafting.rest()
    for name in "ab":
        drafting.attach(name, 1, 2, 3)
    drafting.rest()
    drafting.steps.clear()
    return drafting


def test_beside_sessions_with_trees_prompts_take_half_of_the_time_at_most() -> None:
    drafting = running()
    drafting.attach_long(*range(1, 9))
    num_turns = 0
    while any(drafting.scheduler.progress(f"long {i}").num_pending for i in range(1, 9)):  # type: ignore[union-attr]
        for name in "ab":
            drafting.commit(name, 1)
        assert drafting.turn()
        num_turns += 1
    # What a chunk of the least length costs late in a prompt is the most that may come on top.
    least_ms = MIN_CHUNK_LEN * (TOKEN_MS + READ_MS * PROMPT_LEN / 1e3)
    late = max(step_ms for step_ms, _, _ in drafting.steps)
    assert late <= PLAIN_MS + max(PLAIN_MS, least_ms) * 1.3
    guessed = [{"a", "b"} & names for _, _, names in drafting.steps]
    assert sum(map(bool, guessed)) > 0.9 * num_turns
    assert all(sum(each.num_tokens for each in chunks) for _, chunks, _ in drafting.steps), "prompts get on"


def test_alone_prompts_take_all_that_there_is() -> None:
    drafting = Drafting()
    drafting.attach_long(1, 2)
    drafting.rest()
    assert [sum(each.num_tokens for each in chunks) for _, chunks, _ in drafting.steps[:2]] == [
        BUDGET,
        BUDGET,
    ]


def test_a_session_whose_tree_was_left_does_not_wait_for_prompts() -> None:
    drafting = Drafting()
    drafting.attach_long(1, 2, 3)  # they came first
    drafting.attach("a", 1, 2, 3)
    drafting.turn()
    _, chunks, names = drafting.steps[-1]
    assert names == {"a"}
    assert len(chunks) == 2
    drafting.commit("a", 3)  # never guessed
    drafting.turn()
    assert "a" in drafting.steps[-1][2]
