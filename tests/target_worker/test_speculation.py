"""How many hints to verify and how long to wait for them: best in expectation, bounded, blind to tokens (I4)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.hints.acceptance import NUM_POSITIONS, AcceptanceHistory, BlockAcceptance
from outrider.hints.speculation import (
    LATE_FACTOR_MAX,
    NUM_REMEMBERED,
    OPTIMISM,
    HintTiming,
    allot,
    best_wait,
)
from outrider.hints.step_cost import StepCost, StepLine

RATES = st.floats(0.01, 0.99)


def learned(fixed_ms: float, token_ms: float, num_steps: int = 60) -> StepCost:
    cost, rng = StepCost(), random.Random(0)
    for _ in range(num_steps):
        num_tokens = rng.randint(1, 40)
        cost.observe(num_tokens, fixed_ms + token_ms * num_tokens)
    return cost


def tokens_per_ms(rates: Sequence[float], counts: Sequence[int], cost: StepLine) -> float:
    tokens = sum(sum(rate**i for i in range(count + 1)) for rate, count in zip(rates, counts, strict=True))
    return tokens / cost.step_ms(len(counts) + sum(counts))


class TestStepCost:
    @pytest.mark.parametrize(("fixed_ms", "token_ms"), [(20.0, 0.4), (3.0, 0.1), (1.0, 0.9), (80.0, 1.0)])
    def test_a_line_is_recovered(self, fixed_ms: float, token_ms: float) -> None:
        assert learned(fixed_ms, token_ms).line() == pytest.approx((fixed_ms, token_ms, 0.0), rel=0.03)

    def test_a_change_is_followed(self) -> None:
        cost = learned(20.0, 0.4)
        for i in range(800):
            cost.observe(1 + i % 30, 5.0 + 0.2 * (1 + i % 30))
        assert cost.line() == pytest.approx((5.0, 0.2, 0.0), rel=0.05)

    def test_causes_are_told_apart(self) -> None:
        cost, rng = StepCost(), random.Random(1)
        for _ in range(300):
            num_tokens, num_context = rng.randint(1, 60), rng.randint(0, 9000)
            cost.observe(num_tokens, 8.0 + 0.1 * num_tokens + 0.5 * num_context / 1e3, num_context)
        assert cost.line(0) == pytest.approx((8.0, 0.1, 0.0), rel=0.05)
        assert cost.line(6000).fixed_ms == pytest.approx(8.0 + 3.0, rel=0.05)

    def test_what_branches_read_again_has_a_price_of_its_own(self) -> None:
        cost, rng = StepCost(), random.Random(2)
        for _ in range(300):
            num_context, num_on_path, num_branches = rng.randint(100, 9000), rng.randint(1, 5), rng.randint(0, 4)
            num_tokens, num_reread = num_on_path + num_branches, num_branches * num_context
            step_ms = 2.0 + 0.1 * num_tokens + 0.6 * num_context / 1e3 + 0.12 * num_reread / 1e3
            cost.observe(num_tokens, step_ms, num_context, num_reread)
        assert cost.line() == pytest.approx((2.0, 0.1, 0.12), rel=0.05)
        assert cost.line().branch_ms(8000) == pytest.approx(0.1 + 0.96, rel=0.05)

    def test_a_step_that_was_held_up_changes_little(self) -> None:
        cost = learned(20.0, 0.4)
        cost.observe(10, 5000.0)
        assert cost.line().step_ms(10) < 1.15 * 24.0

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.integers(1, 600), st.floats(0.01, 1e4)), max_size=40))
    def test_both_parts_stay_positive_whatever_is_measured(self, steps: list[tuple[int, float]]) -> None:
        cost = StepCost()
        for num_tokens, step_ms in steps:
            cost.observe(num_tokens, step_ms)
        line = cost.line()
        assert line.fixed_ms > 0
        assert line.token_ms > 0


def gains(rates: list[float], available: list[int]) -> list[list[float]]:
    """Probabilities that a session's first i hints are accepted, each independently at its session's rate."""
    return [[rate**i for i in range(1, most + 1)] for rate, most in zip(rates, available, strict=True)]


class TestAllot:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        sessions=st.lists(st.tuples(RATES, st.integers(0, 4)), min_size=1, max_size=3),
        fixed_ms=st.floats(0.5, 50),
        share=st.floats(0.005, 1.0),
        budget=st.integers(0, 12),
    )
    def test_no_other_allotment_is_better(
        self, sessions: list[tuple[float, int]], fixed_ms: float, share: float, budget: int
    ) -> None:
        rates, available = [rate for rate, _ in sessions], [n for _, n in sessions]
        cost = StepLine(fixed_ms, fixed_ms * share)
        counts = allot(gains(rates, available), cost, budget)
        assert all(0 <= count <= most for count, most in zip(counts, available, strict=True))
        assert sum(counts) <= budget
        best = max(
            tokens_per_ms(rates, others, cost)
            for others in itertools.product(*(range(n + 1) for n in available))
            if sum(others) <= budget
        )
        assert tokens_per_ms(rates, counts, cost) == pytest.approx(best, rel=1e-9)

    def test_zero_is_a_valid_answer(self) -> None:
        assert allot(gains([0.1, 0.05], [5, 5]), StepLine(1.0, 0.9), 20) == [0, 0]

    def test_nothing_to_allot(self) -> None:
        assert allot([], StepCost().line(), 0) == []
        assert allot(gains([0.9], [0]), StepCost().line(), 5) == [0]
        assert allot(gains([0.9], [5]), StepCost().line(), 0) == [0]

    def test_an_idle_machine_verifies_what_there_is(self) -> None:
        assert allot(gains([0.9, 0.9], [4, 2]), StepLine(50.0, 0.01), 100) == [4, 2]

    def test_certain_hints_come_first_and_in_their_order(self) -> None:
        assert allot([[1.0, 1.0, 1.0, 0.2], [0.9, 0.8]], StepLine(50.0, 0.01), 3) == [3, 0]


class TestAcceptanceHistory:
    def test_it_settles_at_the_share_of_tried_hints(self) -> None:
        history = AcceptanceHistory()
        for _ in range(300):
            history.observe(2, 5)  # two held, the third did not
        assert history.rate == pytest.approx(2 / 3, rel=0.02)

    def test_hints_behind_a_rejection_count_as_untried(self) -> None:
        few, many = AcceptanceHistory(), AcceptanceHistory()
        few.observe(1, 2)
        many.observe(1, 30)
        assert few.rate == many.rate

    @settings(max_examples=100, derandomize=True)
    @given(st.lists(st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=200))
    def test_a_rate_is_a_chance_below_1(self, steps: list[tuple[int, int]]) -> None:
        history = AcceptanceHistory()
        for num_accepted, num_verified in steps:
            history.observe(num_accepted, num_verified)
        assert 0.0 <= history.rate <= 0.99


class TestBlockAcceptance:
    def test_positions_are_told_apart(self) -> None:
        """The first hint holds every time, the second every other time, the third never."""
        block = BlockAcceptance()
        for step in range(400):
            block.observe(1 + step % 2, 3)
        assert block.chances(3) == pytest.approx([0.95, 0.53, 0.1], abs=0.06)

    def test_a_session_of_which_little_is_known_goes_by_its_rate_over_all_positions(self) -> None:
        assert BlockAcceptance().chances(12) == pytest.approx([0.7] * 12)

    def test_one_rate_at_all_positions_gives_that_rate(self) -> None:
        rng, block = random.Random(1), BlockAcceptance()
        for _ in range(2000):
            held = next((i for i in range(5) if rng.random() > 0.8), 5)
            block.observe(held, 5)
        # Forty or so blocks are remembered: three standard errors at the first position, more behind.
        assert block.chances(5) == pytest.approx([0.8] * 5, abs=0.2)

    @settings(max_examples=100, derandomize=True)
    @given(
        steps=st.lists(st.integers(1, 20).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=100),
        num_hints=st.integers(0, 3 * NUM_POSITIONS),
    )
    def test_chances_are_chances_for_any_length(self, steps: list[tuple[int, int]], num_hints: int) -> None:
        block = BlockAcceptance()
        for num_accepted, num_verified in steps:
            block.observe(num_accepted, num_verified)
        chances = block.chances(num_hints)
        assert len(chances) == num_hints
        assert all(0.0 <= chance <= 0.99 for chance in chances)


def timing(path_len: int, now: float, *, first_s: float = 0.004, gap_s: float = 0.002) -> HintTiming:
    made = HintTiming(first_s=first_s, gap_s=gap_s)
    made.on_commit(now, path_len, committed_len=10)
    return made


SESSIONS = st.lists(
    st.tuples(st.integers(0, 9), RATES, st.integers(0, 8), st.floats(1e-5, 0.05), st.floats(1e-5, 0.05)), max_size=4
)
"""Hints that are there, acceptance, most hints, seconds to the first one and between two, for each session."""


class TestBestWait:
    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        sessions=SESSIONS,
        elapsed=st.floats(0, 0.05),
        longest_s=st.floats(0, 0.02),
    )
    def test_it_never_exceeds_the_bound(
        self, sessions: list[tuple[int, float, int, float, float]], elapsed: float, longest_s: float
    ) -> None:
        timings = [timing(n, 50.0, first_s=first, gap_s=gap) for n, _, _, first, gap in sessions]
        wait = best_wait(
            timings,
            [[s[1]] * s[2] for s in sessions],
            [s[2] for s in sessions],
            StepCost().line(),
            50.0 + elapsed,
            longest_s,
        )
        assert 0.0 <= wait <= longest_s

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        sessions=SESSIONS,
        num_others=st.integers(0, 3),
        usual_rate=st.floats(0.0, 2.0),
    )
    def test_no_other_wait_yields_more(
        self, sessions: list[tuple[int, float, int, float, float]], num_others: int, usual_rate: float
    ) -> None:
        """Tokens of the step, less what its whole time usually yields, for each moment at which a hint may come."""
        timings = [timing(n, 50.0, first_s=first, gap_s=gap) for n, _, _, first, gap in sessions]
        rates, limits = [rate for _, rate, *_ in sessions], [limit for _, _, limit, *_ in sessions]
        cost, now = StepLine(12.0, 0.5), 50.001
        rate = max(usual_rate, (len(timings) + num_others) / cost.step_ms(len(timings) + num_others))

        def yielded(until: float) -> float:
            tokens, num_fed = float(num_others), num_others
            for each, own, limit in zip(timings, rates, limits, strict=True):
                num_there = sum(n <= each.path_len or each.arrival(n, now) <= until for n in range(1, limit + 1))
                tokens += sum(own**n for n in range(num_there + 1))
                num_fed += num_there + 1
            return tokens - rate * ((until - now) * 1e3 + cost.step_ms(num_fed))

        chances = [[own] * limit for own, limit in zip(rates, limits, strict=True)]
        found = best_wait(timings, chances, limits, cost, now, 0.01, num_others=num_others, usual_rate=usual_rate)
        moments = [
            each.arrival(n, now) for each, limit in zip(timings, limits, strict=True) for n in range(1, limit + 1)
        ]
        best = max(yielded(until) for until in [now, *(at for at in moments if now <= at <= now + 0.01)])
        assert yielded(now + found + 1e-12) == pytest.approx(best, abs=1e-6)

    def test_nothing_expected_means_no_wait(self) -> None:
        cost = StepLine(50.0, 0.1)
        assert best_wait([], [], [], cost, 10.0, 0.01) == 0.0
        full = timing(8, 10.0)
        assert best_wait([full], [[0.9] * 8], [8], cost, 10.0, 0.01) == 0.0
        late = timing(0, 10.0, first_s=0.5)
        assert best_wait([late], [[0.9] * 8], [8], cost, 10.0, 0.01) == 0.0

    def test_those_who_get_nothing_from_a_wait_count_too(self) -> None:
        soon = timing(0, 10.0, first_s=0.002, gap_s=0.001)
        arguments = ([soon], [[0.8] * 5], [5], StepLine(6.0, 0.1), 10.0, 0.01)
        assert best_wait(*arguments) > 0.0
        assert best_wait(*arguments, num_others=31) == 0.0

    def test_a_step_is_not_taken_for_being_quick_when_the_next_one_pays_for_it(self) -> None:
        """One hint is there, more come soon: the greatest rate of this step alone is that of going now."""
        soon = timing(1, 10.0, first_s=0.001, gap_s=0.0005)
        arguments = ([soon], [[0.9] * 5], [5], StepLine(1.0, 0.1), 10.0, 0.01)
        assert best_wait(*arguments, usual_rate=1.0) > best_wait(*arguments, usual_rate=2.5) == 0.0

    def test_a_fast_draft_is_waited_for_and_a_slow_one_is_not(self) -> None:
        cost = StepLine(60.0, 0.5)
        fast, slow = timing(0, 10.0, first_s=0.002, gap_s=0.001), timing(0, 10.0, first_s=0.009, gap_s=0.03)
        assert best_wait([fast], [[0.8] * 5], [5], cost, 10.0, 0.01) >= 0.005
        assert best_wait([slow], [[0.05] * 5], [5], StepLine(1.0, 0.2), 10.0, 0.01) == 0.0


class TestHintTiming:
    def test_regular_arrivals_are_learned(self) -> None:
        learned, now = HintTiming(), 0.0
        for length in range(80):
            learned.on_commit(now, 0, length)
            learned.on_hints(now + 0.003, 1, length, is_waited=True)
            learned.on_hints(now + 0.004, 2, length, is_waited=True)
            learned.on_hints(now + 0.005, 3, length, is_waited=True)
            now += 0.02
        assert learned.first_s == pytest.approx(0.003, rel=0.05)
        assert learned.gap_s == pytest.approx(0.001, rel=0.05)

    def test_answers_are_timed_that_come_when_the_target_has_gone_on(self) -> None:
        """Steps of 2 ms that wait for nothing, and a draft that needs 3 ms: no hint is ever below the cursor."""
        learned = HintTiming(first_s=0.5)
        for length in range(80):
            now = 0.002 * length
            learned.on_commit(now, 0, length)
            if length:
                learned.on_hints(now + 0.001, 0, length - 1, is_waited=False)
        assert learned.first_s == pytest.approx(0.003, rel=0.05)
        assert len(learned.lost_lens) <= 2

    def test_answers_that_never_come_are_forgotten(self) -> None:
        learned = HintTiming()
        for length in range(1000):
            learned.on_commit(float(length), 0, length)
        assert len(learned.lost_lens) <= NUM_REMEMBERED

    def test_a_session_begins_with_what_others_saw(self) -> None:
        usual, other = HintTiming(), HintTiming(first_s=0.001, gap_s=0.0005)
        for _ in range(100):
            usual.learn_from(other)
        made = usual.fresh(7.0)
        assert made.arrival(1, 7.0) == pytest.approx(7.0 + OPTIMISM * 0.001, abs=1e-5)
        assert made.arrival(3, 7.0) == pytest.approx(7.0 + OPTIMISM * 0.002, abs=1e-5)

    def test_a_late_answer_says_nothing_about_one_that_is_waited_for(self) -> None:
        """Unless it is sooner than what was believed."""
        made = HintTiming(first_s=0.002)
        for length, late_s in enumerate((0.009, 0.009, 0.009, 0.001)):
            made.on_commit(float(length), 0, length)
            made.on_hints(length + late_s, 0, length, is_waited=False)
            assert (made.first_s < 0.002) == (late_s < 0.002)

    def test_one_pause_of_the_machine_is_not_believed_in(self) -> None:
        made = timing(0, 10.0, first_s=0.001)
        made.on_missed_hints(10.5)
        assert made.first_s <= 0.001 * LATE_FACTOR_MAX

    def test_what_is_there_is_expected_now_and_more_hints_later(self) -> None:
        made = timing(2, 10.0)
        arrivals = [made.arrival(n, 10.0) for n in range(8)]
        assert arrivals[:3] == [10.0] * 3
        assert arrivals[3] > 10.0
        assert arrivals == sorted(arrivals)

    def test_disappointments_make_it_expect_less(self) -> None:
        made, now = timing(0, 10.0), 10.0
        expected = []
        for _ in range(10):
            now += 0.01
            made.on_missed_hints(now)
            expected.append(made.arrival(1, now) - now)
        assert expected[-1] > 0.01

    def test_after_a_long_silence_prompt_hints_are_soon_believed_in_again(self) -> None:
        """ "Believe in later arrivals until one proves otherwise": a draft attached late, or back after a pause."""
        made, now = timing(0, 100.0), 130.0  # half a minute without a draft
        made.on_hints(now, 1, 10, is_waited=True)
        for length in range(11, 41):
            now += 0.05
            made.on_commit(now, 0, length)
            made.on_hints(now + 0.003, 3, length, is_waited=True)
        made.on_commit(now + 0.05, 0, 41)
        assert made.arrival(1, now + 0.05) - (now + 0.05) < 0.01
