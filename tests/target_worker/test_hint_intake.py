"""Whether to listen is learned: the faster way wins, at a bounded price, whatever the hints say."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from outrider.hints.hint_intake import (
    MIN_WORTH,
    NUM_FIRST_STEPS,
    NUM_JUDGED_STEPS,
    NUM_PAUSED_STEPS,
    NUM_PAUSED_STEPS_MAX,
    IntakePolicy,
    IntakeShares,
    Regime,
    SessionIntake,
)
from outrider.hints.trials import (
    NUM_SETTLING_STEPS,
    NUM_STEADY_STEPS,
    NUM_STEADY_STEPS_MAX,
    NUM_TRIAL_STEPS,
    NUM_TRIAL_STEPS_MAX,
    TRIAL_SHARE,
)

NUM_SEEDS = 16
TRIAL_LEN = NUM_SETTLING_STEPS + NUM_TRIAL_STEPS
NOBODY, ALL = IntakeShares(0.0, 0.0), IntakeShares(1.0, 1.0)


@dataclass
class Truth:
    """A machine on which listening is `gain` times as fast as plain decoding; single steps scatter by `noise`."""

    gain: float
    noise: float
    seed: int

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def run(self, regime: Regime, num_steps: int) -> float:
        """Share of the steps done in the slower way."""
        num_wrong = 0
        for _ in range(num_steps):
            num_wrong += regime.accepts_hints != (self.gain > 1.0)
            speed = self.gain if regime.accepts_hints else 1.0
            scatter = self.rng.lognormvariate(-(self.noise**2) / 2, self.noise)
            regime.observe(speed * scatter, is_representative=True)
        return num_wrong / num_steps

    @property
    def is_worth_it(self) -> bool:
        return self.gain > 1.0


class TestRegime:
    @pytest.mark.parametrize("noise", [0.05, 0.3])
    @pytest.mark.parametrize("gain", [2.0, 1.2, 0.8, 0.5])
    def test_it_settles_on_the_faster_way(self, gain: float, noise: float) -> None:
        """All of 16 runs; a clear difference under steps that scatter by 30 %."""
        early, late = [], []
        for seed in range(NUM_SEEDS):
            truth, regime = Truth(gain, noise, seed), Regime()
            early.append(truth.run(regime, 5000))
            late.append(truth.run(regime, 5000))
            assert regime.accepts_by_default == truth.is_worth_it
        assert max(early) < 0.1
        assert sum(early) / NUM_SEEDS < 0.05
        assert max(late) < 0.01, "once settled, trials cost next to nothing"

    @pytest.mark.parametrize("gain", [1.1, 0.9])
    def test_a_small_difference_under_much_noise_is_mostly_found(self, gain: float) -> None:
        """Steps that scatter by 60 %, as those of one session do by the number of its tokens: 2 of 16 runs may err."""
        wrong, num_settled = [], 0
        for seed in range(NUM_SEEDS):
            truth, regime = Truth(gain, 0.6, seed), Regime()
            truth.run(regime, 5000)
            wrong.append(truth.run(regime, 5000))
            num_settled += regime.accepts_by_default == truth.is_worth_it
        assert num_settled >= NUM_SEEDS - 2
        assert sum(wrong) / NUM_SEEDS < 0.1  # of a difference of 10 %: less than 1 % of the speed

    @pytest.mark.parametrize("accepts_hints", [True, False])
    @pytest.mark.parametrize("gain", [1.5, 0.7])
    def test_it_does_not_matter_what_it_began_with(self, gain: float, accepts_hints: bool) -> None:
        truth, regime = Truth(gain, 0.1, 3), Regime(accepts_hints)
        assert truth.run(regime, 3000) < 0.08
        assert regime.accepts_by_default == truth.is_worth_it

    def test_trials_grow_rarer_and_never_stop(self) -> None:
        truth, regime = Truth(2.0, 0.05, 0), Regime()
        begins, was_in_trial = [], False
        for step in range(40_000):
            truth.run(regime, 1)
            if regime.in_trial and not was_in_trial:
                begins.append(step)
            was_in_trial = regime.in_trial
        gaps = [b - a for a, b in zip([0, *begins], begins, strict=False)]
        assert gaps[0] <= NUM_STEADY_STEPS
        assert gaps == sorted(gaps)
        assert gaps[-1] <= NUM_STEADY_STEPS_MAX + TRIAL_LEN
        assert len(begins) >= 40_000 // (NUM_STEADY_STEPS_MAX + TRIAL_LEN)

    @pytest.mark.parametrize(("before", "after"), [(2.0, 0.5), (0.5, 2.0), (1.3, 0.8), (0.8, 1.3)])
    def test_it_follows_a_change(self, before: float, after: float) -> None:
        for seed in range(5):
            regime = Regime()
            Truth(before, 0.1, seed).run(regime, 500)
            truth = Truth(after, 0.1, seed)
            truth.run(regime, 2500)
            assert regime.accepts_by_default == truth.is_worth_it
            assert truth.run(regime, 3000) < 0.1

    @pytest.mark.parametrize(("before", "after"), [(2.0, 0.5), (1.3, 0.8)])
    def test_it_follows_a_change_for_the_worse_at_the_next_trial_at_the_latest(
        self, before: float, after: float
    ) -> None:
        assert steps_to_follow(before, after) <= NUM_STEADY_STEPS_MAX + TRIAL_LEN

    @pytest.mark.parametrize(("before", "after"), [(0.5, 2.0), (0.8, 1.3), (0.5, 1.5)])
    def test_it_follows_a_change_for_the_better_at_the_next_trial(self, before: float, after: float) -> None:
        assert steps_to_follow(before, after) <= NUM_STEADY_STEPS_MAX + TRIAL_LEN

    def test_it_does_not_wait_for_the_next_trial_when_listening_turns_slower_than_plain(self) -> None:
        assert steps_to_follow(2.0, 0.5) <= 500

    def test_steps_in_which_too_few_listen_say_nothing_about_listening(self) -> None:
        regime = Regime()
        for _ in range(50):
            regime.observe(9.0, is_representative=False)
        assert regime.accepting.weight == 0.0
        assert regime.plain.weight == 0.0

    def test_a_trial_that_clearly_does_not_pay_is_cut_short(self) -> None:
        truth, regime = Truth(2.0, 0.05, 0), Regime()
        while not regime.in_trial:
            truth.run(regime, 1)
        truth.run(regime, NUM_TRIAL_STEPS // 2)
        assert (regime.in_trial, regime.accepts_hints) == (False, True)

    @pytest.mark.parametrize("gain", [3.0, 0.3])
    def test_trials_lose_a_hundredth_of_the_steps_and_a_trial_more(self, gain: float) -> None:
        truth, regime = Truth(gain, 0.3, 1), Regime()
        for num_steps in range(1, 20_001):
            truth.run(regime, 1)
            assert regime.num_lost <= TRIAL_SHARE * num_steps + TRIAL_LEN

    @pytest.mark.parametrize("accepts_hints", [True, False])
    def test_what_is_hardly_faster_is_left_alone(self, accepts_hints: bool) -> None:
        """Within what a trial can tell, decoding without hints has the benefit of the doubt."""
        truth, regime = Truth(1.01, 0.02, 2), Regime(accepts_hints)
        truth.run(regime, 3000)
        assert not regime.accepts_by_default

    def test_one_absurd_speed_changes_little(self) -> None:
        truth, regime = Truth(1.2, 0.05, 0), Regime()
        truth.run(regime, 90)
        before = regime.accepting.mean
        regime.observe(1e6, is_representative=True)
        assert regime.accepting.mean < 1.1 * before


def steps_to_follow(before: float, after: float) -> int:
    """Steps until a change is acted upon that comes after 20,000 steady steps, just after a trial; at most 20,000."""
    regime = Regime()
    settled = Truth(before, 0.1, 1)
    settled.run(regime, 20_000)
    while not regime.in_trial:
        settled.run(regime, 1)
    settled.run(regime, TRIAL_LEN)
    truth = Truth(after, 0.1, 2)
    for step in range(20_000):
        if regime.accepts_by_default == truth.is_worth_it:
            return step
        truth.run(regime, 1)
    return 20_000


def feed(policy: IntakePolicy, size: int, num_steps: int, gain: float) -> int:
    """Steps of `size` sessions, 10 ms and one token each when plain, `gain` times as fast otherwise: steps listened."""
    num_listened = 0
    for _ in range(num_steps):
        listens = policy.may_accept_hints(size)
        num_listened += listens
        policy.observe(
            size,
            size,
            size,
            0,
            10.0 / gain if listens else 10.0,
            ALL if listens else NOBODY,
        )
    return num_listened


class TestPolicy:
    @pytest.mark.parametrize("size", [1, 8, 32])
    def test_the_first_steps_are_plain(self, size: int) -> None:
        policy = IntakePolicy()
        assert policy.start(size).is_paused
        assert feed(policy, size, NUM_FIRST_STEPS, 5.0) == 0
        assert policy.may_accept_hints(size)
        assert not policy.start(size).is_paused

    def test_steps_without_any_draft_worker_count_among_the_first(self) -> None:
        policy = IntakePolicy()
        for _ in range(NUM_FIRST_STEPS):
            assert not policy.may_accept_hints(1)
            policy.observe(1, 1, 1, 0, 10.0, None)
        assert policy.may_accept_hints(1)

    @pytest.mark.parametrize("is_worth_it", [True, False])
    def test_a_new_size_begins_as_its_nearest(self, is_worth_it: bool) -> None:
        policy = IntakePolicy()
        feed(policy, 1, 400, 2.0)
        feed(policy, 16, 400, 2.0 if is_worth_it else 0.5)
        while policy.regime(16).in_trial:
            feed(policy, 16, 1, 2.0 if is_worth_it else 0.5)
        assert policy.may_accept_hints(32) == is_worth_it
        assert policy.may_accept_hints(8) == is_worth_it
        assert policy.may_accept_hints(2)

    def test_a_size_that_is_met_during_a_trial_begins_as_what_is_meant(self) -> None:
        policy = IntakePolicy()
        feed(policy, 4, 300, 2.0)
        while not policy.regime(4).in_trial:
            feed(policy, 4, 1, 2.0)
        assert not policy.may_accept_hints(4)
        assert policy.may_accept_hints(64)

    @pytest.mark.parametrize("gain", [1.15, 0.85])
    def test_contexts_that_grow_meanwhile_do_not_matter(self, gain: float) -> None:
        """Steps become ten times as long: what was seen of the other way a while ago was always faster, in tokens."""
        policy, rng = IntakePolicy(), random.Random(2)
        num_wrong = 0
        for step in range(4000):
            listens = policy.may_accept_hints(4)
            num_wrong += step > 1000 and listens != (gain > 1.0)
            context = 5 * (step % 1000)  # sessions end, and others begin
            whole_ms = (1.0 + context / 500) * rng.lognormvariate(0.0, 0.05)
            policy.observe(
                *(4, 4, 4, context),
                *(whole_ms / gain if listens else whole_ms, ALL if listens else NOBODY),
            )
        assert policy.regime(4).accepts_by_default == (gain > 1.0)
        assert num_wrong < 0.05 * 3000

    def test_sizes_learn_apart(self) -> None:
        policy = IntakePolicy()
        for _ in range(20):
            feed(policy, 1, 100, 2.0)
            feed(policy, 32, 100, 0.6)
        assert policy.regime(1).accepts_by_default
        assert not policy.regime(32).accepts_by_default

    @pytest.mark.parametrize("seed", range(3))
    def test_sizes_that_go_to_and_fro_over_a_border_settle_all_the_same(self, seed: int) -> None:
        """5 and 6 sessions have regimes of their own: what one learns the other one must not undo."""
        policy, rng = IntakePolicy(), random.Random(seed)
        assert policy.regime(5) is not policy.regime(6)
        sizes = [rng.choice([5, 6]) for _ in range(6000)]
        listened = [feed(policy, size, 1, 0.7) for size in sizes]
        assert sum(listened[:2000]) < 0.2 * 2000  # two sizes learn at their own expense
        assert sum(listened[2000:]) < 0.03 * 4000
        assert not policy.regime(5).accepts_by_default
        assert not policy.regime(6).accepts_by_default

    def test_sizes_that_alternate_keep_listening_where_only_lasting_listening_pays(self) -> None:
        """A draft worker that was told to pause has to catch up: steps right after a change gain nothing."""
        policy, rng = IntakePolicy(), random.Random(5)
        num_in_a_row, num_listened = 0, 0
        for _ in range(8000):
            size = rng.choice([5, 6])
            listens = policy.may_accept_hints(size)
            num_in_a_row = num_in_a_row + 1 if listens else 0
            num_listened += listens
            policy.observe(
                *(size, size, size, 0),
                *(5.0 if num_in_a_row > 3 else 11.0 if listens else 10.0, ALL if listens else NOBODY),
            )
        assert num_listened > 0.9 * 8000

    def catching_up(self, num_steps: int, num_silent: int, gain: float) -> list[bool]:
        """Drafts that say nothing for `num_silent` steps after they were woken, while what they do slows steps down."""
        policy, num_in_a_row, listened = IntakePolicy(), 0, []
        for _ in range(num_steps):
            listens = policy.may_accept_hints(32)
            num_in_a_row = num_in_a_row + 1 if listens else 0
            listened.append(listens)
            is_heard = num_in_a_row > num_silent
            whole_ms = 10.0 / gain if is_heard else 12.0 if listens else 10.0
            policy.observe(32, 32, 32, 0, whole_ms, IntakeShares(float(listens), float(is_heard)))
        return listened

    def test_drafts_that_take_long_to_catch_up_are_judged_by_what_they_say_then(self) -> None:
        listened = self.catching_up(6000, num_silent=25, gain=1.2)
        assert sum(listened[3000:]) > 0.9 * 3000

    def test_drafts_that_fall_silent_are_found_out(self) -> None:
        """However good they were: what is not heard of any more is not believed in for ever."""
        policy = accepting_policy()
        num_listened = 0
        for step in range(12_000):
            listens = policy.may_accept_hints(4)
            num_listened += listens and step >= 6000
            policy.observe(4, 4, 4, 0, 12.0 if listens else 10.0, IntakeShares(float(listens), 0.0))
        assert num_listened < 0.1 * 6000

    def test_a_trial_in_which_nobody_says_anything_ends(self) -> None:
        listened = self.catching_up(6000, num_silent=10_000, gain=1.2)
        assert sum(listened[1000:]) < 0.1 * 5000
        longest = max(len(run) for run in "".join("x" if each else " " for each in listened[1000:]).split())
        assert longest <= NUM_TRIAL_STEPS_MAX


def judged(policy: IntakePolicy, own: SessionIntake, worth: float, num_steps: int, size: int = 4) -> int:
    """Steps of one session among others that gain; how many of them it listened."""
    num_listened = 0
    for _ in range(num_steps):
        if not own.is_paused:
            num_listened += 1
            policy.judge(own, worth)
        listens = policy.may_accept_hints(size)
        policy.observe(size, size, size, 0, 5.0 if listens else 10.0, ALL if listens else NOBODY)
        own.update(may_accept_hints=policy.may_accept_hints(size))
    return num_listened


def accepting_policy(size: int = 4) -> IntakePolicy:
    """One that has found that listening is twice as fast."""
    policy = IntakePolicy()
    feed(policy, size, 5000, 2.0)
    while not policy.may_accept_hints(size):
        feed(policy, size, 1, 2.0)
    return policy


class TestOwnRests:
    def test_a_session_whose_hints_never_hold_rests_while_others_listen(self) -> None:
        policy = accepting_policy()
        own, other = policy.start(4), policy.start(4)
        for _ in range(NUM_JUDGED_STEPS):
            assert not own.is_paused
            policy.judge(own, -0.3)
            policy.judge(other, 2.0)
            for each in (own, other):
                each.update(may_accept_hints=policy.may_accept_hints(4))
        assert own.is_paused
        assert not other.is_paused
        assert policy.may_accept_hints(4)

    def test_it_wakes_again_ever_later_while_nothing_changes(self) -> None:
        policy = accepting_policy()
        own = policy.start(4)
        pauses, num_paused = [], 0
        for _ in range(7000):
            was_paused = own.is_paused
            judged(policy, own, -0.3, 1)
            if not policy.may_accept_hints(4):
                continue
            if own.is_paused:
                num_paused += 1
            elif was_paused and num_paused:
                pauses.append(num_paused)
                num_paused = 0
        assert pauses[0] == pytest.approx(NUM_PAUSED_STEPS, abs=2)
        assert pauses[:3] == sorted(pauses[:3])
        assert max(pauses) <= NUM_PAUSED_STEPS_MAX + TRIAL_LEN

    def test_its_share_of_listening_is_bounded(self) -> None:
        policy = accepting_policy()
        own = policy.start(4)
        assert judged(policy, own, -0.3, 5000) < 0.06 * 5000

    def test_it_listens_again_for_good_once_its_hints_hold(self) -> None:
        policy = accepting_policy()
        own = policy.start(4)
        judged(policy, own, -0.3, 300)
        judged(policy, own, 2.0, NUM_PAUSED_STEPS_MAX)
        assert judged(policy, own, 2.0, 1000) > 0.9 * 1000

    def test_a_session_that_gains_enough_never_rests_by_itself(self) -> None:
        policy = accepting_policy()
        own = policy.start(4)
        for _ in range(2000):
            policy.judge(own, MIN_WORTH + 0.01)
            assert not own.update(may_accept_hints=True)

    def test_who_turns_is_told_apart_from_who_stays(self) -> None:
        policy = IntakePolicy()
        candidates = [policy.start(1) for _ in range(3)]

        def turns() -> set[bool]:
            return {own.update(may_accept_hints=policy.may_accept_hints(1)) for own in candidates}

        for _ in range(NUM_FIRST_STEPS):
            assert turns() == {False}
            policy.observe(1, 1, 1, 0, 10.0, NOBODY)
        assert turns() == {True}
        assert turns() == {False}
