"""KV on demand: who gets a place, who gives way, and that nobody notices but by the time it takes."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from outrider.errors import DeadlineExceeded
from outrider.hints.hint_tree import Hint
from outrider.sampling_params import SpeculationSettings
from target_worker.messages import (
    HintsArrived,
    SessionRefused,
    Step,
    SubscribeDraft,
    WaitForHints,
)
from target_worker.scheduling.batch_slots import BatchSlots
from target_worker.scheduling.session import Session
from tests.target_worker.fakes import VOCAB_SIZE, greedy_text, start
from tests.target_worker.test_prefix_sharing import LONG, PREFIXES
from tests.target_worker.test_prefix_sharing import World as SharingWorld
from tests.target_worker.test_scheduler import LIMITS, NAMES, RandomLife

JUST_ENOUGH = 1 + LIMITS.max_model_len // 4  # blocks, for one session of the longest
SCARCE = replace(LIMITS, growth_tokens=0, max_num_waiting=5)


class World(SharingWorld):
    """Looks at every choice of who runs and who gives way."""

    def turn(self) -> Step | WaitForHints | None:
        slots = self.scheduler._slots
        before = dict(slots.running)
        num_preemptions = slots.num_preemptions
        decision = super().turn()
        if isinstance(decision, WaitForHints):
            return decision
        victims = [each for each in slots.waiting if each.session_id in before]
        assert slots.num_preemptions - num_preemptions >= len(victims)
        came = [each for each in slots.running.values() if each.session_id not in before]
        fed = {item.session_id for item in decision.items} if decision is not None else set[str]()
        stayed = [each for each in before.values() if each not in victims]
        assert all(victim.rank > each.rank for victim in victims for each in stayed), "not the last gave way"
        assert not before or not victims or stayed, "the only one gave way"
        if not self.limits.enable_prefix_caching:  # else one may let others pass for the sake of what it shares
            assert all(each.rank < other.rank for each in came for other in slots.waiting)
        if before and not came:
            first = min(before.values(), key=lambda each: each.rank)
            assert first.session_id in fed, "the first does not get on"
        assert [*slots.waiting] == sorted(slots.waiting, key=lambda each: each.rank)
        return decision

    def check(self) -> None:
        super().check()
        for session in self.scheduler._slots.waiting:
            assert not session.kv.block_ids, "one that waits holds blocks"


class RandomLifeWithLittleKV(RandomLife):
    """Arrivals, priorities, lengths, cancellations, hints, deadlines; KV for one session of the longest."""

    world: World

    @initialize(
        growth_tokens=st.sampled_from([0, 0, 4, 32]),
        shares=st.booleans(),
        num_more=st.sampled_from([0, 3, 8]),
    )
    def choose(self, growth_tokens: int, shares: bool, num_more: int) -> None:
        limits = replace(LIMITS, growth_tokens=growth_tokens, enable_prefix_caching=shares)
        self.world = World(limits, JUST_ENOUGH + num_more)

    @rule(
        name=NAMES,
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 25),
        max_tokens=st.sampled_from([5, 12, 30]),
        priority=st.integers(-1, 1),
        left_ms=st.sampled_from([None, None, None, 1, 20, 200]),
    )
    def start_with_rank(
        self, name: str, prefix: list[int], length: int, max_tokens: int, priority: int, left_ms: int | None
    ) -> None:
        world = self.world
        if name in world.scheduler._sessions:
            return
        for key in [key for key in world.views if key[1] == name]:
            del world.views[key]
        event = start(name, prefix[:length], max_tokens=max_tokens, ignore_eos=True)
        if left_ms is not None:
            event = replace(event, deadline_at=world.now + left_ms / 1e3)
        world.aborted.pop(name, None)
        world.tell(replace(event, priority=priority))

    @rule(count=st.integers(1, 8))
    def many_turns(self, count: int) -> None:
        self.world.turns(count)

    def teardown(self) -> None:
        held = dict(self.world.scheduler._sessions)
        super().teardown()
        assert set(held) <= set(self.world.ended) | set(self.world.aborted)


TestRandomLifeWithLittleKV = RandomLifeWithLittleKV.TestCase
TestRandomLifeWithLittleKV.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


def crowd(num_sessions: int = 3, *, num_blocks: int = JUST_ENOUGH, **limits: object) -> World:
    """Sessions s0, s1 and so on whose texts together need more than there is."""
    world = World(replace(SCARCE, max_num_seqs=num_sessions, **limits), num_blocks)  # type: ignore[arg-type]
    for number in range(num_sessions):
        world.start(f"s{number}", [number % 4, 1, number // 4], max_tokens=30)
    return world


class TestWhoGivesWay:
    def test_texts_are_right_and_everything_is_given_back(self) -> None:
        world = crowd()
        world.finish()
        assert world.scheduler.num_preemptions > 0
        assert sum(ended.num_preemptions for ended in world.ended.values()) == world.scheduler.num_preemptions
        assert set(world.ended) == {"s0", "s1", "s2"}

    def test_the_oldest_never_does_and_they_end_in_the_order_they_came(self) -> None:
        """No livelock: somebody is always the oldest."""
        world = crowd(6, max_num_batched_tokens=24, max_num_waiting=6)
        world.finish()
        assert world.ended["s0"].num_preemptions == 0
        assert list(world.ended) == [f"s{number}" for number in range(6)]
        assert world.ended["s5"].num_preemptions > 0

    def test_the_lowest_priority_gives_way_first_though_it_is_the_oldest(self) -> None:
        world = World(SCARCE, JUST_ENOUGH)
        for name, priority in (("late", 1), ("usual", 0), ("soon", -1)):
            world.tell(replace(start(name, [len(name) % 4, 1], max_tokens=30, ignore_eos=True), priority=priority))
        world.finish()
        assert list(world.ended) == ["soon", "usual", "late"]
        assert world.ended["soon"].num_preemptions == 0
        assert world.ended["late"].num_preemptions > 0

    def test_the_waiting_order_is_by_priority_and_then_by_arrival(self) -> None:
        world = World(replace(SCARCE, max_num_seqs=1), 97)
        for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -5), ("e", 5)):
            world.tell(replace(start(name, max_tokens=2, ignore_eos=True), priority=priority))
        world.finish()
        assert list(world.ended) == ["d", "a", "c", "b", "e"]

    def test_a_newcomer_of_better_priority_puts_nobody_out_of_a_full_queue(self) -> None:
        world = World(SCARCE, 97)
        for number in range(SCARCE.max_num_waiting):
            world.start(f"s{number}", [1, 2], max_tokens=2)
        (answer,) = world.tell(replace(start("vip"), priority=-100))
        assert isinstance(answer, SessionRefused)
        world.finish()
        assert len(world.ended) == SCARCE.max_num_waiting

    def test_hints_go_before_anybody_does(self) -> None:
        """Two sessions fit exactly as long as no hint is fed."""
        world = World(replace(SCARCE, max_num_seqs=2), 1 + 2 * 2)
        texts = {name: greedy_text([number, 1], 40, frozenset())[0] for number, name in enumerate("ab")}
        for number, name in enumerate("ab"):
            world.start(name, [number, 1], max_tokens=7)
        while world.scheduler._sessions:
            for name in "ab":
                length = len(world.texts[name])
                hints = [Hint(10 * length + i + 1, 10 * length + i if i else 0, token_id)
                         for i, token_id in enumerate(texts[name][length : length + 4])]  # fmt: skip
                world.tell(HintsArrived(name, 1, length, hints, world.now))
            world.turns(1)
        assert world.scheduler.num_preemptions == 0
        assert sum(ended.stats.num_draft_tokens for ended in world.ended.values()) > 0
        world.check_is_empty()

    def test_a_prompt_that_is_being_computed_gives_way_too(self) -> None:
        world = World(replace(SCARCE, max_num_batched_tokens=5), 1 + 4 + 7)
        world.start("a", [1], max_tokens=39)
        while len(world.texts["a"]) < 16:
            world.turns(1)
        world.start("b", LONG, max_tokens=10)  # seven blocks, which are there when it comes
        world.turns(2)
        assert world.running == {"a", "b"}
        world.finish()
        assert world.ended["a"].num_preemptions == 0
        assert world.ended["b"].num_preemptions > 0

    def test_shared_blocks_stay_with_those_that_run(self) -> None:
        world = World(SCARCE, JUST_ENOUGH)
        for name in "abc":
            world.start(name, LONG[:17], max_tokens=20)
        world.finish()
        assert world.scheduler.num_preemptions > 0
        assert len({tuple(world.texts[name]) for name in "abc"}) == 1

    def test_a_draft_worker_stays_and_its_hints_go_on_to_count(self) -> None:
        world = crowd()
        for number in range(3):
            world.tell(SubscribeDraft(1, f"s{number}", 3))
        while not world.scheduler.num_preemptions:
            world.turns(1)
        (session,) = [each for each in world.scheduler._slots.waiting if each.num_preemptions]
        assert session.subscribers
        assert (1, session.session_id) not in world.finished_views
        text, length = world.expected(session.session_id)[0], session.committed_len
        hints = [Hint(1000 + i, 999 + i if i else 0, t) for i, t in enumerate(text[length : length + 3])]
        num_before = session.stats.num_accepted_draft_tokens
        world.tell(HintsArrived(session.session_id, 1, length, hints, world.now))
        world.finish()
        assert session.stats.num_accepted_draft_tokens > num_before
        assert world.views[1, session.session_id] == text

    def test_what_it_computes_anew_is_no_cached_prompt(self) -> None:
        world = crowd()
        world.finish()
        assert all(ended.num_cached_tokens == 0 for ended in world.ended.values())

    def test_kv_usage_is_what_is_used(self) -> None:
        world = World(LIMITS, 1 + 20)
        assert world.scheduler.kv_usage == 0.0
        world.start("a", LONG[:8], max_tokens=32)
        world.turns(1)
        assert world.scheduler.kv_usage == pytest.approx(2 / 20)
        world.finish()

    def test_long_limits_no_longer_keep_others_out(self) -> None:
        """Five sessions that generate few tokens, although their limits would take all the room there is."""
        limits = replace(LIMITS, max_num_seqs=8, max_num_waiting=8, growth_tokens=4, max_num_batched_tokens=32)
        world = World(limits, 1 + 24)
        stop = {number: greedy_text([number % 4, number], 9, frozenset())[0][6] for number in range(5)}
        for number in range(5):
            world.start(f"s{number}", [number % 4, number], max_tokens=38, stop_token_ids=frozenset({stop[number]}))
        world.turns(1)
        assert world.scheduler.num_waiting == 0
        world.finish()


class TestPlantedBugs:
    """The checks above find planted bugs in preemption."""

    def test_one_that_keeps_its_blocks_is_found(self) -> None:
        def keep(self: Session) -> None:
            self.num_preemptions += 1

        with patch.object(Session, "preempt", keep), pytest.raises(AssertionError):
            crowd().finish()

    def test_one_that_forgets_what_it_said_is_found(self) -> None:
        def forget(self: Session) -> None:
            PREEMPT(self)
            del self.token_ids[self.num_prompt_tokens :]

        with patch.object(Session, "preempt", forget), pytest.raises(AssertionError):
            crowd().finish()

    def test_the_oldest_giving_way_is_found(self) -> None:
        def make_room(self: BatchSlots, running: list[Session]) -> object:
            return BY_RANK(self, running[::-1])

        with patch.object(BatchSlots, "_make_room_by_rank", make_room), pytest.raises(AssertionError):
            crowd().finish()


PREEMPT, BY_RANK = Session.preempt, BatchSlots._make_room_by_rank


class TestDeadlines:
    def started(self, left_s: float, **options: object) -> tuple[World, list[object]]:
        """A world that knows that steps take 20 ms, and what it answers to one with so much time."""
        world = World(replace(LIMITS, max_num_seqs=1, num_local_tokens=0), 97)
        for num_tokens in (1, 2, 5) * 20:
            world.scheduler.cost.observe(num_tokens, 20.0)
        event = start("a", max_tokens=20, **options)  # type: ignore[arg-type]
        return world, list(world.tell(replace(event, deadline_at=world.now + left_s)))

    @pytest.mark.parametrize(
        ("left_s", "options", "is_refused"),
        [
            (-0.001, {}, True),
            (0.005, {}, True),  # half a step
            (0.015, {}, False),  # its end may come with the first token
            (0.015, {"min_tokens": 11}, True),  # three steps of five tokens
            (0.035, {"min_tokens": 11}, False),
            (0.035, {"ignore_eos": True}, True),  # four steps
            (0.045, {"ignore_eos": True}, False),
            (0.045, {"ignore_eos": True, "speculation": SpeculationSettings(is_plain=True)}, True),
            (0.205, {"ignore_eos": True, "speculation": SpeculationSettings(is_plain=True)}, False),
        ],
    )
    def test_only_what_cannot_be_in_time_is_refused(
        self, left_s: float, options: dict[str, object], is_refused: bool
    ) -> None:
        world, answers = self.started(left_s, **options)
        assert isinstance(answers[0], SessionRefused) == is_refused
        if is_refused:
            assert isinstance(answers[0], SessionRefused)
            assert isinstance(answers[0].error, DeadlineExceeded)
            world.check_is_empty()

    def test_while_nothing_has_been_measured_nobody_is_sent_away(self) -> None:
        world = World()
        event = replace(start("a", max_tokens=30, ignore_eos=True), deadline_at=world.now + 1e-6)
        assert not isinstance(world.tell(event)[0], SessionRefused)

    def test_a_session_that_runs_is_ended_when_its_time_is_up_and_frees_all(self) -> None:
        world = World()
        world.tell(replace(start("a", max_tokens=37, ignore_eos=True), deadline_at=world.now + 0.02))
        world.tell(SubscribeDraft(1, "a", 3))
        world.start("b", OTHER_PROMPT, max_tokens=37)
        for _ in range(40):
            world.turn()
        assert isinstance(world.aborted["a"], DeadlineExceeded)
        assert "a" not in world.ended
        assert world.finished_views == {(1, "a")}, "its draft worker is told"
        world.run_until_idle()
        world.check_is_empty()
        assert "b" in world.ended

    def test_one_that_waits_is_sent_away_as_soon_as_it_cannot_be_in_time(self) -> None:
        limits = replace(LIMITS, max_num_seqs=1, max_num_waiting=9, max_model_len=100)
        world = World(limits, 97)
        for number in range(4):  # so that it is known how long a place is kept
            world.start(f"before{number}", [number, 1], max_tokens=50)
            world.finish()
        stay_s = world.scheduler._forecast._turnover.stay_s()
        assert stay_s > 0.05
        world.start("runs", [1], max_tokens=50)
        world.turn()
        for number in range(4):
            world.start(f"waits{number}", [number, 2], max_tokens=50)
        late, early = world.now + stay_s, world.now + 20 * stay_s
        (refused,) = world.tell(replace(start("late", max_tokens=1), deadline_at=late))
        assert isinstance(refused, SessionRefused)
        (admitted,) = world.tell(replace(start("early", max_tokens=1), deadline_at=early))
        assert not isinstance(admitted, SessionRefused)
        world.finish()
        assert "early" in world.ended

    def test_one_that_has_begun_is_left_alone_until_its_time_is_up(self) -> None:
        world, answers = self.started(0.05, ignore_eos=True)
        assert not isinstance(answers[0], SessionRefused)
        world.turn()
        world.now += 0.02
        world.turn()
        assert not world.aborted

    def test_one_that_has_begun_elsewhere_is_as_well(self) -> None:
        _, refused = self.started(0.015, ignore_eos=True)
        assert isinstance(refused[0], SessionRefused)
        world, answers = self.started(0.015, ignore_eos=True, num_given=1)
        assert not isinstance(answers[0], SessionRefused)
        world.now += 0.02
        world.turn()
        assert isinstance(world.aborted["a"], DeadlineExceeded), "not longer than until then"


OTHER_PROMPT = [2, 2, 1, VOCAB_SIZE - 1]


class TestPredictedWait:
    def test_there_is_none_while_there_is_room(self) -> None:
        world = World()
        assert world.scheduler.wait_ms == 0
        world.start("a", [1, 2], max_tokens=20)
        world.turn()
        assert world.scheduler.wait_ms == 0

    def test_it_is_the_time_that_places_are_kept_for_each_that_is_before(self) -> None:
        world = World(replace(LIMITS, max_num_seqs=1, max_num_waiting=9), 97)
        for number in range(6):
            world.start(f"before{number}", [number % 4, 1], max_tokens=20)
            world.finish()
        stay_ms = 1e3 * world.scheduler._forecast._turnover.stay_s()
        world.start("runs", [1], max_tokens=20)
        world.turn()
        assert world.scheduler.wait_ms == pytest.approx(stay_ms, abs=1)
        world.start("waits", [2], max_tokens=20)
        assert world.scheduler.wait_ms == pytest.approx(2 * stay_ms, abs=1)
        world.finish()
        assert world.scheduler.wait_ms == 0

    def test_kv_that_is_used_up_counts_as_no_room(self) -> None:
        world = World(replace(SCARCE, growth_tokens=4), JUST_ENOUGH)
        world.start("a", LONG, max_tokens=15)
        while len(world.texts["a"]) < 33:
            world.turns(1)
        assert world.scheduler.num_running == 1
        assert world.scheduler.wait_ms > 0, "told by the length of its text, before anybody has ended"

    def test_those_that_come_at_once_to_an_idle_worker_wait_for_nobody(self) -> None:
        world = World(replace(LIMITS, max_num_waiting=9), 97)
        for number in range(LIMITS.max_num_seqs - 1):
            world.start(f"s{number}", [number], max_tokens=9)
        assert world.scheduler.wait_ms == 0

    def test_a_refusal_says_when_to_come_back_within_bounds(self) -> None:
        world = World(replace(LIMITS, max_num_seqs=1, max_num_waiting=1), 97)
        for stay_s, told_s in ((0.001, 0.5), (4.0, 8.0), (1000.0, 30.0)):
            turnover = world.scheduler._forecast._turnover
            turnover.stays.total, turnover.stays.weight = stay_s, 1.0
            world.start("runs", [1], max_tokens=3)
            world.turn()
            world.start("waits", [2], max_tokens=3)
            (answer,) = world.tell(start("late"))
            assert isinstance(answer, SessionRefused)
            assert answer.error.retry_after_s == pytest.approx(told_s)  # type: ignore[attr-defined]
            world.finish()
