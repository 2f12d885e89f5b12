"""A draft worker begins with what it has computed for others, and guesses exactly what it would have guessed without.

The target's prefix cache and the draft's are two: a hit on one of them must never leave the other behind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitReceived, DetachSession, KVMove, SendHints
from draft_worker.runner import run_step
from draft_worker.scheduler import DraftScheduler
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.kv.prefix_cache import block_digests
from outrider.engine.model import Engine, SequenceChunk
from outrider.hints.confidence import calibrations
from outrider.hints.hint_tree import ROOT_ID, DraftDistribution
from outrider.sampling_params import SamplingParams
from tests import models
from tests.draft_worker.fakes import VOCAB_SIZE
from tests.draft_worker.test_scheduler import LIMITS, RandomLife, World, attach
from tests.engine.sequences import text

SIZE = 4  # of a block
LONG = tuple((3 * i * i + i) % VOCAB_SIZE for i in range(25))  # three chunks of LIMITS.max_num_batched_tokens
OTHER = tuple((2 * i + 1) % VOCAB_SIZE for i in range(25))


def num_published(world: World, token_ids: Sequence[int]) -> int:
    return world.allocator.num_published(block_digests(token_ids, SIZE))


def begun_with(world: World, name: str) -> int:
    """Entries that a new session did not have to compute."""
    before = world.scheduler.num_cached_tokens
    world.rest()
    assert world.session(name).num_pending == 0
    return world.scheduler.num_cached_tokens - before


def detach(world: World, name: str) -> None:
    world.tell(DetachSession(name, world.session(name).attachment))


class TestWhoBeginsWithWhat:
    def test_a_second_session_computes_only_what_no_block_holds(self) -> None:
        world = World()
        world.tell(attach("a", LONG))
        assert begun_with(world, "a") == 0
        world.tell(attach("b", (*LONG[:14], *OTHER[:6])))
        assert begun_with(world, "b") == 12
        world.check()

    def test_what_a_session_leaves_is_found_by_the_next_turn_of_the_conversation(self) -> None:
        """Prompt and output, the output by way of the tree."""
        world = World(alignment=256)
        world.tell(attach("a", LONG[:9]))
        for _ in range(6):
            world.rest()
            world.commit(world.primary()[:3])
        world.rest()
        whole = tuple(world.texts["a"])
        assert len(whole) == 27
        detach(world, "a")
        world.tell(attach("b", (*whole, 1, 2)))
        assert begun_with(world, "b") == 24
        world.check()

    def test_one_that_comes_back_after_a_pause_begins_where_it_was(self) -> None:
        world = World(alignment=256)
        world.tell(attach("a", LONG))
        world.rest()
        world.commit(world.primary()[:4])
        world.rest()
        whole = tuple(world.texts["a"])
        detach(world, "a")
        world.tell(attach("a", whole, attachment=2))
        assert begun_with(world, "a") == 28

    @pytest.mark.parametrize("length", [23, 24, 25])
    def test_the_last_token_is_always_fed(self, length: int) -> None:
        """Its logits are what the first hint is decided from."""
        world = World()
        for name in "ab":
            world.tell(attach(name, LONG[:length]))
            world.rest()
        assert world.scheduler.num_cached_tokens == (length - 1) // SIZE * SIZE
        assert world.primary("a") == world.primary("b")

    def test_several_at_once_are_computed_once(self) -> None:
        """As for the choices of one request."""
        world = World()
        for name in "abc":
            world.tell(attach(name, LONG))
        world.rest()
        assert world.scheduler.num_cached_tokens == 2 * 24
        assert world.primary("a") == world.primary("b") == world.primary("c")

    @pytest.mark.parametrize("first", ["", "search"])
    @pytest.mark.parametrize("second", ["", "search", "ads"])
    def test_sessions_of_different_salts_share_nothing(self, first: str, second: str) -> None:
        world = World()
        world.tell(replace(attach("a", LONG), cache_salt=first))
        assert begun_with(world, "a") == 0
        world.tell(replace(attach("b", LONG), cache_salt=second))
        assert begun_with(world, "b") == (24 if first == second else 0)
        detach(world, "b")
        world.tell(replace(attach("b", LONG, attachment=2), cache_salt=second))
        assert begun_with(world, "b") == 24
        assert world.primary("a") == world.primary("b")

    def test_nobody_waits_for_one_that_is_paused_or_gone(self) -> None:
        for leave in (
            lambda world: world.tell(CommitReceived("a", len(LONG), [], False, False)),
            lambda world: detach(world, "a"),
        ):
            world = World()
            for name in "ab":
                world.tell(attach(name, LONG))
            world.turn()
            leave(world)
            world.rest()
            assert world.session("b").num_pending == 0
            assert world.scheduler.num_cached_tokens == 8  # of ten tokens that had been fed
            world.check()

    def test_it_can_be_turned_off(self) -> None:
        world = World(replace(LIMITS, enable_prefix_caching=False))
        for name in "ab":
            world.tell(attach(name, LONG))
        world.rest()
        assert world.scheduler.num_cached_tokens == 0
        assert num_published(world, LONG) == 0

    def test_blocks_that_nobody_uses_make_room_for_others(self) -> None:
        entries = LIMITS.max_model_len + LIMITS.max_nodes
        world = World(replace(LIMITS, max_num_seqs=1), num_blocks=1 + -(-entries // SIZE))
        for number in range(8):
            world.tell(attach("a", ([LONG, OTHER, LONG[:13] + OTHER[:12]][number % 3])))
            world.rest()
            world.check()
            detach(world, "a")
        world.allocator.check_integrity([])


class TestWhatIsOffered:
    def test_hint_tree_nodes_are_not(self) -> None:
        world = World(alignment=256)
        world.tell(attach("a", LONG[:8]))
        world.rest()
        guessed = (*LONG[:8], *world.primary())
        assert world.session().kv.length >= 12, "the tree fills blocks of its own"
        assert num_published(world, guessed) == 2

    def test_committed_nodes_are_once_they_have_been_moved_into_place(self) -> None:
        world = World()
        world.tell(attach("a", LONG[:8]))
        moves: list[KVMove] = []
        for _ in range(12):
            world.rest()
            session = world.session()
            # By way of an alternative where there is one, so that entries have to move.
            path, children = list[int](), session.cursor_node.children
            while children and len(path) < 3:
                node = session.nodes[children[-1]]
                path.append(node.hint.token_id)
                children = node.children
            before = num_published(world, world.texts["a"])
            world.commit(path)
            moves += world.scheduler._moves
            assert num_published(world, world.texts["a"]) == before, "not before it has been moved"
            world.turn()
            assert num_published(world, world.texts["a"]) == session.num_prefix // SIZE
            world.check()
        assert moves

    def test_tokens_that_are_committed_but_not_computed_are_not(self) -> None:
        world = World()
        world.tell(attach("a", LONG))
        world.turn()
        world.commit([1, 2, 3])
        assert num_published(world, LONG) == LIMITS.max_num_batched_tokens // SIZE


PREFIXES = [LONG, OTHER, LONG[:13] + OTHER[:12], LONG[:4] + OTHER[:8]]


class RandomLifeWithSharedPrefixes(RandomLife):
    """Few texts, hardly more KV than the sessions need, and everything that happens to sessions besides."""

    @initialize(alignment=st.sampled_from([0, 128, 220, 256]), num_children=st.integers(1, 3))
    def begin(self, alignment: int, num_children: int) -> None:
        self.world = World(alignment=alignment, num_children=num_children, num_blocks=72)
        assert self.world.scheduler.num_slots == 3
        self.attachment = 0

    @rule(
        names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True),
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 25),
    )
    def attach_alike(self, names: list[str], prefix: tuple[int, ...], length: int) -> None:
        for name in names:
            self.attachment += 1
            self.world.tell(attach(name, prefix[:length], self.attachment))

    @rule(name=st.sampled_from("abcd"), more=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))
    def next_turn_of_the_conversation(self, name: str, more: list[int]) -> None:
        session = self.world.scheduler.progress(name)
        if session is not None and len(session.token_ids) < 45:
            detach(self.world, name)
            self.attachment += 1
            self.world.tell(attach(name, (*session.token_ids, *more), self.attachment))

    def teardown(self) -> None:
        """A session says after all that what it says on a worker that nobody has used."""
        super().teardown()
        if not hasattr(self, "world"):
            return
        world, fresh = self.world, World(alignment=self.world.model.alignment)
        fresh.model.num_children = world.model.num_children
        for each in (world, fresh):
            each.tell(attach("a", LONG))
            each.model.num_steps = 0
            each.rest()
        assert tree(world.scheduler, "a") == tree(fresh.scheduler, "a")
        detach(world, "a")


def tree(scheduler: DraftScheduler, name: str) -> dict[tuple[int, ...], tuple[DraftDistribution | None, int]]:
    """A session's hint tree, by branch, with the distribution and the confidence of each branch's last token."""
    session = scheduler.progress(name)
    assert session is not None
    branches: dict[int, tuple[int, ...]] = {ROOT_ID: ()}
    said = {}
    for hint in session.live_hints():
        branch = branches[hint.node_id] = (*branches[hint.parent_id], hint.token_id)
        said[branch] = (hint.distribution, hint.confidence)
    return said


TestRandomLifeWithSharedPrefixes = RandomLifeWithSharedPrefixes.TestCase
TestRandomLifeWithSharedPrefixes.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)


# On real engines.

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=60, ignore_eos=True)


def new_scheduler(engine: Engine, *, shares: bool) -> DraftScheduler:
    limits = DraftLimits(
        *(4, 24),
        max_model_len=200,
        max_nodes=40,
        min_reach=0.001,
        min_sampled_reach=0.001,
        enable_prefix_caching=shares,
    )
    return DraftScheduler(limits, BlockAllocator(140, engine.block_size), engine.vocab_size)


def life(engine: Engine, scheduler: DraftScheduler, name: str, prompt: list[int], luck: int) -> list[object]:
    """Everything that a session says from beginning to end, with commits that its tree has and has not."""
    chance, said = random.Random(luck), list[object]()
    params = SAMPLED if luck % 2 else GREEDY
    scheduler.handle(AttachSession(name, 1, "target:1", prompt, params, 5))
    session = scheduler.progress(name)
    assert session is not None
    for _ in range(10):
        for _ in range(chance.randrange(1, 5)):
            if (step := scheduler.next_step()) is not None:
                actions = scheduler.finish_step(step, run_step(engine, step))
                said += [
                    (each.base_len, hint) for each in actions if isinstance(each, SendHints) for hint in each.hints
                ]
        if session.num_pending:
            continue  # what is not there yet is no part of what is said
        path, children = list[int](), session.cursor_node.children
        while children and len(path) < 6 and chance.random() < 0.8:
            node = session.nodes[chance.choice(children)]
            path.append(node.hint.token_id)
            children = node.children
        if chance.random() < 0.3 or not path:
            path.append(chance.randrange(engine.vocab_size))
        scheduler.handle(CommitReceived(name, len(session.token_ids), path, True, False))
    said.append(list(session.token_ids))
    scheduler.handle(DetachSession(name, 1))
    return said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("luck", range(4))
def test_after_a_hit_the_tree_is_what_it_would_have_been(dtype: str, luck: int) -> None:
    """Greedy and sampled; with prompts that fit into one step either way, so that both lives have the same steps."""
    engine = models.engine("llama", dtype)
    prompt = text(20, 3, engine.vocab_size)
    without = new_scheduler(engine, shares=False)
    alone = life(engine, without, "a", prompt, luck)
    scheduler = new_scheduler(engine, shares=True)
    assert life(engine, scheduler, "a", prompt, luck) == alone
    assert scheduler.num_cached_tokens == 0
    scheduler._calibrations = calibrations()  # what was learned of the draft would let other nodes grow first
    assert life(engine, scheduler, "b", prompt, luck) == alone
    assert scheduler.num_cached_tokens == 16
    scheduler.allocator.check_integrity([])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_are_found_hold_the_bits_that_would_be_computed(dtype: str) -> None:
    """Those of prompts, and those of outputs, which were nodes of a tree and have been moved."""
    engine = models.engine("llama", dtype)
    scheduler = new_scheduler(engine, shares=True)
    for luck in range(4):
        *_, whole = life(engine, scheduler, "a", text(30, 3 + luck, engine.vocab_size), luck)
        assert isinstance(whole, list)
        size, digests = engine.block_size, block_digests(whole, engine.block_size)
        num_blocks = scheduler.allocator.num_published(digests)
        assert num_blocks * size > 30 + size, "some of the output is there"
        found = [scheduler.allocator._published[digest] for digest in digests[:num_blocks]]
        kv = engine.new_sequence()
        kv.extend(len(whole))
        # The engine's own allocator gives blocks from the beginning: those of this scheduler may be among them.
        held = [
            cache[block * size : (block + 1) * size].clone()
            for block in found
            for layer in engine.caches
            for cache in layer
        ]
        engine.forward([SequenceChunk(kv, whole, 1)])
        computed = [
            cache[block * size : (block + 1) * size]
            for block in kv.block_ids[:num_blocks]
            for layer in engine.caches
            for cache in layer
        ]
        kv.free()
        assert all(torch.equal(a, b) for a, b in zip(held, computed, strict=True))
        scheduler = new_scheduler(engine, shares=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_after_a_hit_have_the_bits_of_those_without(dtype: str) -> None:
    engine = models.engine("llama", dtype)
    prompt = text(70, 9, engine.vocab_size)
    logits = []
    for shares in (False, True):
        scheduler = new_scheduler(engine, shares=shares)
        for name in "ab":
            scheduler.handle(AttachSession(name, 1, "target:1", prompt, GREEDY, 5))
            while (step := scheduler.next_step()) is not None:
                scheduler.finish_step(step, run_step(engine, step))
            if name == "a":
                scheduler.handle(DetachSession("a", 1))
        assert scheduler.num_cached_tokens == (64 if shares else 0)
        session = scheduler.progress("b")
        assert session is not None
        kv = session.kv
        kv.truncate(session.num_prefix)
        kv.extend(8)
        logits.append(engine.forward([SequenceChunk(kv, text(8, 1, engine.vocab_size), 8)]))
        session.kv.free()
    assert torch.equal(*logits)
