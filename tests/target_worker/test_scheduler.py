"""The target's scheduler under random interleavings: the text is always that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.errors import InvalidRequest, NotFound, OutriderError, Overloaded
from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import ROOT_ID, Hint
from outrider.sampling_params import DecodingMode, SpeculationSettings
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    CancelSession,
    ChangeSpeculation,
    CloseStream,
    CommitPublished,
    Event,
    HintsArrived,
    SessionAborted,
    SessionAdmitted,
    SessionEnded,
    SessionRefused,
    StartSession,
    Step,
    SubscribeDraft,
    TokensCommitted,
    UnsubscribeDraft,
    WaitForHints,
)
from target_worker.scheduling.scheduler import Scheduler
from tests.target_worker.fakes import END, VOCAB_SIZE, FakeHead, FakeModel, greedy_text, next_token, start

LIMITS = SchedulerLimits(
    may_pause=False,
    has_lookup=False,
    max_num_seqs=3,
    max_num_waiting=2,
    max_num_batched_tokens=12,
    max_model_len=40,
    num_speculative_tokens=4,
    hint_wait_ms_max=10.0,
    max_early_sessions=3,
    max_early_events=4,
    end_of_sequence_ids=frozenset({END}),
)


class World:
    """A scheduler, a fake model, and a record of everything that was said to callers and draft workers."""

    def __init__(
        self,
        limits: SchedulerLimits = LIMITS,
        num_blocks: int = 49,
        block_size: int = 4,
        head: FakeHead | None = None,
    ) -> None:
        self.limits, self.head = limits, head
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.scheduler = Scheduler(limits, self.allocator, VOCAB_SIZE, head)
        self.model = FakeModel(num_blocks * block_size)
        self.now = 100.0
        self.starts: dict[str, StartSession] = {}
        self.texts: dict[str, list[int]] = {}
        self.ended: dict[str, SessionEnded] = {}
        self.refused: list[SessionRefused] = []
        self.aborted: dict[str, OutriderError] = {}
        self.pauses: dict[str, list[bool]] = {}  # of each step of a session, as its caller hears of it
        self.views: dict[tuple[int, str], list[int]] = {}  # a draft worker's idea of a text
        self.finished_views: set[tuple[int, str]] = set()
        self.last_step: Step | None = None
        self.waiting_since: float | None = None

    def tell(self, event: Event) -> list[Action]:
        if isinstance(event, SubscribeDraft) and event.session_id in self.texts:
            view = self.texts[event.session_id][: event.known_len]
            self.views[event.stream_id, event.session_id] = view
        actions = self.scheduler.handle(event, self.now)
        if isinstance(event, StartSession) and any(isinstance(a, SessionAdmitted) for a in actions):
            self.starts[event.session_id] = event
            self.texts[event.session_id] = list(event.token_ids)
            self.ended.pop(event.session_id, None)
        self.hear(actions)
        return actions

    def hear(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case TokensCommitted():
                    assert action.token_ids
                    assert len(action.origins) == len(action.token_ids)
                    assert common_pb2.TOKEN_ORIGIN_UNSPECIFIED not in action.origins
                    assert 0 <= action.num_accepted_draft_tokens <= action.num_draft_tokens
                    assert action.session_id not in self.ended
                    self.texts[action.session_id] += action.token_ids
                    self.pauses.setdefault(action.session_id, []).append(action.is_resting)
                case SessionEnded():
                    assert action.session_id not in self.ended
                    self.ended[action.session_id] = action
                case SessionAborted():
                    assert action.session_id not in self.ended
                    self.aborted[action.session_id] = action.error
                case SessionRefused():
                    self.refused.append(action)
                case CommitPublished():
                    known = self.texts[action.session_id][: action.from_len]  # of an early subscription
                    view = self.views.setdefault((action.stream_id, action.session_id), known)
                    if action.from_len <= len(view):
                        view += action.token_ids[len(view) - action.from_len :]
                    else:
                        raise AssertionError(f"a gap: {action.from_len} after {len(view)} tokens")
                    if action.is_finished:
                        self.finished_views.add((action.stream_id, action.session_id))

    def turn(self) -> Step | WaitForHints | None:
        """One turn of the model thread, with its checks."""
        decision = self.scheduler.next_step(self.now)
        bound_s = self.limits.hint_wait_ms_max / 1e3
        if isinstance(decision, WaitForHints):
            self.waiting_since = self.now if self.waiting_since is None else self.waiting_since
            assert self.now < decision.until <= self.waiting_since + bound_s + 1e-9
        elif decision is not None:
            self.waiting_since = None
            self.check_step(decision)
            self.now += 0.002
            self.hear(self.scheduler.finish_step(decision, self.model.run(decision), self.now))
            self.last_step = decision
        else:
            self.waiting_since = None
        return decision

    def check_step(self, step: Step) -> None:
        assert step.items
        assert step.num_tokens <= self.limits.max_num_batched_tokens
        assert len(step.items) <= self.limits.max_num_seqs
        assert len({item.session_id for item in step.items}) == len(step.items)
        for item in step.items:
            asked = self.starts[item.session_id]
            assert len(item.token_ids) > 0
            assert item.kv.length <= self.limits.max_model_len + self.limits.num_local_tokens_max
            assert item.num_fed_hints <= self.limits.num_local_tokens_max
            assert item.num_logits == item.num_decided or item.prompt_targets
            assert len(item.prompt_targets) <= item.num_logits
            assert item.seed == asked.seed

    def run_until_idle(self, max_turns: int = 3000) -> None:
        for _ in range(max_turns):
            decision = self.turn()
            if decision is None:
                return
            if isinstance(decision, WaitForHints):
                self.now = decision.until
        raise AssertionError("still busy")

    def expected(self, session_id: str) -> tuple[list[int], int | None]:
        asked = self.starts[session_id]
        max_len = min(asked.num_prompt_tokens + asked.sampling.max_tokens, self.limits.max_model_len)
        stops = asked.sampling.stop_token_ids
        if not asked.sampling.ignore_eos:
            stops |= self.limits.end_of_sequence_ids
        return greedy_text(asked.token_ids, max_len, stops)

    def check(self) -> None:
        """I1 and I2, and that every view of a draft worker is the text."""
        for session_id, text in self.texts.items():
            expected, stop_token_id = self.expected(session_id)
            assert text == expected[: len(text)]
            if (ended := self.ended.get(session_id)) is not None:
                assert text == expected
                assert ended.stop_token_id == stop_token_id
                reason = target_pb2.FINISH_REASON_LENGTH if stop_token_id is None else target_pb2.FINISH_REASON_STOP
                assert ended.reason == reason
                assert ended.num_output_tokens == len(text) - self.starts[session_id].num_prompt_tokens
        for (_, session_id), view in self.views.items():
            if session_id in self.texts:
                assert view == self.texts[session_id][: len(view)]
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        # Those that were preempted wait beside as many as may wait.
        assert len(self.scheduler._sessions) <= self.limits.max_num_seqs + self.limits.max_num_waiting
        assert 0.0 <= self.scheduler.kv_usage <= 1.0
        early = self.scheduler._early._kept
        assert len(early) <= self.limits.max_early_sessions
        assert all(len(one.events) <= self.limits.max_early_events for one in early.values())
        sessions = self.scheduler._sessions.values()
        self.allocator.check_integrity([session.kv for session in sessions])
        if self.head is not None and self.head.allocator is not None:
            owned = [each.head.kv for each in sessions if each.head is not None and each.head.kv is not None]
            self.head.allocator.check_integrity(owned)

    def check_is_empty(self) -> None:
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.kv_usage) == (
            0,
            0,
            0.0,
        )
        self.allocator.check_integrity([])


NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
STREAMS = st.integers(1, 3)
MEMORIES = st.sampled_from([{}, {"is_memory": True, "match_len": 4}, {"is_memory": True, "match_len": 24}])
"""Whether hints are a memory worker's."""
SETTINGS = st.builds(SpeculationSettings, st.booleans(), st.integers(0, 6))


class RandomLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.num_attachments = 0
        self.next_node = 1
        self.counter = 0

    @rule(
        name=NAMES,
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=25),
        num_given=st.integers(0, 2),
        max_tokens=st.sampled_from([1, 2, 5, 30, 1000]),
        stop=st.frozensets(st.integers(0, 4), max_size=1),
        ignore_eos=st.booleans(),
        speculation=SETTINGS,
    )
    def start(
        self,
        name: str,
        prompt: list[int],
        num_given: int,
        max_tokens: int,
        stop: frozenset[int],
        ignore_eos: bool,
        speculation: SpeculationSettings,
    ) -> None:
        world = self.world
        was_known = name in world.scheduler._sessions
        if not was_known:  # a name that is used again is a new text; forget what was heard of the old one
            for key in [key for key in world.views if key[1] == name]:
                del world.views[key]
            world.finished_views = {key for key in world.finished_views if key[1] != name}
        num_waiting = world.scheduler.num_waiting
        actions = world.tell(
            start(
                name,
                prompt,
                num_given=num_given,
                max_tokens=max_tokens,
                stop_token_ids=stop,
                ignore_eos=ignore_eos,
                speculation=speculation,
            )
        )
        answer = actions[0]
        if isinstance(answer, SessionRefused):
            assert not any(isinstance(a, SessionAdmitted) for a in actions)
            if isinstance(answer.error, Overloaded):
                assert num_waiting >= world.limits.max_num_waiting
                assert answer.error.retry_after_s > 0
            else:
                assert isinstance(answer.error, InvalidRequest)
        else:
            assert answer == SessionAdmitted(name, DecodingMode.GREEDY)
            assert not was_known
            assert num_waiting < world.limits.max_num_waiting

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        self.world.tell(CancelSession(name))
        assert name not in self.world.scheduler._sessions

    @rule(name=NAMES, speculation=SETTINGS)
    def change_speculation(self, name: str, speculation: SpeculationSettings) -> None:
        actions = self.world.tell(ChangeSpeculation(name, speculation))
        if name not in self.world.scheduler._sessions:
            assert isinstance(actions[0], SessionRefused)
            assert isinstance(actions[0].error, NotFound)

    @rule(name=NAMES, stream=STREAMS, back=st.integers(0, 4), is_memory=st.booleans())
    def subscribe(self, name: str, stream: int, back: int, is_memory: bool) -> None:
        text = self.world.texts.get(name, [0] * 5)
        self.world.tell(SubscribeDraft(stream, name, max(1, len(text) - back), is_memory=is_memory))

    @rule(name=NAMES, stream=STREAMS)
    def unsubscribe(self, name: str, stream: int) -> None:
        self.world.tell(UnsubscribeDraft(stream, name))

    @rule(stream=STREAMS)
    def close_stream(self, stream: int) -> None:
        self.world.tell(CloseStream(stream))

    @rule(
        name=NAMES,
        back=st.integers(0, 3),
        length=st.integers(1, 9),
        wrong_at=st.integers(0, 12),
        attachment=st.integers(1, 3),
        late_ms=st.floats(0, 5),
        memory=MEMORIES,
    )
    def good_hints(
        self, name: str, back: int, length: int, wrong_at: int, attachment: int, late_ms: float, memory: dict[str, Any]
    ) -> None:
        """Sends hints of a well-aligned draft or memory worker, of which one at most is wrong."""
        text = list(self.world.texts.get(name, [1, 2]))
        base_len = max(1, len(text) - back)
        del text[base_len:]
        hints = []
        for i in range(length):
            token_id = next_token(text)
            text.append((token_id + 1) % VOCAB_SIZE if i == wrong_at else token_id)
            parent = ROOT_ID if i == 0 else self.next_node - 1
            hints.append(Hint(self.next_node, parent, text[-1]))
            self.next_node += 1
        self.world.tell(HintsArrived(name, attachment, base_len, hints, self.world.now - late_ms / 1e3, **memory))

    @rule(
        name=NAMES,
        base_len=st.integers(-1, 60),
        attachment=st.integers(0, 3),
        hints=st.lists(
            st.builds(Hint, st.integers(0, 9), st.integers(0, 9), st.integers(0, VOCAB_SIZE - 1)), max_size=8
        ),
        late_ms=st.floats(0, 5),
        memory=MEMORIES,
    )
    def wild_hints(
        self, name: str, base_len: int, attachment: int, hints: list[Hint], late_ms: float, memory: dict[str, Any]
    ) -> None:
        self.world.tell(HintsArrived(name, attachment, base_len, hints, self.world.now - late_ms / 1e3, **memory))

    @rule(num_turns=st.integers(1, 6))
    def turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.world.turn()

    @rule(milliseconds=st.floats(0, 15))
    def time_passes(self, milliseconds: float) -> None:
        self.world.now += milliseconds / 1e3

    @precondition(lambda self: len(self.world.scheduler._sessions) > 2)
    @rule()
    def let_all_finish(self) -> None:
        self.world.run_until_idle()
        self.world.check_is_empty()

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.run_until_idle()
        self.world.check()
        self.world.check_is_empty()


class RandomLifeBesideAHead(RandomLife):
    """The same, with a draft head of the worker's own, whose KV is at times too small for all sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(head=FakeHead(pass_ms=0.2, num_blocks=30, luck=7))


TestRandomLife = RandomLife.TestCase
TestRandomLifeBesideAHead = RandomLifeBesideAHead.TestCase
TestRandomLife.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
TestRandomLifeBesideAHead.settings = settings(TestRandomLife.settings, max_examples=60)


def run_alone(event: StartSession, limits: SchedulerLimits = LIMITS) -> World:
    world = World(limits)
    world.tell(event)
    world.run_until_idle()
    world.check()
    return world


class TestFinishing:
    def test_length(self) -> None:
        world = run_alone(start(ignore_eos=True, max_tokens=9))
        assert world.ended["a"].reason == target_pb2.FINISH_REASON_LENGTH
        assert (world.ended["a"].num_prompt_tokens, world.ended["a"].num_output_tokens) == (3, 9)

    def test_longest_context(self) -> None:
        world = run_alone(start(ignore_eos=True, max_tokens=1000))
        assert len(world.texts["a"]) == LIMITS.max_model_len
        assert world.ended["a"].reason == target_pb2.FINISH_REASON_LENGTH

    @pytest.mark.parametrize("num_hints", [0, 3])
    def test_stop_token_is_named_and_not_shown_wherever_it_stands_in_a_block(self, num_hints: int) -> None:
        text, _ = greedy_text([1, 2, 3], 20, frozenset())
        stop = text[5]
        world = World()
        world.tell(start(stop_token_ids=frozenset({stop}), ignore_eos=True))
        hints = [Hint(i + 1, i, token_id) for i, token_id in enumerate(text[3 : 3 + num_hints])]
        world.tell(HintsArrived("a", 1, 3, hints, world.now))
        world.run_until_idle()
        world.check()
        assert world.ended["a"].stop_token_id == stop
        assert stop not in world.texts["a"][3:]

    def test_tokens_committed_elsewhere_are_gone_on_from(self) -> None:
        """Recovery after a lost worker: no token lost, repeated or changed; `max_tokens` counts from the prompt."""
        whole = run_alone(start(ignore_eos=True, max_tokens=15)).texts["a"]
        resumed = run_alone(start(ignore_eos=True, max_tokens=15, num_given=6))
        assert resumed.texts["a"] == whole
        assert resumed.ended["a"].num_output_tokens == 15

    def test_finished_session_is_told_to_its_subscribers_once(self) -> None:
        world = World()
        world.tell(SubscribeDraft(1, "a", 3))
        world.tell(start(max_tokens=4, ignore_eos=True))
        world.run_until_idle()
        assert world.finished_views == {(1, "a")}
        assert world.views[1, "a"] == world.texts["a"]

    def test_cancelled_session_is_told_to_its_subscribers_and_frees_all(self) -> None:
        world = World()
        world.tell(start())
        world.turn()
        world.tell(SubscribeDraft(1, "a", 3))
        actions = world.tell(CancelSession("a"))
        assert [type(a) for a in actions] == [CommitPublished]
        assert world.finished_views == {(1, "a")}
        world.check_is_empty()


class TestAdmission:
    @pytest.mark.parametrize(
        ("event", "parameter"),
        [
            (StartSession("a", [1, 2], 0, start().sampling, SpeculationSettings(), 1), "token_ids"),
            (StartSession("a", [1, 2], 3, start().sampling, SpeculationSettings(), 1), "token_ids"),
            (StartSession("a", [], 0, start().sampling, SpeculationSettings(), 1), "token_ids"),
            (start(prompt=[1] * 40), "token_ids"),
            (start(prompt=[1, VOCAB_SIZE]), "token_ids"),
            (start(prompt=[1, -1]), "token_ids"),
            (start(num_given=2, max_tokens=2), "max_tokens"),
        ],
    )
    def test_what_cannot_run_is_refused_by_field(self, event: StartSession, parameter: str) -> None:
        world = World()
        (action,) = world.tell(event)
        assert isinstance(action, SessionRefused)
        assert isinstance(action.error, InvalidRequest)
        assert action.error.parameter == parameter
        world.check_is_empty()

    def test_more_than_fit_wait_and_more_than_may_wait_are_refused(self) -> None:
        """I7: an explicit refusal that the client can act on."""
        world = World()
        for number in range(LIMITS.max_num_waiting):
            world.tell(start(f"s{number}"))
        (action,) = world.tell(start("late"))
        assert isinstance(action, SessionRefused)
        assert isinstance(action.error, Overloaded)
        world.turn()  # promotes those that waited
        (action,) = world.tell(start("later"))
        assert isinstance(action, SessionAdmitted)

    def test_a_session_waits_for_kv_and_others_are_not_let_past_it(self) -> None:
        """24 KV entries: of sessions that are about to have 13 tokens, one at a time."""
        world = World(num_blocks=7)
        for name in ("a", "b"):
            world.tell(start(name, max_tokens=10, ignore_eos=True))
        world.turn()
        assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 1)
        world.run_until_idle()
        world.check()
        assert set(world.ended) == {"a", "b"}

    def test_a_session_that_never_fits_is_refused_at_once(self) -> None:
        (action,) = World(num_blocks=5).tell(start(max_tokens=30))
        assert isinstance(action, SessionRefused)
        assert isinstance(action.error, InvalidRequest)

    def test_a_session_id_is_used_once_at_a_time(self) -> None:
        world = World()
        world.tell(start())
        (action,) = world.tell(start())
        assert isinstance(action, SessionRefused)
        assert isinstance(action.error, InvalidRequest)
        assert action.error.parameter == "session_id"
        world.run_until_idle()
        world.check()


class TestHints:
    def hinted(self, speculation: SpeculationSettings, num_hints: int = 12) -> World:
        """One session with perfect hints for all of its text."""
        world = World()
        world.tell(start(ignore_eos=True, max_tokens=12, speculation=speculation))
        text, _ = greedy_text([1, 2, 3], 30, frozenset())
        world.tell(
            HintsArrived("a", 1, 3, [Hint(i + 1, i, t) for i, t in enumerate(text[3 : 3 + num_hints])], world.now)
        )
        world.run_until_idle()
        world.check()
        return world

    def test_right_hints_save_steps(self) -> None:
        stats = self.hinted(SpeculationSettings()).ended["a"].stats
        assert stats.num_steps <= 4
        assert stats.num_accepted_draft_tokens == stats.num_draft_tokens >= 8
        assert sum(stats.acceptance_histogram) == sum(stats.draft_length_histogram) == stats.num_spec_steps

    def test_free_last_hint_keeps_what_was_written_beyond_it_alive(self) -> None:
        """Five tokens a step with four hints fed, and no hint goes stale."""
        stats = self.hinted(SpeculationSettings()).ended["a"].stats
        assert stats.num_stale_hints == 0

    def test_every_outcome_is_predicted_while_the_tree_goes_on_below_what_was_said(self) -> None:
        stats = self.hinted(SpeculationSettings(), num_hints=20).ended["a"].stats
        assert stats.num_outcomes == stats.num_steps - 1, "all but the last, after which nothing follows"
        assert stats.num_predicted_outcomes == stats.num_ready_outcomes == stats.num_outcomes

    @pytest.mark.parametrize(("hints_below", "is_ready"), [(2, True), (0, False)])
    def test_a_rejection_is_predicted_by_an_alternative_and_ready_by_what_hangs_below_it(
        self, hints_below: int, is_ready: bool
    ) -> None:
        stats = self.after_one_step(alternative=True, hints_below=hints_below)
        assert (stats.num_outcomes, stats.num_predicted_outcomes) == (1, 1)
        assert stats.num_ready_outcomes == is_ready

    def test_a_rejection_that_no_alternative_foresaw_is_not_predicted(self) -> None:
        stats = self.after_one_step(alternative=False, hints_below=0)
        assert (stats.num_outcomes, stats.num_predicted_outcomes, stats.num_ready_outcomes) == (1, 0, 0)

    def test_steps_without_hints_have_no_outcome_to_predict(self) -> None:
        assert self.hinted(SpeculationSettings(), num_hints=0).ended["a"].stats.num_outcomes == 0

    def after_one_step(self, *, alternative: bool, hints_below: int) -> common_pb2.SpeculationStats:
        """A prefill that rejects a hint; perhaps there is an alternative, which is right, and some hints below it."""
        world = World()
        world.tell(start(ignore_eos=True, max_tokens=12))
        text, _ = greedy_text([1, 2, 3], 30, frozenset())
        hints = [Hint(1, 0, (text[3] + 1) % VOCAB_SIZE)]
        if alternative:
            hints += [Hint(2 + i, 0 if i == 0 else 1 + i, text[3 + i]) for i in range(1 + hints_below)]
        world.tell(HintsArrived("a", 1, 3, hints, world.now))
        world.turn()
        world.scheduler.next_step(world.now)
        return world.scheduler._sessions["a"].stats

    def num_fed(self, confidence: tuple[int, int], temperature: float = 0.0) -> list[int]:
        """Hints that a step feeds of each of two sessions, which have four each, all of its confidence."""
        world = World()
        for _ in range(40):
            for num_tokens in (1, 5, 9):
                world.scheduler.cost.observe(num_tokens, 1.0 + 0.7 * num_tokens)
        for session_id in "ab":
            world.tell(start(session_id, ignore_eos=True, temperature=temperature))
        while world.scheduler.num_waiting or any(
            session.num_pending > 1 for session in world.scheduler._sessions.values()
        ):
            world.turn()
        for session_id, level in zip("ab", confidence, strict=True):
            text = world.texts[session_id]
            hints = [Hint(i + 1, i, 1, confidence=level) for i in range(4)]
            world.tell(HintsArrived(session_id, 1, len(text), hints, world.now))
        step = world.scheduler.next_step(world.now)
        assert isinstance(step, Step)
        return [item.num_fed_hints for item in step.items]

    def test_of_costly_hints_those_that_the_draft_is_sure_of_are_verified(self) -> None:
        assert self.num_fed((20, 127)) == [0, 4]
        assert self.num_fed((127, 20)) == [4, 0]

    def test_how_many_sampled_hints_are_verified_does_not_depend_on_how_sure_the_draft_says_it_is(
        self,
    ) -> None:
        """I4: else a hint that looks likely would be verified more often, and likely tokens said too often."""
        fed = self.num_fed((0, 0), temperature=1.0)
        assert sum(fed) > 0
        for confidence in ((127, 1), (1, 1), (127, 127)):
            assert self.num_fed(confidence, temperature=1.0) == fed

    def test_what_became_of_verified_hints_is_held_against_how_sure_the_draft_was(self) -> None:
        """All that held and the first that did not; those behind it were not tried, and others' hints do not count."""
        world = World()
        seen: list[tuple[int, bool]] = []

        class Recorder(Calibration):
            def observe(self, confidence: int, record: float, *, is_accepted: bool) -> None:
                seen.append((confidence, is_accepted))

        world.scheduler._calibrations[DecodingMode.GREEDY] = Recorder()
        world.tell(start(ignore_eos=True, max_tokens=12))
        text, _ = greedy_text([1, 2, 3], 30, frozenset())
        said = [*text[3:5], (text[5] + 1) % VOCAB_SIZE, text[6]]
        hints = [Hint(i + 1, i, token_id, confidence=10 + i) for i, token_id in enumerate(said)]
        world.tell(HintsArrived("a", 1, 3, hints, world.now))
        while len(world.texts["a"]) < 6:
            world.turn()
        assert seen == [(10, True), (11, True), (12, False)]

    def test_a_caller_hears_of_steps_in_which_the_worker_chose_not_to_listen(self) -> None:
        """As a new worker does, to learn what plain steps cost."""
        world = World(replace(LIMITS, may_pause=True))
        world.tell(start(ignore_eos=True, max_tokens=20))
        world.tell(SubscribeDraft(1, "a", 3))
        world.run_until_idle()
        assert world.pauses["a"][0]
        assert not world.pauses["a"][-1]

    @pytest.mark.parametrize("speculation", [SpeculationSettings(is_plain=True), SpeculationSettings(enabled=False)])
    def test_a_session_that_must_not_listen_is_not_said_to_rest(self, speculation: SpeculationSettings) -> None:
        world = World()
        world.tell(start(ignore_eos=True, max_tokens=20, speculation=speculation))
        world.tell(SubscribeDraft(1, "a", 3))
        world.run_until_idle()
        assert not any(world.pauses["a"])

    def test_speculation_turned_off_verifies_nothing(self) -> None:
        world = self.hinted(SpeculationSettings(enabled=False))
        stats = world.ended["a"].stats
        assert (stats.num_draft_tokens, stats.num_spec_steps, stats.num_steps) == (0, 0, 12)
        assert world.last_step is not None
        assert all(not item.hints for item in world.last_step.items)

    def test_a_plain_session_verifies_nothing_and_tells_its_draft_worker_to_rest(self) -> None:
        """Whether speculation is enabled beside or not: nobody would ever look at the hints."""
        for is_enabled in (True, False):
            speculation = SpeculationSettings(is_enabled, is_plain=True)
            stats = self.hinted(speculation).ended["a"].stats
            assert (stats.num_draft_tokens, stats.num_spec_steps, stats.num_steps) == (0, 0, 12)
            world = World()
            world.tell(start(speculation=speculation))
            (told,) = world.tell(SubscribeDraft(1, "a", 3))
            assert isinstance(told, CommitPublished)
            assert not told.accepts_hints

    def test_a_requests_own_limit_is_kept(self) -> None:
        stats = self.hinted(SpeculationSettings(num_speculative_tokens=2)).ended["a"].stats
        assert len(stats.draft_length_histogram) == 3

    def test_a_request_cannot_ask_for_more_than_the_worker_permits(self) -> None:
        stats = self.hinted(SpeculationSettings(num_speculative_tokens=30)).ended["a"].stats
        assert len(stats.draft_length_histogram) <= LIMITS.num_speculative_tokens + 1

    def test_hints_that_come_before_their_session_are_used(self) -> None:
        world = World()
        text, _ = greedy_text([1, 2, 3], 30, frozenset())
        world.tell(SubscribeDraft(1, "a", 3))
        world.tell(HintsArrived("a", 1, 3, [Hint(i + 1, i, t) for i, t in enumerate(text[3:10])], world.now))
        world.tell(start(ignore_eos=True, max_tokens=7))
        world.run_until_idle()
        assert world.ended["a"].stats.num_accepted_draft_tokens >= 4

    def test_hints_turned_off_half_way_are_no_longer_verified(self) -> None:
        world = World()
        world.tell(start(ignore_eos=True, max_tokens=12))
        text, _ = greedy_text([1, 2, 3], 30, frozenset())
        world.tell(HintsArrived("a", 1, 3, [Hint(i + 1, i, t) for i, t in enumerate(text[3:15])], world.now))
        world.turn()
        world.tell(ChangeSpeculation("a", SpeculationSettings(enabled=False)))
        while world.turn() is not None:
            assert world.last_step is not None
            assert world.last_step.items[0].num_logits == 1
        world.check()


class TestWaiting:
    """The wait is bounded and measured, never fixed."""

    def waits(self, limits: SchedulerLimits, prepare: Callable[[World], None]) -> float:
        """Longest time spent waiting before one step."""
        world = World(limits)
        world.tell(start(ignore_eos=True, max_tokens=25))
        prepare(world)
        longest, since = 0.0, world.now
        while (decision := world.turn()) is not None:
            if isinstance(decision, WaitForHints):
                world.now = decision.until
                longest = max(longest, world.now - since)
            else:
                since = world.now
        world.check()
        return longest

    def test_nobody_listened_to_is_waited_for(self) -> None:
        assert self.waits(LIMITS, lambda world: None) == 0.0

    def test_a_subscriber_that_has_spoken_is_waited_for_within_the_bound(self) -> None:
        def join(world: World) -> None:
            world.hear(world.tell(SubscribeDraft(1, "a", 3)))
            world.hear(world.tell(HintsArrived("a", 1, 1, [Hint(1, 0, 0)], world.now)))

        waited = self.waits(LIMITS, join)
        assert 0.0 < waited <= LIMITS.hint_wait_ms_max / 1e3 + 1e-9

    def test_a_bound_of_zero_never_waits(self) -> None:
        limits = SchedulerLimits(
            may_pause=False, max_num_seqs=3, max_num_batched_tokens=12, max_model_len=40, hint_wait_ms_max=0.0
        )
        assert self.waits(limits, lambda world: world.hear(world.tell(SubscribeDraft(1, "a", 3)))) == 0.0

    def test_a_subscriber_that_has_said_nothing_yet_is_not_waited_for(self) -> None:
        assert self.waits(LIMITS, lambda world: world.hear(world.tell(SubscribeDraft(1, "a", 3)))) == 0.0

    def test_a_silent_subscriber_soon_costs_nothing(self) -> None:
        """The promise: never meaningfully slower than plain decoding. Total wait over a long text stays small."""
        limits = SchedulerLimits(max_model_len=600, max_num_batched_tokens=64, hint_wait_ms_max=10.0)
        world = World(limits, num_blocks=400)
        world.tell(start(ignore_eos=True, max_tokens=500))
        world.tell(SubscribeDraft(1, "a", 3))
        waited = 0.0
        while (decision := world.turn()) is not None:
            if isinstance(decision, WaitForHints):
                waited += decision.until - world.now
                world.now = decision.until
        assert waited < 0.1 * (500 * 0.002)

    def test_events_while_waiting_do_not_prolong_the_wait(self) -> None:
        world = World()
        world.tell(start(ignore_eos=True))
        world.tell(SubscribeDraft(1, "a", 3))
        world.tell(HintsArrived("a", 1, 1, [Hint(1, 0, 0)], world.now))
        while not isinstance(decision := world.turn(), WaitForHints):
            assert decision is not None
        began = world.now
        rng = random.Random(1)
        while isinstance(world.turn(), WaitForHints):  # `turn` checks the bound from the first one on
            world.tell(HintsArrived("a", 1, 1, [Hint(rng.randrange(9), rng.randrange(9), 0)], world.now))
            world.now += 0.0005
        assert world.now - began <= LIMITS.hint_wait_ms_max / 1e3 + 0.0005 + 0.002


class TestEarlyEvents:
    """I7: what draft workers say of unknown sessions is bounded."""

    def test_neither_sessions_nor_events_grow_without_end(self) -> None:
        world = World()
        for number in range(50):
            for _ in range(10):
                world.tell(HintsArrived(f"x{number}", 1, 1, [], 0.0))
        world.check()

    def test_a_closed_streams_early_subscription_is_forgotten(self) -> None:
        """Otherwise the session is waited for on behalf of a draft worker that has left."""
        world = World()
        world.tell(SubscribeDraft(1, "a", 3))
        world.tell(CloseStream(1))
        world.tell(start())
        assert world.scheduler._sessions["a"].subscribers == {}

    def test_an_early_unsubscription_is_heard(self) -> None:
        world = World()
        world.tell(SubscribeDraft(1, "a", 3))
        world.tell(UnsubscribeDraft(1, "a"))
        world.tell(start())
        assert world.scheduler._sessions["a"].subscribers == {}


def test_a_prompt_is_prefilled_while_others_decode_with_many_hints() -> None:
    """Hints must not use up the room of those that still wait for their first token."""
    limits = SchedulerLimits(
        may_pause=False,
        max_num_seqs=3,
        max_num_batched_tokens=6,
        max_model_len=300,
        num_speculative_tokens=8,
        hint_wait_ms_max=0.0,
    )
    world = World(limits, num_blocks=400)
    world.tell(start("a", ignore_eos=True, max_tokens=200))
    world.turn()
    text, _ = greedy_text([1, 2, 3], 300, frozenset())
    world.tell(HintsArrived("a", 1, 3, [Hint(i + 1, i, t) for i, t in enumerate(text[3:203])], world.now))
    world.tell(start("b", prompt=[2] * 20, ignore_eos=True, max_tokens=5))
    for _ in range(25):
        world.turn()
    assert "b" in world.ended
    world.run_until_idle()
    world.check()
