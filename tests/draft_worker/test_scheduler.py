"""The draft's side: the tree grows within its bounds, the cursor follows commits, KV stays with its own content."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draft_worker.limits import DraftLimits
from draft_worker.messages import (
    Action,
    AttachmentAccepted,
    AttachmentEnded,
    AttachmentRefused,
    AttachSession,
    Chain,
    CommitReceived,
    DetachSession,
    Event,
    LinkOpened,
    SendHints,
    Subscribe,
    Unsubscribe,
)
from draft_worker.scheduler import DraftScheduler
from draft_worker.session import DraftSession
from draft_worker.tree.draft_node import NUM_NEAR_NODES
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.kv.prefix_cache import block_digests
from outrider.engine.sampling.randomness import mix
from outrider.errors import InvalidRequest, Overloaded
from outrider.hints.hint_tree import ROOT_ID, Hint, HintTree
from outrider.sampling_params import SamplingParams
from tests.draft_worker.fakes import VOCAB_SIZE, FakeDraftModel
from tests.target_worker.fakes import next_token

LIMITS = DraftLimits(
    max_num_seqs=3,
    max_num_batched_tokens=10,
    max_model_len=60,
    max_nodes=30,
    max_lookahead=6,
    max_nodes_per_step=4,
    min_reach=0.02,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=390)
TARGET = "target:1"


def attach(name: str = "a", token_ids: tuple[int, ...] = (1, 2, 3), attachment: int = 1) -> AttachSession:
    return AttachSession(name, attachment, TARGET, list(token_ids), GREEDY, 7)


class World:
    """A draft scheduler, a fake model, and everything that was sent."""

    def __init__(
        self,
        limits: DraftLimits = LIMITS,
        num_blocks: int = 100,
        alignment: int = 200,
        num_children: int = 3,
        reads_masks: bool = False,
    ) -> None:
        self.limits = limits
        self.allocator = BlockAllocator(num_blocks, 4)
        self.scheduler = DraftScheduler(limits, self.allocator, VOCAB_SIZE, reads_masks=reads_masks)
        self.model = FakeDraftModel(num_blocks * 4, alignment, num_children)
        self.texts: dict[str, list[int]] = {}  # what the target has committed
        self.sent: dict[str, dict[tuple[int, int], dict[int, Hint]]] = {}
        self.trees: dict[str, HintTree] = {}  # what the target makes of it
        self.num_sent = self.num_urgent = 0  # messages

    def session(self, name: str = "a") -> DraftSession:
        session = self.scheduler.progress(name)
        assert session is not None
        return session

    def tell(self, event: Event) -> list[Action]:
        actions = self.scheduler.handle(event)
        if isinstance(event, AttachSession) and isinstance(actions[0], AttachmentAccepted):
            self.texts[event.session_id] = list(event.token_ids)
            self.sent[event.session_id] = {}
            self.trees[event.session_id] = HintTree()
        self.hear(actions)
        return actions

    def hear(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendHints):
                self.num_urgent += action.is_urgent
                self.num_sent += 1
                tree = self.sent[action.session_id].setdefault((action.attachment, action.base_len), {})
                assert action.hints
                text = self.texts[action.session_id]
                self.trees[action.session_id].add(text, action.attachment, action.base_len, action.hints)
                for sent in action.hints:
                    hint = sent._replace(is_promoted=False)
                    assert hint.node_id > 0
                    assert hint.parent_id == ROOT_ID or hint.parent_id in tree, "a child before its parent"
                    assert tree.setdefault(hint.node_id, hint) == hint, "an id is used for two nodes"

    def turn(self) -> bool:
        step = self.scheduler.next_step()
        if step is None:
            return False
        assert step.items
        assert sum(len(item.token_ids) for item in step.items) <= self.limits.max_num_batched_tokens
        assert all(len(item.node_ids) <= self.limits.max_nodes_per_step for item in step.items)
        self.hear(self.scheduler.finish_step(step, self.model.run(step)))
        return True

    def rest(self) -> None:
        """Runs until nothing can grow."""
        for _ in range(500):
            if not self.turn():
                return
        raise AssertionError("it never rests")

    def commit(self, token_ids: list[int], name: str = "a") -> list[Action]:
        from_len = len(self.texts[name])
        self.texts[name] += token_ids
        self.trees[name].commit(token_ids)
        return self.tell(CommitReceived(name, from_len, token_ids, True, False))

    def primary(self, name: str = "a") -> list[int]:
        session, path = self.session(name), []
        children = session.cursor_node.children
        while children:
            path.append(session.nodes[children[0]].hint.token_id)
            children = session.nodes[children[0]].children
        return path

    def check(self) -> None:
        """Everything that the session's docstring promises, and every bound (I7)."""
        sessions = list(self.scheduler._sessions.values())
        self.allocator.check_integrity([session.kv for session in sessions])
        cache = list(self.model.cache)
        for move in self.scheduler._moves:
            held = [cache[slot] for slot in move.source_slots]
            for slot, path in zip(move.destination_slots, held, strict=True):
                cache[slot] = path
        size = self.allocator.block_size
        for digest, block_id in self.allocator._published.items():
            held = self.model.cache[block_id * size : (block_id + 1) * size]
            text_so_far = held[-1]
            assert text_so_far is not None
            assert block_digests(text_so_far, size)[-1] == digest, "a block is offered for another's text"
            assert held == [text_so_far[: len(text_so_far) - size + i + 1] for i in range(size)]
        for session in sessions:
            text = session.token_ids
            assert text == self.texts[session.session_id][: len(text)]
            assert len(session.nodes) <= self.limits.max_nodes + self.limits.max_nodes_per_step
            slots = session.kv.slots(0, session.kv.length)
            assert session.kv.length == session.num_prefix + len(session.entry_nodes)
            for i in range(session.num_prefix):
                assert cache[slots[i]] == tuple(text[: i + 1]), "a prefix entry holds something else"
            for i, node_id in enumerate(session.entry_nodes):
                node = session.nodes[node_id]
                assert node.entry == session.num_prefix + i
                assert cache[slots[node.entry]] == self.path_of(session, node_id), "a node's entry is another's"
            if session.num_pending:
                assert all(node.entry is None for node in session.nodes.values())
            tree = self.sent[session.session_id].get((session.attachment, session.base_len), {})
            for node_id, node in session.nodes.items():
                assert tree[node_id] == node.hint, "a node that is kept was not sent"
                assert node.depth <= session.cursor_node.depth + self.limits.max_lookahead
                assert session.base_len + node.depth - 1 < self.limits.max_model_len

    def check_heard(self) -> None:
        """Checks that what was sent makes the target follow the draft's own primary path."""
        for session in self.scheduler._sessions.values():
            heard = [hint.token_id for hint in self.trees[session.session_id].primary_path(100)]
            assert heard == self.primary(session.session_id), "the target takes another path"

    def path_of(self, session: DraftSession, node_id: int) -> tuple[int, ...]:
        below: list[int] = []
        while node_id != session.cursor:
            below.append(session.nodes[node_id].hint.token_id)
            node_id = session.nodes[node_id].hint.parent_id
        return (*session.token_ids, *reversed(below))


class RandomLife(RuleBasedStateMachine):
    limits = LIMITS
    reads_masks = False

    @initialize(alignment=st.sampled_from([0, 128, 220, 256]), num_children=st.integers(1, 3))
    def begin(self, alignment: int, num_children: int) -> None:
        options = {"alignment": alignment, "num_children": num_children}
        self.world = World(self.limits, reads_masks=self.reads_masks, **options)
        self.attachment = 0

    @rule(
        name=st.sampled_from("abcd"),
        token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=25),
    )
    def attach(self, name: str, token_ids: list[int]) -> None:
        self.attachment += 1
        scheduler = self.world.scheduler
        was_known, num_sessions = scheduler.progress(name) is not None, scheduler.num_sessions
        actions = self.world.tell(attach(name, tuple(token_ids), self.attachment))
        if was_known:
            assert isinstance(actions[0], AttachmentRefused)
            assert isinstance(actions[0].error, InvalidRequest)
        elif num_sessions == LIMITS.max_num_seqs:
            assert isinstance(actions[0], AttachmentRefused)
            assert isinstance(actions[0].error, Overloaded)
        else:
            assert actions == [
                AttachmentAccepted(name),
                Subscribe(TARGET, name, self.attachment, len(token_ids)),
            ]

    @rule(name=st.sampled_from("abcd"), with_own_attachment=st.booleans())
    def detach(self, name: str, with_own_attachment: bool) -> None:
        session = self.world.scheduler.progress(name)
        attachment = session.attachment if session and with_own_attachment else 0
        actions = self.world.tell(DetachSession(name, attachment))
        assert actions == ([Unsubscribe(TARGET, name)] if session and with_own_attachment else [])

    @rule(name=st.sampled_from("abcd"), wild=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3))
    def commit_anything(self, name: str, wild: list[int]) -> None:
        if self.world.scheduler.progress(name) is not None:
            self.world.commit(wild, name)

    @rule(name=st.sampled_from("abcd"), count=st.integers(1, 7), recovered=st.none() | st.integers(0, 4))
    def commit_primary(self, name: str, count: int, recovered: int | None) -> None:
        if self.world.scheduler.progress(name) is not None:
            tokens = self.world.primary(name)[:count]
            tokens += [] if recovered is None else [recovered]
            if tokens:
                self.world.commit(tokens, name)

    @rule(name=st.sampled_from("abcd"), data=st.data())
    def commit_through_alternatives(self, name: str, data: st.DataObject) -> None:
        session = self.world.scheduler.progress(name)
        if session is None or not session.nodes:
            return
        tokens: list[int] = []
        children = session.cursor_node.children
        for choice in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)):
            if not children:
                break
            child = children[choice % len(children)]
            node = session.nodes[child]
            tokens.append(node.hint.token_id)
            children = node.children
        if tokens:
            self.world.commit(tokens, name)

    @rule(name=st.sampled_from("abcd"), back=st.integers(1, 6))
    def hear_again(self, name: str, back: int) -> None:
        session = self.world.scheduler.progress(name)
        if session is None:
            return
        text = self.world.texts[name]
        from_len = max(0, len(session.token_ids) - back)
        before = (list(session.token_ids), set(session.nodes), session.base_len)
        known = text[from_len : len(session.token_ids)]
        accepts_hints = self.world.session(name).accepts_hints  # else the whole tree is said anew
        assert self.world.tell(CommitReceived(name, from_len, known, accepts_hints, False)) == []
        assert (session.token_ids, set(session.nodes), session.base_len) == before

    @rule(name=st.sampled_from("abcd"), listening=st.booleans())
    def pause(self, name: str, listening: bool) -> None:
        session = self.world.scheduler.progress(name)
        if session is not None:
            self.world.tell(CommitReceived(name, len(session.token_ids), [], listening, False))

    @rule(name=st.sampled_from("abcd"))
    def finish(self, name: str) -> None:
        session = self.world.scheduler.progress(name)
        if session is not None:
            assert self.world.tell(CommitReceived(name, 0, [], True, True)) == [AttachmentEnded(name, True)]

    @rule()
    def link_breaks(self) -> None:
        actions = self.world.tell(LinkOpened(TARGET))
        assert sum(isinstance(a, Subscribe) for a in actions) == self.world.scheduler.num_sessions

    @rule(num_turns=st.integers(1, 5))
    def turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.world.turn()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            self.world.check_heard()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.rest()
        self.world.check()
        for name in "abcd":
            if (session := self.world.scheduler.progress(name)) is not None:
                self.world.tell(DetachSession(name, session.attachment))
        self.world.allocator.check_integrity([])


TestRandomLife = RandomLife.TestCase
TestRandomLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def attached(token_ids: tuple[int, ...] = (1, 2, 3), **options: int) -> World:
    world = World(**options)  # type: ignore[arg-type]
    world.tell(attach(token_ids=token_ids))
    return world


class TestCursor:
    def test_it_follows_the_primary_path_without_a_new_root(self) -> None:
        world = attached(alignment=256)
        for _ in range(12):
            world.rest()
            world.commit(world.primary()[:3])
            world.check()
        assert world.session().num_roots == 1
        assert world.session().base_len == 3

    def test_it_follows_an_alternative_and_keeps_what_lies_below(self) -> None:
        world = attached()
        world.rest()
        session = world.session()
        fed = [c for c in session.cursor_node.children[1:] if session.nodes[c].children]
        assert fed, "no alternative was grown"
        below = {session.nodes[c].hint.token_id for c in session.nodes[fed[0]].children}
        world.commit([session.nodes[fed[0]].hint.token_id])
        assert session.num_roots == 1
        assert {session.nodes[c].hint.token_id for c in session.cursor_node.children} == below
        world.rest()
        world.check()

    def test_a_token_that_is_not_in_the_tree_starts_a_root_at_the_new_length(self) -> None:
        world = attached(num_children=1)
        world.rest()
        wrong = (world.primary()[1] + 1) % VOCAB_SIZE
        world.commit([world.primary()[0], wrong])
        assert (world.session().num_roots, world.session().base_len) == (2, 5)
        world.rest()
        assert (1, 5) in world.sent["a"]
        assert world.primary()[0] == world.model.expand(world.texts["a"]).token_ids[0]

    def test_roots_only_go_forward(self) -> None:
        world = attached(alignment=60, num_children=1)
        for _ in range(10):
            world.rest()
            text = world.texts["a"]
            world.commit([next_token(text)])
        roots = list(world.sent["a"])
        assert roots == sorted(roots)

    def test_a_missed_commit_is_asked_for_and_nothing_is_assumed(self) -> None:
        world = attached()
        world.rest()
        before = list(world.session().token_ids)
        actions = world.tell(CommitReceived("a", 5, [1, 2], True, False))
        assert actions == [Subscribe(TARGET, "a", 1, 3)]
        assert world.session().token_ids == before


class TestBounds:
    """I7."""

    def test_a_full_tree_rests_until_commits_arrive(self) -> None:
        world = attached()
        world.rest()
        assert not world.turn()
        world.commit(world.primary()[:1])
        assert world.turn()

    @pytest.mark.parametrize("num_children", [1, 2, 3])
    def test_nodes_and_lookahead_stay_within_their_limits(self, num_children: int) -> None:
        world = attached(num_children=num_children)
        while world.turn():
            world.check()
            assert len(world.session().nodes) <= LIMITS.max_nodes

    def test_the_primary_path_grows_first(self) -> None:
        world = World(replace(LIMITS, max_chain_nodes=0))
        world.tell(attach())
        for num_turns in range(1, LIMITS.max_lookahead + 1):
            world.turn()
            assert len(world.primary()) == num_turns or len(world.session().nodes) >= LIMITS.max_nodes - 2

    def test_hints_are_urgent_only_where_the_next_step_could_verify_them(self) -> None:
        limits = replace(LIMITS, max_lookahead=NUM_NEAR_NODES + 8, max_chain_nodes=0, min_reach=0.0)
        world = World(limits, num_children=1)
        world.tell(attach())
        for _ in range(NUM_NEAR_NODES):
            before = len(world.primary())
            world.turn()
            assert len(world.primary()) == before + 1, "no message without a nearer hint"
        assert world.num_urgent == world.num_sent == NUM_NEAR_NODES
        world.turn()
        assert (world.num_urgent, world.num_sent) == (NUM_NEAR_NODES, NUM_NEAR_NODES + 1)
        world.commit(world.primary()[:2])
        while len(world.primary()) == NUM_NEAR_NODES - 1:
            world.turn()
        assert world.num_urgent == NUM_NEAR_NODES + 1

    def test_a_session_as_long_as_the_model_can_follow_gets_no_more_hints(self) -> None:
        world = attached(tuple([1] * 50), alignment=256)
        for _ in range(30):
            world.rest()
            world.commit([next_token(world.texts["a"])])
            world.check()
        assert not world.turn()

    def test_a_prompt_longer_than_the_model_can_follow_is_refused(self) -> None:
        (action,) = World().tell(attach(token_ids=tuple([1] * 60)))
        assert isinstance(action, AttachmentRefused)
        assert isinstance(action.error, InvalidRequest)
        assert action.error.parameter == "token_ids"

    def test_as_many_are_taken_as_can_grow_to_the_end_and_others_hear_when_to_come_back(self) -> None:
        entries = LIMITS.max_model_len + LIMITS.max_nodes
        world = World(replace(LIMITS, max_num_seqs=9), num_blocks=1 + 2 * -(-entries // 4))
        assert world.scheduler.num_slots == 2
        for name, now in (("a", 0.0), ("b", 4.0)):
            answers = world.scheduler.handle(attach(name), now)
            assert isinstance(answers[0], AttachmentAccepted)
        for now, told_s in ((5.0, 0.5), (30.0, 10.0)):  # nobody has left yet; then somebody after 20 s
            (answer,) = world.scheduler.handle(attach("c"), now)
            assert isinstance(answer, AttachmentRefused)
            assert isinstance(answer.error, Overloaded)
            assert answer.error.retry_after_s == pytest.approx(told_s)
            world.scheduler.handle(DetachSession("a", 1), 20.0)
            world.scheduler.handle(attach("a"), 20.0)

    def test_a_token_outside_the_vocabulary_is_refused(self) -> None:
        (action,) = World().tell(attach(token_ids=(1, VOCAB_SIZE)))
        assert isinstance(action, AttachmentRefused)

    def test_a_committed_token_outside_the_vocabulary_fails_its_session_and_no_other(self) -> None:
        """The target's output layer may have more rows than the draft's; the model thread must not die of it."""
        world = attached()
        world.tell(attach("b"))
        world.rest()
        world.texts["a"] += [VOCAB_SIZE + 3]
        world.tell(CommitReceived("a", 3, [VOCAB_SIZE + 3], True, False))
        world.commit([world.primary("b")[0]], "b")
        for _ in range(20):
            step = world.scheduler.next_step()
            if step is None:
                break
            fed = [token_id for item in step.items for token_id in item.token_ids]
            assert max(fed) < VOCAB_SIZE
            world.hear(world.scheduler.finish_step(step, world.model.run(step)))

    def test_too_little_kv_for_all_sessions_costs_hints_and_never_the_worker(self) -> None:
        """The KV memory bound may hold fewer than `max_num_seqs` sessions of the longest length."""
        world = World(num_blocks=9)  # 32 entries; three sessions of up to 60 tokens may attach
        for name in "abc":
            world.tell(attach(name, (1, 2, 3)))
        for _ in range(25):
            for _ in range(10):
                world.turn()
            for name in "abc":
                if world.scheduler.progress(name) is not None:
                    world.commit([next_token(world.texts[name])], name)
            world.allocator.check_integrity([s.kv for s in world.scheduler._sessions.values()])


class TestChains:
    """Chains: nodes that a step may feed after its own nodes, before it receives an event or sends a hint."""

    def chains(self, world: World) -> dict[str, Chain | None]:
        step = world.scheduler.next_step()
        assert step is not None
        chains = {item.session_id: item.chain for item in step.items}
        world.hear(world.scheduler.finish_step(step, world.model.run(step)))
        return chains

    def test_the_first_hints_come_with_the_prefill(self) -> None:
        world = World(LIMITS, alignment=256)
        world.tell(attach())
        world.model.num_steps = next(n for n in range(100) if mix(n + 1) % 6 >= 3)  # nothing comes between
        world.turn()
        assert len(world.primary()) == 1 + LIMITS.max_chain_nodes
        world.check()

    def test_it_is_over_where_lookahead_or_nodes_are(self) -> None:
        world = World(replace(LIMITS, max_lookahead=2, max_chain_nodes=9))
        world.tell(attach())
        chain = self.chains(world)["a"]
        assert chain is not None
        assert chain.max_nodes == 1, "the second token below the cursor is said and not fed"
        world = World(replace(LIMITS, max_nodes=4, max_chain_nodes=9))
        world.tell(attach())
        chain = self.chains(world)["a"]
        assert chain is not None
        assert chain.max_nodes == 3

    def test_it_stops_where_another_node_is_likelier_to_be_reached(self) -> None:
        world = World(replace(LIMITS, max_nodes_per_step=1))
        world.tell(attach("a"))
        world.tell(attach("b"))
        self.chains(world)
        likeliest = max(world.session(name).next_priority() for name in "ab")
        other = min(world.session(name).next_priority() for name in "ab")
        (chain,) = self.chains(world).values()
        assert chain is not None
        assert chain.reach == pytest.approx(likeliest)
        assert chain.min_reach == pytest.approx(other)

    @pytest.mark.parametrize(
        ("sampling", "has_chain"),
        [
            (GREEDY, True),
            (SamplingParams(temperature=0.8, seed=3, max_tokens=50), True),
            (SamplingParams(temperature=0.8, max_tokens=50), False),
        ],
        ids=["greedy", "coupled", "rejection"],
    )
    def test_draws_that_are_counted_are_made_one_by_one(self, sampling: SamplingParams, has_chain: bool) -> None:
        world = World()
        world.tell(AttachSession("a", 1, TARGET, [1, 2, 3], sampling, 7))
        assert (self.chains(world)["a"] is not None) == has_chain

    def test_none_when_told_so(self) -> None:
        world = World(replace(LIMITS, max_chain_nodes=0))
        world.tell(attach())
        for _ in range(3):
            assert self.chains(world)["a"] is None


class TestFairness:
    def test_each_session_grows_in_every_step(self) -> None:
        world = World()
        for name in "abc":
            world.tell(attach(name, (1, 2, ord(name) % VOCAB_SIZE)))
        for _ in range(2):
            world.turn()
        for _ in range(2):
            step = world.scheduler.next_step()
            assert step is not None
            sizes = {item.session_id: len(item.node_ids) for item in step.items}
            assert set(sizes) == set("abc")
            assert max(sizes.values()) - min(sizes.values()) <= 1
            world.hear(world.scheduler.finish_step(step, world.model.run(step)))

    def test_a_long_prompt_does_not_stop_others(self) -> None:
        world = World()
        world.tell(attach("a"))
        world.turn()
        world.tell(attach("b", tuple([1] * 50)))
        num_steps = 0
        while len(world.primary("a")) < 5:
            world.turn()
            num_steps += 1
            assert num_steps < 10

    def test_a_session_that_is_not_listened_to_leaves_the_room_to_others(self) -> None:
        world = World()
        for name in "ab":
            world.tell(attach(name))
        world.rest()
        world.tell(CommitReceived("a", 3, [], False, False))
        for name in "ab":
            world.commit([(world.primary(name)[0])], name) if name == "b" else None
        step = world.scheduler.next_step()
        assert step is not None
        assert {item.session_id for item in step.items} == {"b"}


def test_detaching_frees_all_kv() -> None:
    world = attached()
    world.rest()
    assert world.tell(DetachSession("a", 0)) == []  # an older attachment's goodbye
    assert world.scheduler.num_sessions == 1
    assert world.tell(DetachSession("a", 1)) == [Unsubscribe(TARGET, "a")]
    world.allocator.check_integrity([])
    assert world.scheduler.next_step() is None


class TestRestingTargets:
    """A target that listens to nobody now is not drafted for before it says otherwise."""

    def resting(self) -> World:
        world = attached()
        world.rest()
        world.tell(CommitReceived("a", 3, [], False, False))
        return world

    def test_a_session_of_a_resting_target_is_not_even_prefilled(self) -> None:
        world = self.resting()
        world.tell(attach("b"))
        assert not world.turn()

    def test_it_grows_as_soon_as_its_target_listens_to_it(self) -> None:
        world = self.resting()
        world.tell(attach("b"))
        world.tell(CommitReceived("b", 3, [], True, False))
        assert world.turn()
        assert world.sent["b"]

    def test_the_next_one_is_prefilled_at_once_again_when_the_target_listens_to_any(self) -> None:
        world = self.resting()
        world.tell(CommitReceived("a", 3, [], True, False))
        world.rest()
        world.tell(attach("b"))
        assert world.turn()

    def test_what_a_target_did_is_forgotten_with_its_last_session(self) -> None:
        world = self.resting()
        world.tell(CommitReceived("a", 3, [], False, True))
        world.tell(attach("b"))
        assert world.turn()


class TestBackground:
    def attached(self, *names: str) -> World:
        world = World()
        for name in names:
            world.tell(replace(attach(name), is_background=name.startswith("batch")))
        return world

    def test_a_session_of_a_batch_gives_its_slot_to_another(self) -> None:
        world = self.attached("batch 0", "batch 1", "chat 0")
        actions = world.scheduler.handle(attach("chat 1"))
        left, refused, accepted, followed = actions
        assert left == Unsubscribe(TARGET, "batch 1")
        assert isinstance(refused, AttachmentRefused)
        assert (refused.session_id, type(refused.error)) == ("batch 1", Overloaded)
        assert accepted == AttachmentAccepted("chat 1")
        assert isinstance(followed, Subscribe)
        assert world.scheduler.num_sessions == LIMITS.max_num_seqs
        assert world.scheduler.num_background == 1

    def test_none_is_taken_for_another_of_a_batch_or_from_a_client(self) -> None:
        for full, comes in ((("batch 0", "batch 1", "batch 2"), "batch 3"), (("chat 0", "chat 1", "chat 2"), "chat 3")):
            world = self.attached(*full)
            (refused,) = world.scheduler.handle(replace(attach(comes), is_background=comes.startswith("batch")))
            assert isinstance(refused, AttachmentRefused)
            assert refused.session_id == comes
            with pytest.raises(Overloaded):
                world.scheduler.check_room(is_background=comes.startswith("batch"))

    def test_it_grows_only_while_no_other_can(self) -> None:
        world = self.attached("batch", "chat")
        fed: list[set[str]] = []
        while (step := world.scheduler.next_step()) is not None:
            fed.append({item.session_id for item in step.items})
            world.scheduler.finish_step(step, world.model.run(step))
        assert {"batch"} in fed
        assert fed == sorted(fed, key=lambda names: names == {"batch"})
        assert all(len(names) == 1 for names in fed)
