"""Prompts that begin alike share KV blocks: computed once, never confused, and nobody waits in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from outrider.engine.kv.kv_cache import BlockAllocator, Digest
from outrider.engine.kv.prefix_cache import block_digests
from outrider.hints.hint_tree import ROOT_ID, Hint
from outrider.sampling_params import SpeculationSettings
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    CancelSession,
    Event,
    HintsArrived,
    SessionEnded,
    SessionRefused,
    StartSession,
    Step,
    TokensCommitted,
)
from target_worker.runner import run_step
from target_worker.scheduling.scheduler import Scheduler
from tests import models
from tests.engine.sequences import text
from tests.target_worker.fakes import VOCAB_SIZE, greedy_text, start
from tests.target_worker.test_scheduler import LIMITS as FEW_MAY_WAIT
from tests.target_worker.test_scheduler import NAMES, RandomLife
from tests.target_worker.test_scheduler import World as PlainWorld

BLOCK_SIZE = 4
LIMITS = replace(FEW_MAY_WAIT, max_num_waiting=5)
LONG = [(3 * i * i + i) % VOCAB_SIZE for i in range(25)]  # three chunks of LIMITS.max_num_batched_tokens
OTHER = [(2 * i + 1) % VOCAB_SIZE for i in range(25)]
SALTS = ("", "search", "ads")


class World(PlainWorld):
    """Notes what every session was fed, and compares all KV with the text that it stands for."""

    def __init__(self, limits: SchedulerLimits = LIMITS, num_blocks: int = 97) -> None:
        super().__init__(limits, num_blocks, BLOCK_SIZE)
        self.first_fed: dict[str, int] = {}  # by session: the first position that was fed
        self.num_fed: dict[str, int] = {}
        self.blocks: dict[Digest, tuple[int, ...]] = {}  # what a digest stands for

    def tell(self, event: Event) -> list[Action]:
        if isinstance(event, StartSession):
            self.learn(self.texts.get(event.session_id, []))  # which is forgotten when the name is used again
        actions = super().tell(event)
        if isinstance(event, StartSession) and not isinstance(actions[0], SessionRefused):
            self.first_fed.pop(event.session_id, None)
            self.num_fed.pop(event.session_id, None)
        return actions

    def learn(self, token_ids: Sequence[int]) -> None:
        for salt in SALTS:
            for index, digest in enumerate(block_digests(token_ids, BLOCK_SIZE, salt=salt)):
                self.blocks[digest] = tuple(token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])

    def check_step(self, step: Step) -> None:
        super().check_step(step)
        for item in step.items:
            self.first_fed.setdefault(item.session_id, item.kv.length - len(item.token_ids))
            self.num_fed[item.session_id] = self.num_fed.get(item.session_id, 0) + len(item.token_ids)

    def check(self) -> None:
        super().check()
        for name, ended in self.ended.items():
            num_prompt_tokens = self.starts[name].num_prompt_tokens
            assert ended.num_cached_tokens == min(self.first_fed[name], num_prompt_tokens)
        for session in self.scheduler._sessions.values():
            held = [self.model.cache[slot] for slot in session.kv.slots(0, session.kv.length)]
            assert held == session.token_ids[: session.kv.length]
            assert session.num_pending >= 1
        for each in self.texts.values():
            self.learn(each)
        for digest, block_id in self.allocator._published.items():
            held = self.model.cache[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE]
            assert tuple(held) == self.blocks[digest], "a block is offered for a text that is not its own"

    def start(self, name: str, prompt: Sequence[int], salt: str = "", **options: object) -> None:
        values = {"ignore_eos": True, "max_tokens": 10} | options
        event = replace(start(name, prompt, **values), cache_salt=salt)  # type: ignore[arg-type]
        (answer, *_) = self.tell(event)
        assert not isinstance(answer, SessionRefused)

    @property
    def running(self) -> set[str]:
        return set(self.scheduler._slots.running)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()
            self.check()

    def finish(self) -> None:
        self.run_until_idle()
        self.check()
        self.check_is_empty()


def both_ended_alike(world: World, *names: str) -> None:
    assert all(world.texts[name] == world.texts[names[0]] for name in names)
    assert set(names) <= set(world.ended)


class TestTwoAtOnce:
    def test_the_second_waits_for_the_first_ones_prefill_and_begins_with_its_blocks(self) -> None:
        world = World()
        world.start("a", LONG)
        world.start("b", LONG)
        for _ in range(2):  # twelve tokens each
            world.turns(1)
            assert world.running == {"a"}
        world.turns(1)  # the last token of the one beside that of the other
        assert world.running == {"a", "b"}
        assert world.first_fed == {"a": 0, "b": 24}
        world.finish()
        both_ended_alike(world, "a", "b")
        assert [world.ended[name].num_cached_tokens for name in "ab"] == [0, 24]
        assert world.num_fed["b"] == world.num_fed["a"] - 24

    def test_a_prompt_that_begins_alike_and_goes_on_differently_shares_the_beginning(self) -> None:
        world = World()
        world.start("a", LONG)
        world.start("b", [*LONG[:14], *OTHER[:6]])
        world.turns(1)
        assert world.running == {"a"}  # twelve of fourteen tokens are done, and no other block of these two is due
        world.turns(1)
        assert world.running == {"a", "b"}
        world.finish()
        assert world.first_fed["b"] == 12

    def test_three_at_once_are_computed_once(self) -> None:
        world = World()
        for name in "abc":
            world.start(name, LONG)
        world.finish()
        both_ended_alike(world, "a", "b", "c")
        assert world.first_fed == {"a": 0, "b": 24, "c": 24}

    def test_others_may_pass_the_one_that_waits(self) -> None:
        world = World()
        world.start("a", LONG)
        world.turns(1)
        world.start("b", LONG)
        world.start("c", OTHER)
        world.turns(1)
        assert world.running == {"a", "c"}
        world.finish()
        assert world.first_fed == {"a": 0, "b": 24, "c": 0}

    def test_the_last_token_is_always_fed(self) -> None:
        """Its logits are what the first output token is decided from."""
        for length in (23, 24, 25):
            world = World()
            world.start("a", LONG[:length])
            world.finish()
            world.start("b", LONG[:length])
            world.finish()
            assert world.first_fed["b"] == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
            both_ended_alike(world, "a", "b")

    @pytest.mark.parametrize("length", [1, 3, 4])
    def test_a_prompt_shorter_than_a_block_waits_for_nobody(self, length: int) -> None:
        world = World()
        world.start("a", LONG)
        world.start("b", LONG[:length])
        world.turns(1)
        assert world.running == {"a", "b"}
        world.finish()


class TestFirstOneLeaves:
    @pytest.mark.parametrize("num_turns", [1, 2, 3])
    def test_a_cancelled_prefill_does_not_strand_those_that_waited_for_it(self, num_turns: int) -> None:
        world = World()
        for name in "abc":
            world.start(name, LONG)
        world.turns(num_turns)
        world.tell(CancelSession("a"))
        world.turns(1)
        assert "b" in world.running
        assert world.first_fed["b"] == [12, 24, 24][num_turns - 1]
        world.finish()
        both_ended_alike(world, "b", "c")
        assert world.first_fed["c"] == 24

    def test_one_that_waits_is_cancelled(self) -> None:
        world = World()
        for name in "abc":
            world.start(name, LONG)
        world.turns(1)
        world.tell(CancelSession("b"))
        world.finish()
        both_ended_alike(world, "a", "c")
        assert "b" not in world.ended


class TestLater:
    def test_the_next_turn_of_a_conversation_begins_with_prompt_and_output(self) -> None:
        world = World()
        world.start("a", LONG[:10])
        world.finish()
        whole = world.texts["a"]
        assert len(whole) == 20
        # The last block ends with a token that was said and never fed.
        world.start("b", [*whole, 1, 2])
        world.finish()
        assert world.first_fed["b"] in (16, 12)
        world.start("c", [*whole, 1, 2])
        world.finish()
        assert world.first_fed["c"] == 20
        both_ended_alike(world, "b", "c")

    def test_output_beyond_the_prompt_is_no_cached_prompt(self) -> None:
        """A session that was moved here, and finds its whole text known."""
        world = World()
        world.start("a", LONG[:10])
        world.finish()
        world.tell(start("b", LONG[:10], num_given=8, ignore_eos=True, max_tokens=10))
        world.finish()
        assert world.first_fed["b"] == 16
        assert world.ended["b"].num_cached_tokens == 10
        both_ended_alike(world, "a", "b")

    def test_hints_that_were_wrong_are_never_offered(self) -> None:
        """Full blocks of what was fed, and only then of what was committed."""
        world = World()
        world.start("a", LONG[:7])
        right, _ = greedy_text(LONG[:7], 40, frozenset())
        for _ in range(8):
            world.turns(1)
            committed = world.texts["a"]
            wrong = [(t + (i == 1)) % VOCAB_SIZE for i, t in enumerate(right[len(committed) : len(committed) + 5])]
            hints = [
                Hint(len(committed) * 10 + i + 1, len(committed) * 10 + i if i else ROOT_ID, t)
                for i, t in enumerate(wrong)
            ]
            world.tell(HintsArrived("a", 1, len(committed), hints, world.now))
        world.finish()
        assert world.ended["a"].stats.num_draft_tokens > world.ended["a"].stats.num_accepted_draft_tokens
        world.start("b", right[:17])
        world.finish()

    def test_under_pressure_the_longest_unused_blocks_go_and_texts_stay_right(self) -> None:
        """Twelve blocks: hardly more than one session needs."""
        world = World(num_blocks=13)
        for number in range(12):
            prompt = [LONG, OTHER, LONG[:13] + OTHER[:12]][number % 3]
            world.start(f"s{number}", prompt)
            world.finish()
        assert world.first_fed["s0"] == 0

    def test_what_was_used_last_is_still_there_under_pressure(self) -> None:
        world = World(num_blocks=25)
        for prompt in (LONG, OTHER, LONG):
            world.start("a", prompt)
            world.finish()
        assert world.first_fed["a"] == 24


class TestWhoDoesNotShare:
    @pytest.mark.parametrize("first", [None, 0])
    @pytest.mark.parametrize("second", [None, 0])
    def test_log_probabilities_of_the_prompt_need_its_forward_pass(self, first: int | None, second: int | None) -> None:
        world = World()
        world.start("a", LONG, num_prompt_logprobs=first)
        world.start("b", LONG, num_prompt_logprobs=second)
        world.turns(1)
        does_share = first is None and second is None
        assert world.running == ({"a"} if does_share else {"a", "b"})
        world.finish()
        assert world.first_fed["b"] == (24 if does_share else 0)
        both_ended_alike(world, "a", "b")

    @pytest.mark.parametrize("first", SALTS)
    @pytest.mark.parametrize("second", SALTS)
    def test_sequences_of_different_salts_share_nothing_and_nothing_tells_of_it(self, first: str, second: str) -> None:
        world = World()
        world.start("a", LONG, first)
        world.start("b", LONG, second)
        world.turns(1)
        does_share = first == second
        assert world.running == ({"a"} if does_share else {"a", "b"})  # nobody waits for blocks that it may not have
        world.finish()
        world.start("c", LONG, second)
        world.finish()
        assert world.ended["b"].num_cached_tokens == (24 if does_share else 0)
        assert world.ended["c"].num_cached_tokens == 24
        both_ended_alike(world, "a", "b", "c")

    def test_prefix_caching_can_be_turned_off(self) -> None:
        world = World(replace(LIMITS, enable_prefix_caching=False))
        world.start("a", LONG)
        world.start("b", LONG)
        world.turns(1)
        assert world.running == {"a", "b"}
        world.finish()
        world.start("c", LONG)
        world.finish()
        assert world.first_fed == {"a": 0, "b": 0, "c": 0}
        assert world.allocator.num_published(block_digests(LONG, BLOCK_SIZE)) == 0


PREFIXES = [LONG, OTHER, LONG[:13] + OTHER[:12], LONG[:4] + OTHER[:8]]


class RandomLifeWithSharedPrefixes(RandomLife):
    """Few prompts, little KV, and everything that happens to sessions besides."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World = World(FEW_MAY_WAIT, num_blocks=31)

    @rule(
        names=st.lists(NAMES, min_size=1, max_size=3, unique=True),
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 25),
        num_given=st.integers(0, 4),
        max_tokens=st.sampled_from([1, 5, 12]),
        num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
        is_enabled=st.booleans(),
    )
    def start_alike(
        self,
        names: list[str],
        prefix: list[int],
        length: int,
        num_given: int,
        max_tokens: int,
        num_prompt_logprobs: int | None,
        is_enabled: bool,
    ) -> None:
        world = self.world
        for name in names:
            if name in world.scheduler._sessions:
                continue
            for key in [key for key in world.views if key[1] == name]:
                del world.views[key]
            world.tell(
                start(
                    name,
                    prefix[:length],
                    num_given=min(num_given, max_tokens - 1),
                    speculation=SpeculationSettings(is_enabled),
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    num_prompt_logprobs=num_prompt_logprobs,
                )
            )

    @rule(count=st.integers(1, 3))
    def some_turns(self, count: int) -> None:
        self.world.turns(count)


TestRandomLifeWithSharedPrefixes = RandomLifeWithSharedPrefixes.TestCase
TestRandomLifeWithSharedPrefixes.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [None, 3])
def test_on_a_real_engine_shared_blocks_give_the_same_texts(dtype: str, seed: int | None) -> None:
    """I2, to the last bit: prompts that arrive together and one after the other, alike in parts and throughout."""
    engine = models.engine("llama", dtype)
    beginning = text(41, 0, models.VOCAB_SIZE)
    tails = [text(length, length, models.VOCAB_SIZE) for length in (1, 7, 7, 30)]
    prompts = [[*beginning[:length], *tail] for length in (41, 24, 7) for tail in tails]
    texts: list[dict[str, list[int]]] = []
    num_cached = []
    for is_enabled in (False, True):
        limits = SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=24,
            max_model_len=120,
            hint_wait_ms_max=0.0,
            enable_prefix_caching=is_enabled,
        )
        allocator = BlockAllocator(61, engine.block_size)
        scheduler = Scheduler(limits, allocator, engine.vocab_size)
        said: dict[str, list[int]] = {}
        waiting = [*prompts, *prompts]
        num_cached.append(0)
        while True:
            for _ in range(2):
                if waiting:
                    name = f"s{len(waiting)}"
                    params: dict[str, Any] = {} if seed is None else {"temperature": 0.9, "seed": seed}
                    event = start(name, waiting.pop(), max_tokens=12, ignore_eos=True, **params)
                    scheduler.handle(replace(event, seed=3), 0.0)
                    said[name] = []
            step = scheduler.next_step(0.0)
            if step is None:
                break
            assert isinstance(step, Step)
            for action in scheduler.finish_step(step, run_step(engine, step), 0.0):
                if isinstance(action, TokensCommitted):
                    said[action.session_id] += action.token_ids
                elif isinstance(action, SessionEnded):
                    num_cached[-1] += action.num_cached_tokens
        allocator.check_integrity([])
        texts.append(said)
    assert texts[0] == texts[1]
    assert num_cached[0] == 0
    assert num_cached[1] > 10 * 24
