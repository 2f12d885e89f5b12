"""A request's parameters on the draft's side: no guess that the target cannot say, no random number used twice."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitReceived, LinkOpened, SendHints, StepItem
from draft_worker.runner import run_step
from draft_worker.scheduler import DraftScheduler
from draft_worker.session import DraftSession
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.loading.loading import load_model
from outrider.engine.model import Engine
from outrider.grammar import GrammarCompiler, GrammarState
from outrider.hints.hint_tree import ROOT_ID
from outrider.sampling_params import GrammarKind, GrammarSpec, SamplingParams, SpeculationSettings
from target_worker.limits import SchedulerLimits
from target_worker.messages import HintsArrived, SessionEnded, StartSession, TokensCommitted
from target_worker.messages import Step as TargetStep
from target_worker.runner import run_step as run_target_step
from target_worker.scheduling.scheduler import Scheduler
from tests import grammars, models
from tests.draft_worker.test_runner import generate
from tests.draft_worker.test_scheduler import LIMITS, TARGET, World
from tests.schemas.walk import permitted_token_ids
from tests.target_worker.fakes import END, next_token

STOP = 2
EOS = 0


def event(token_ids: Sequence[int] = (1, 2, 3), num_prompt_tokens: int = 3, **sampling: Any) -> AttachSession:
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": 390} | sampling
    return AttachSession("a", 1, TARGET, list(token_ids), SamplingParams(**values), 7, num_prompt_tokens)


def branch(session: DraftSession, node_id: int) -> list[int]:
    """The tokens from the cursor's child down to a node."""
    said: list[int] = []
    while node_id != session.cursor:
        said.append(session.nodes[node_id].hint.token_id)
        node_id = session.nodes[node_id].hint.parent_id
    return said[::-1]


class TestWhereTextsEnd:
    LIMITS = DraftLimits(**{name: getattr(LIMITS, name) for name in ("max_num_batched_tokens", "max_model_len",
        "max_nodes", "max_lookahead", "min_reach")}, end_of_sequence_ids=frozenset({END}))  # fmt: skip

    @pytest.mark.parametrize("ignore_eos", [False, True])
    @pytest.mark.parametrize("alignment", [100, 256])
    def test_nothing_is_grown_below_a_token_that_ends_the_text(self, alignment: int, ignore_eos: bool) -> None:
        world = World(self.LIMITS, alignment=alignment)
        world.tell(event(stop_token_ids=frozenset({STOP}), ignore_eos=ignore_eos))
        ends = {STOP} if ignore_eos else {STOP, END}
        num_ends = num_below_end = 0
        for _ in range(12):
            world.rest()
            world.check()
            session = world.session()
            for node in session.nodes.values():
                if node.hint.token_id in ends:
                    num_ends += 1
                    assert node.children == []
                    assert node.entry is None, "fed for nothing"
                elif node.hint.token_id == END:
                    num_below_end += bool(node.children)
            world.commit([token_id if (token_id := next_token(world.texts["a"])) not in ends else 0])
        assert num_ends > 0
        assert bool(num_below_end) == ignore_eos

    @pytest.mark.parametrize("num_given", [0, 3])
    @pytest.mark.parametrize("max_tokens", [4, 6, 11])
    def test_nothing_is_guessed_beyond_max_tokens(self, max_tokens: int, num_given: int) -> None:
        """`max_tokens` counts from the prompt, also where some of the output is committed already."""
        text = [1, 2, 3]
        while len(text) < 3 + num_given:
            text.append(next_token(text))
        world = World(LIMITS, alignment=200)
        world.tell(event(text, max_tokens=max_tokens))
        deepest = 0
        while len(world.texts["a"]) < 3 + max_tokens:
            world.rest()
            session = world.session()
            for node in session.nodes.values():
                deepest = max(deepest, session.base_len + node.depth - 1)
            world.commit([next_token(world.texts["a"])])
        assert deepest == 3 + max_tokens - 1
        world.rest()


class Numbers:
    """Which draws the steps of one session may make."""

    def __init__(self) -> None:
        self.used: set[int] = set()

    def note(self, item: StepItem) -> None:
        mine = set(range(item.first_draw, item.first_draw + len(item.node_ids)))
        assert self.used.isdisjoint(mine), "a draw is used twice: a verdict may have depended on it"
        self.used |= mine


@pytest.mark.parametrize("luck", range(6))
def test_draws_are_never_used_twice(luck: int) -> None:
    """I6: whatever is committed, dropped, planted anew or said again."""
    rng = random.Random(luck)
    world, numbers = World(LIMITS, alignment=150), Numbers()
    world.tell(event(temperature=1.0))
    for _ in range(80):
        match rng.randrange(5):
            case 0 if len(world.texts["a"]) < LIMITS.max_model_len - 2:
                primary = world.primary()[: rng.randrange(3)]
                world.commit([*primary, rng.randrange(5)])
            case 1:
                world.tell(LinkOpened(TARGET))
            case 2:
                for accepts_hints in (False, True):
                    world.tell(CommitReceived("a", len(world.texts["a"]), [], accepts_hints, False))
            case _:
                step = world.scheduler.next_step()
                if step is not None:
                    for item in step.items:
                        numbers.note(item)
                    world.hear(world.scheduler.finish_step(step, world.model.run(step)))
        world.check()
    assert len(numbers.used) > 20


# With a grammar, on a real engine.


@functools.cache
def compiler() -> GrammarCompiler:
    path = models.model_dir("llama") / "tokenizer.json"
    return GrammarCompiler(path, vocab_size=models.VOCAB_SIZE, eos_token_ids=frozenset([EOS]))


def compiled(pattern: str) -> GrammarState:
    return grammars.compiled(compiler(), GrammarSpec(GrammarKind.REGEX, pattern))


WHOLE_DISTRIBUTIONS = SpeculationSettings(num_draft_probs=64, draft_probs_bits=16)


class RealWorld:
    """One session on a tiny model."""

    def __init__(self, grammar: GrammarState | None, sampling: SamplingParams, engine: Engine | None = None) -> None:
        self.engine = engine or models.engine("llama")
        allocator = BlockAllocator(self.engine.allocator.num_blocks, self.engine.allocator.block_size)
        limits = DraftLimits(max_model_len=200, max_nodes=60, max_lookahead=12, end_of_sequence_ids=frozenset({EOS}))
        self.scheduler = DraftScheduler(limits, allocator, self.engine.vocab_size)
        self.scheduler.handle(AttachSession("a", 1, TARGET, [40, 41, 42], sampling, 7, 0, WHOLE_DISTRIBUTIONS, grammar))
        self.text = [40, 41, 42]

    @property
    def session(self) -> DraftSession:
        session = self.scheduler.progress("a")
        assert session is not None
        return session

    def rest(self) -> list[SendHints]:
        """Grows until nothing can grow; returns what was sent."""
        sent: list[SendHints] = []
        for _ in range(200):
            step = self.scheduler.next_step()
            if step is None:
                return sent
            for action in self.scheduler.finish_step(step, run_step(self.engine, step)):
                assert isinstance(action, SendHints)
                sent.append(action)
        raise AssertionError("it never rests")

    def commit(self, token_ids: list[int]) -> None:
        from_len = len(self.text)
        self.text += token_ids
        self.scheduler.handle(CommitReceived("a", from_len, token_ids, True, False))


MODES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=100),
    "coupled": SamplingParams(temperature=1.5, seed=7, max_tokens=100),
    "rejection": SamplingParams(temperature=1.5, max_tokens=100),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "pattern", ["The answer is (yes|no), as I said before\\.", "[a-d]{2,6}", "(ab|a[c-e]{3})xyz[0-9]{1,3}"]
)
def test_a_tree_holds_only_what_the_grammar_permits_and_forced_tokens_alone(pattern: str, mode: str) -> None:
    rng = random.Random(f"{pattern}{mode}")
    world, shadow = RealWorld(compiled(pattern), MODES[mode]), compiled(pattern)
    num_forced = num_free = 0
    while not shadow.is_complete:
        world.rest()
        session = world.session
        assert session.nodes
        for parent_id in [session.cursor, *session.nodes]:
            is_cursor = parent_id == session.cursor
            children = session.cursor_node.children if is_cursor else session.nodes[parent_id].children
            said = [] if is_cursor else branch(session, parent_id)
            assert shadow.num_valid(said) == len(said)
            tokens = [session.nodes[child].hint.token_id for child in children]
            assert all(shadow.num_valid([*said, token_id]) == len(said) + 1 for token_id in tokens)
            forced = shadow.forced_after(said, 1)
            if children and forced:
                num_forced += 1
                assert tokens == forced
                assert session.nodes[children[0]].hint.distribution is None
            elif children:
                num_free += 1
                hint = session.nodes[children[0]].hint
                assert (hint.distribution is not None) == (mode == "rejection")
        # The target goes its own way: along the tree, or not.
        tokens = [session.nodes[child].hint.token_id for child in session.cursor_node.children]
        choices = [t for t in (*tokens, *permitted_token_ids(shadow)) if t != EOS]
        said = [tokens[0] if tokens[0] != EOS and rng.random() < 0.6 else rng.choice(choices)]
        shadow.advance(said)
        world.commit(said)
    assert num_forced > 0
    assert num_free > 0
    world.rest()
    assert {node.hint.token_id for node in world.session.nodes.values()} <= {EOS}


@pytest.mark.parametrize("mode", MODES)
def test_a_position_that_leaves_no_token_is_not_guessed_and_the_session_goes_on(mode: str) -> None:
    """I7: parameters may forbid all that the grammar permits."""
    params = SamplingParams(**{name: getattr(MODES[mode], name) for name in ("temperature", "seed", "max_tokens")},
        bad_words=tuple((token_id,) for token_id in permitted_token_ids(compiled("[x-z]"))))  # fmt: skip
    world = RealWorld(compiled("[x-z]{3}|[a-d][x-z]{2}"), params)
    world.rest()
    assert all(len(branch(world.session, node_id)) == 1 for node_id in world.session.nodes)
    first = permitted_token_ids(compiled("[a-d]"))[0]
    world.commit([first])
    assert world.rest() == []
    world.commit([permitted_token_ids(compiled("x"))[0]])
    world.rest()
    assert world.session.num_pending == 0


def test_a_commit_that_leaves_the_grammar_costs_the_grammar_only() -> None:
    """The target's tokenizer or release may see it otherwise; the target decides."""
    world = RealWorld(compiled("[a-d]{4}"), MODES["greedy"])
    world.rest()
    world.commit([270])
    assert world.session.grammar is None
    assert world.rest()


def test_committed_output_is_read_when_a_session_is_attached_late() -> None:
    state = compiled("abcd[x-z]{5}")
    forced = state.forced_after([], 9)
    engine = models.engine("llama")
    allocator = BlockAllocator(engine.allocator.num_blocks, engine.allocator.block_size)
    scheduler = DraftScheduler(DraftLimits(max_model_len=200), allocator, engine.vocab_size)
    scheduler.handle(
        AttachSession("a", 1, TARGET, [40, 41, *forced], MODES["greedy"], 7, num_prompt_tokens=2, grammar=state)
    )
    while (step := scheduler.next_step()) is not None:
        scheduler.finish_step(step, run_step(engine, step))
    session = scheduler.progress("a")
    assert session is not None
    assert session.grammar is not None
    assert session.base_len == 2 + len(forced)
    assert session.nodes
    for node in session.nodes.values():
        if node.hint.parent_id == ROOT_ID:
            assert compiled("abcd[x-z]{5}").num_valid([*forced, node.hint.token_id]) == len(forced) + 1


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
        {"logit_bias": ((3, 4.0), (17, -100.0), (44, 5.0)), "bad_words": ((5,), (44, 3), (3, 3))},
        {"min_tokens": 20, "stop_token_ids": frozenset(range(0, 288, 9)), "repetition_penalty": 0.7},
    ],
    ids=["penalties", "bias-and-bad-words", "min-tokens"],
)
def test_a_draft_equal_to_its_target_applies_every_parameter_as_it_does(sampling: dict[str, Any], mode: str) -> None:
    values: dict[str, Any] = {"temperature": 0.0} if mode == "greedy" else {"temperature": 0.9, "seed": 11}
    params = SamplingParams(**values, **sampling, max_tokens=60, ignore_eos=True)
    texts, share, num_verified = generate("float32", params, 0, verifies_branches=False)
    assert texts == generate("float32", params, None)[0]
    assert num_verified >= 30
    assert share >= 0.97


@functools.cache
def same_weights() -> Engine:
    """The target's weights with a cache of their own."""
    return load_model(models.engine_config(models.model_dir("llama")))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", ["[a-e]{40}", "([a-c]{2}, and then ){6}[a-c]", "(import|def) ([a-z]{1,8} ?){6}"])
def test_a_draft_equal_to_its_target_follows_the_grammar_as_it_does(pattern: str, mode: str) -> None:
    """The draft proposes the hints where the grammar leaves a choice; elsewhere they are the tokens that the grammar
    forces."""
    world = RealWorld(compiled(pattern), MODES[mode], same_weights())
    engine = models.engine("llama")
    limits = SchedulerLimits(
        may_pause=False,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=200,
        num_speculative_tokens=5,
        hint_wait_ms_max=0.0,
        end_of_sequence_ids=frozenset({EOS}),
    )
    allocator = BlockAllocator(engine.allocator.num_blocks, engine.allocator.block_size)
    target = Scheduler(limits, allocator, engine.vocab_size)
    prompt = list(world.text)
    target.handle(StartSession("a", prompt, len(prompt), MODES[mode], SpeculationSettings(), 7, compiled(pattern)), 0.0)
    ended: SessionEnded | None = None
    while ended is None:
        for sent in world.rest():
            target.handle(HintsArrived("a", 1, sent.base_len, sent.hints, 0.0), 0.0)
        step = target.next_step(0.0)
        assert isinstance(step, TargetStep)
        for action in target.finish_step(step, run_target_step(engine, step), 0.0):
            if isinstance(action, TokensCommitted):
                world.commit(action.token_ids)
            elif isinstance(action, SessionEnded):
                ended = action
    output = world.text[len(prompt) :]
    assert compiled(pattern).num_valid(output) == len(output)
    stats = ended.stats
    assert stats.num_draft_tokens >= 5
    assert stats.num_accepted_draft_tokens >= 0.97 * stats.num_draft_tokens
    assert world.session.grammar is not None
    if "and then" in pattern:
        assert stats.num_forced_tokens > 0
