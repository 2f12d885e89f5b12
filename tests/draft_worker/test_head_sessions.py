"""A draft head that rides ahead of its target's features: what it keeps, and what it runs again when they arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from draft_worker import messages
from draft_worker.heads.loading import features_of
from draft_worker.limits import DraftLimits
from draft_worker.runner import DraftCore
from draft_worker.scheduler import DraftScheduler
from draft_worker.session import DraftSession
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers.features import packed
from outrider.engine.model import Engine
from outrider.engine.sequence_chunk import SequenceChunk
from outrider.observability.telemetry import DraftMetrics
from outrider.sampling_params import SamplingParams, SpeculationSettings
from tests.exactness.heads import head_engine
from tests.exactness.in_process import LARGE, attach_session, engine

PROMPT = [5, 17, 80, 3, 90, 2, 33]
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


class World:
    """One session on a draft worker with a head, and a target that commits what the test says."""

    def __init__(self) -> None:
        self.target: Engine = engine(LARGE, "of a head session")
        self.head: HeadEngine = head_engine(self.target)
        limits = DraftLimits(
            max_num_seqs=2, max_num_batched_tokens=64, max_model_len=192, max_nodes=40, max_lookahead=8
        )
        scheduler = DraftScheduler(
            limits, self.head.allocator, self.head.vocab_size, new_features=features_of(self.head)
        )
        self.core = DraftCore(scheduler, self.head, DraftMetrics("tiny", "draft"))
        self.text = list(PROMPT)
        self.num_told = 0  # positions whose features were sent
        event = attach_session("a", 1, PROMPT, len(PROMPT), GREEDY, settings=SpeculationSettings(), seed=1)
        self.core.handle(event, 0.0)

    @property
    def session(self) -> DraftSession:
        return self.core.scheduler._sessions["a"]

    def run(self) -> int:
        """Runs all steps there are; returns how many."""
        count = 0
        while self.core.run_next(0.0)[1] is not None:
            count += 1
        return count

    def guesses(self) -> list[int]:
        """The tokens on the primary path."""
        node, found = self.session.cursor_node, []
        while node.children:
            node = self.session.nodes[node.children[0]]
            found.append(node.hint.token_id)
        return found

    def features(self, end: int) -> torch.Tensor:
        """The target's features of the first `end` positions."""
        kv = KVSequence(self.target.allocator)
        kv.extend(end)
        self.target.forward([SequenceChunk(kv, self.text[:end], 1)])
        assert self.target.features is not None
        found = self.target.features[torch.from_numpy(kv.slots(0, end))].clone()
        kv.free()
        return found

    def commit(self, token_ids: Sequence[int], *, with_features: bool = True) -> None:
        """Commits tokens; the features of all before the last come with them, or stay away."""
        from_len = len(self.text)
        self.text += token_ids
        data, first = b"", 0
        if with_features:
            first, end = self.num_told, len(self.text) - 1
            data = packed(self.features(end), torch.arange(first, end).numpy())
            self.num_told = end
        self.core.handle(
            messages.CommitReceived("a", from_len, list(token_ids), True, False, features=data, features_from=first),
            0.0,
        )

    def finish(self) -> None:
        self.core.handle(messages.DetachSession("a", 1), 0.0)
        self.head.allocator.check_integrity([])


def test_nothing_is_drafted_before_the_prompts_features_are_there() -> None:
    world = World()
    assert world.run() == 0
    world.commit([])
    assert world.run() > 0
    assert len(world.guesses()) > 3
    world.finish()


def test_a_commit_of_what_was_guessed_keeps_the_rest_of_the_tree() -> None:
    world = World()
    world.commit([])
    world.run()
    guessed = world.guesses()
    world.commit(guessed[:2])
    assert world.guesses() == guessed[2:]
    assert world.session.num_pending == 0
    assert world.session.num_corrected == len(PROMPT), "run on its own states"
    world.run()
    assert world.session.num_corrected == len(PROMPT) + 2
    assert len(world.guesses()) > len(guessed) - 2, "it goes on ahead"
    world.finish()


def test_it_rides_ahead_while_features_are_on_their_way() -> None:
    world = World()
    world.commit([])
    world.run()
    for _ in range(3):
        world.commit(world.guesses()[:2], with_features=False)
        world.run()
    assert world.session.num_corrected == len(PROMPT)
    assert world.session.num_prefix == len(PROMPT) + 6
    assert len(world.guesses()) > 2
    world.commit(world.guesses()[:1])
    world.run()
    assert world.session.num_corrected == world.session.num_prefix == len(PROMPT) + 7
    world.finish()


def test_another_token_is_run_on_the_targets_features_with_all_before_it() -> None:
    world = World()
    world.commit([])
    world.run()
    world.commit(world.guesses()[:2], with_features=False)
    world.run()
    other = (world.guesses()[0] + 1) % LARGE.vocab_size
    world.commit([other], with_features=False)
    assert world.run() == 0, "it waits for the features"
    assert world.session.num_prefix == len(PROMPT)
    world.commit([])
    assert world.run() > 0
    assert world.session.num_corrected == world.session.num_prefix == len(PROMPT) + 3
    world.finish()


@pytest.mark.parametrize("luck", range(4))
def test_final_entries_are_those_of_the_text_run_at_once_on_all_features(luck: int) -> None:
    world, rng = World(), random.Random(luck)
    world.commit([])
    for _ in range(12):
        for _ in range(rng.randrange(4)):
            world.core.run_next(0.0)
        right = world.guesses()[: rng.randrange(4)]
        if rng.random() < 0.3 or not right:
            right = [*right, rng.randrange(LARGE.vocab_size)]
        world.commit(right, with_features=rng.random() < 0.6)
    world.commit([])
    world.run()
    count = world.session.num_corrected
    assert count >= len(world.text) - 1
    kv = world.head.new_sequence()
    kv.extend(count)
    world.head.set_features(kv.slots(0, count - 1), world.features(count - 1).to(torch.bfloat16))
    world.head.forward([SequenceChunk(kv, world.text[:count], 1)])
    for keys, values in world.head.caches:
        for cache in (keys, values):
            own = cache[torch.from_numpy(world.session.kv.slots(1, count))]
            torch.testing.assert_close(own, cache[torch.from_numpy(kv.slots(1, count))], atol=1e-4, rtol=1e-4)
    kv.free()
    world.finish()
