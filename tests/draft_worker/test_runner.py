"""Both workers' steps on real engines, hand in hand in one thread: the text is that of plain decoding (I2).

The draft runs freely: between two target steps it takes a random number of steps, and its messages arrive late.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitReceived, DetachSession, Expansion, SendHints
from draft_worker.messages import StepItem as DraftItem
from draft_worker.messages import Subscribe as DraftSubscribe
from draft_worker.runner import NUM_CHILDREN, expand
from draft_worker.runner import run_step as run_draft_step
from draft_worker.scheduler import DraftScheduler
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.loading.loading import load_model
from outrider.engine.model import Engine
from outrider.engine.sampling.logit_processing import LogitContext
from outrider.engine.sampling.sampling import probabilities
from outrider.hints.confidence import confidence_level
from outrider.sampling_params import SamplingParams, SpeculationSettings
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    CommitPublished,
    HintsArrived,
    SessionEnded,
    StartSession,
    SubscribeDraft,
    TokensCommitted,
)
from target_worker.runner import run_step as run_target_step
from target_worker.scheduling.scheduler import Scheduler
from tests import models
from tests.engine.sequences import text
from tests.engine.verification_cases import coupled_choice

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
COUPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=60, ignore_eos=True)
NUM_SESSIONS = 3


def generate(
    dtype: str, params: SamplingParams, draft_seed: int | None, luck: int = 0, *, verifies_branches: bool = True
) -> tuple[list[list[int]], float, int]:
    """Texts of three sessions, the accepted share of verified hints, and the number of verified hints.

    `draft_seed` names the weights of the draft (0 are the target's own), None runs without a draft.
    """
    rng = random.Random(luck)
    target_engine = models.engine("llama", dtype)
    limits = SchedulerLimits(
        may_pause=False,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=500,
        num_speculative_tokens=5,
        hint_wait_ms_max=0.0,
        verifies_branches=verifies_branches,
    )
    target = Scheduler(limits, new_allocator(target_engine), target_engine.vocab_size)
    prompts = {f"s{i}": text(5 + 20 * i, i, target_engine.vocab_size) for i in range(NUM_SESSIONS)}
    texts = {name: list(prompt) for name, prompt in prompts.items()}
    ended: list[SessionEnded] = []
    draft_engine = None if draft_seed is None else models.engine("llama", dtype, draft_seed)
    if draft_engine is target_engine:  # the same weights with a cache of their own
        draft_engine = same_weights(dtype)
    for name, prompt in prompts.items():
        target.handle(StartSession(name, prompt, len(prompt), params, SpeculationSettings(), 11), 0.0)
    draft = None
    if draft_engine is not None:
        draft = DraftScheduler(
            DraftLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=500, max_nodes=24),
            new_allocator(draft_engine),
            draft_engine.vocab_size,
        )
        for name, prompt in prompts.items():
            draft.handle(AttachSession(name, 1, "target:1", prompt, params, 11))
            target.handle(SubscribeDraft(1, name, len(prompt)), 0.0)
    under_way: list[SendHints] = []
    while len(ended) < NUM_SESSIONS:
        if draft is not None and draft_engine is not None:
            for _ in range(rng.randrange(9)):
                if (step := draft.next_step()) is not None:
                    actions = draft.finish_step(step, run_draft_step(draft_engine, step))
                    under_way += [action for action in actions if isinstance(action, SendHints)]
                    grown = [session for name in prompts if (session := draft.progress(name)) is not None]
                    assert all(len(session.nodes) <= draft.limits.max_nodes for session in grown)
            for sent in under_way[: rng.randrange(len(under_way) + 1)]:
                under_way.remove(sent)
                target.handle(HintsArrived(sent.session_id, 1, sent.base_len, sent.hints, 0.0), 0.0)
        decision = target.next_step(0.0)
        assert decision is not None
        result = run_target_step(target_engine, decision)  # type: ignore[arg-type]
        for action in target.finish_step(decision, result, 0.0):  # type: ignore[arg-type]
            if isinstance(action, TokensCommitted):
                texts[action.session_id] += action.token_ids
            elif isinstance(action, SessionEnded):
                ended.append(action)
            elif isinstance(action, CommitPublished) and draft is not None:
                asked = draft.handle(
                    CommitReceived(action.session_id, action.from_len, action.token_ids, True, action.is_finished)
                )
                assert not any(isinstance(a, DraftSubscribe) for a in asked)
    for scheduler in (target, draft):
        if scheduler is not None:
            scheduler.allocator.check_integrity([])
    num_verified = sum(end.stats.num_draft_tokens for end in ended)
    num_accepted = sum(end.stats.num_accepted_draft_tokens for end in ended)
    return list(texts.values()), num_accepted / max(num_verified, 1), num_verified


def new_allocator(engine: Engine) -> BlockAllocator:
    """Blocks in which nothing is to be found: all tests write into the engine's KV, each by its own allocator."""
    return BlockAllocator(engine.allocator.num_blocks, engine.allocator.block_size)


@functools.cache
def same_weights(dtype: str) -> Engine:
    return load_model(models.engine_config(models.model_dir("llama"), dtype))


@functools.cache
def plain_texts(dtype: str, params: SamplingParams) -> list[list[int]]:
    return generate(dtype, params, None)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
class TestTextDoesNotDependOnTheDraft:
    """I2, bit for bit, with tree attention and compaction on the draft's side at work."""

    def test_a_draft_equal_to_its_target_is_accepted(self, dtype: str, params: SamplingParams) -> None:
        texts, share, num_verified = generate(dtype, params, 0, verifies_branches=False)
        assert texts == plain_texts(dtype, params)
        assert num_verified >= 60
        assert share >= 0.99

    @pytest.mark.parametrize("luck", [1])
    def test_a_draft_of_another_mind_changes_nothing(self, dtype: str, params: SamplingParams, luck: int) -> None:
        texts, share, _ = generate(dtype, params, 1, luck)
        assert texts == plain_texts(dtype, params)
        assert share < 0.9


def item(params: SamplingParams, num_rows: int, speculation: SpeculationSettings | None = None) -> DraftItem:
    kv = models.engine("llama").new_sequence()
    before = LogitContext([0] * 40, 40, [[0] * i for i in range(num_rows)])
    return DraftItem(
        "a",
        kv,
        [0] * num_rows,
        [1] * num_rows,
        params,
        speculation or SpeculationSettings(),
        5,
        before,
        first_draw=7,
        acceptance_rate=0.7,
        calibration=None,
    )


class TestChains:
    """On a real engine: hints are what single steps would have made of the same texts."""

    def grown(
        self, params: SamplingParams, max_chain_nodes: int, is_interrupted: Callable[[], bool]
    ) -> tuple[set[tuple[int, ...]], int]:
        """The texts of all nodes when the tree is as large as it may become, and the steps that took."""
        engine = models.engine("llama", "bfloat16")
        limits = DraftLimits(
            max_num_seqs=1, max_nodes=60, max_lookahead=8, min_reach=0.0, max_chain_nodes=max_chain_nodes
        )
        scheduler = DraftScheduler(limits, new_allocator(engine), engine.vocab_size)
        scheduler.handle(AttachSession("a", 1, "target:1", text(20, 3, engine.vocab_size), params, 5))
        num_steps = 0
        while (step := scheduler.next_step()) is not None:
            scheduler.finish_step(step, run_draft_step(engine, step, 1, is_interrupted))
            num_steps += 1
        session = scheduler.progress("a")
        assert session is not None
        branches: dict[int, tuple[int, ...]] = {0: ()}
        for hint in session.live_hints():
            branches[hint.node_id] = (*branches[hint.parent_id], hint.token_id)
        scheduler.handle(DetachSession("a", 1))
        scheduler.allocator.check_integrity([])
        return set(branches.values()), num_steps

    @pytest.mark.parametrize(
        "params",
        [GREEDY, replace(GREEDY, presence_penalty=0.7), COUPLED],
        ids=["greedy", "penalty", "coupled"],
    )
    def test_they_guess_what_single_steps_guess(self, params: SamplingParams) -> None:
        apart, num_steps = self.grown(params, 0, lambda: False)
        assert len(apart) == 1 + 8
        assert num_steps == 8
        assert self.grown(params, 3, lambda: False) == (apart, 2)

    def test_one_that_is_interrupted_goes_on_in_the_next_step(self) -> None:
        apart, _ = self.grown(GREEDY, 0, lambda: False)
        assert self.grown(GREEDY, 3, lambda: True) == (apart, 8)
        rng = random.Random(1)
        assert self.grown(GREEDY, 3, lambda: rng.random() < 0.5)[0] == apart


class TestExpansions:
    def rows(self) -> torch.Tensor:
        return torch.randn(6, 60, generator=torch.Generator().manual_seed(2)) * 3

    def check(self, expansions: list[Expansion]) -> None:
        for expansion in expansions:
            assert len(set(expansion.token_ids)) == len(expansion.token_ids) == len(expansion.chances)
            assert 1 <= len(expansion.token_ids) <= NUM_CHILDREN
            assert all(0.0 <= chance <= 1.0 for chance in expansion.chances)

    def test_greedy_says_what_the_target_would_say_even_among_equals(self) -> None:
        rows = self.rows()
        rows[0, [50, 9, 30]] = 40.0
        rows[1] = 0.0
        expansions = expand(item(GREEDY, 6), rows)
        self.check(expansions)
        assert [e.token_ids[0] for e in expansions] == rows.argmax(dim=-1).tolist()
        sure = torch.softmax(rows, dim=-1).amax(dim=-1).tolist()
        assert [e.confidence for e in expansions] == [confidence_level(chance) for chance in sure]

    def test_alternatives_share_what_the_primary_child_leaves_them(self) -> None:
        """More than the draft says, for where it is wrong it mostly knew better; a flat draft's stay unlikely."""
        flat, steep = torch.zeros(1, 60), torch.zeros(1, 60)
        steep[0, :3] = torch.tensor([6.0, 5.0, 4.0])
        for rows, most in ((flat, 0.06), (steep, 1.0)):
            for num_children in (2, 5):
                (expansion,) = expand(item(GREEDY, 1), rows, num_children)
                primary, *others = expansion.chances
                said = torch.softmax(rows[0], dim=-1).sort(descending=True).values[1].item()
                assert said * (1.0 - primary) < others[0] <= most
                assert primary + sum(others) <= 1.0 + 1e-6

    def test_a_row_that_is_broken_raises_nothing(self) -> None:
        """I7: the other sessions of the step go on."""
        rows = self.rows()
        rows[2] = torch.nan
        assert len(expand(item(GREEDY, 6), rows)) == 6

    def test_coupled_says_what_the_target_would_say(self) -> None:
        rows = self.rows()
        params = SamplingParams(temperature=0.8, seed=5)
        expansions = expand(item(params, 6), rows)
        self.check(expansions)
        assert [e.token_ids[0] for e in expansions] == coupled_choice(probabilities(rows, params), 5, 40)
        assert min(e.confidence for e in expansions) > 0

    def test_rejection_sends_what_it_sampled_from(self) -> None:
        """I5; entries and precision as the request says."""
        wanted = SpeculationSettings(num_draft_probs=4, draft_probs_bits=6)
        expansions = expand(item(SamplingParams(temperature=0.8), 6, wanted), self.rows())
        self.check(expansions)
        for expansion in expansions:
            assert expansion.distribution is not None
            assert expansion.token_ids[0] in expansion.distribution.token_ids
            assert expansion.distribution.is_valid(60)
            assert len(expansion.distribution.token_ids) <= 4
            assert expansion.distribution.total == 1 << 6
            assert expansion.confidence == 0  # I4: nobody is to know how likely the drawn token was

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=1e-3),
            SamplingParams(temperature=1e-40),
            SamplingParams(temperature=1e-40, seed=5),
            SamplingParams(temperature=2.0, top_k=1),
            SamplingParams(temperature=1.0, top_k=2, seed=5),
            SamplingParams(temperature=1.0, top_p=1e-6),
        ],
    )
    def test_every_permitted_parameter_gives_children(self, params: SamplingParams) -> None:
        """I7: no request may end the model thread."""
        self.check(expand(item(params, 6), self.rows()))
