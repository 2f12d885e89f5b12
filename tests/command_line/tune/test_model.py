"""The replay: exact where it can be done by hand, right at its limits, monotone where the world is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from command_line.tune.agreement import Ranks
from command_line.tune.model import (
    HintPace,
    Pair,
    ahead_rate,
    best_ahead,
    bound_rate,
    plain_rate,
    synchronous_rate,
)
from command_line.tune.times import Overheads, StepTimes

FREE_DRAFT = StepTimes((1,), (1e-12,))
FREE = replace(Overheads().scaled(0.0), link_ms=0.0)
LINK = replace(FREE, link_ms=0.25)


def flat(step_ms: float) -> StepTimes:
    """Memory-bound without end."""
    return StepTimes((1,), (step_ms,))


def text(rate: float, length: int = 400, seed: int = 0) -> Ranks:
    """Independent positions; of the misses a third each is the second, third or no guess."""
    chosen = random.Random(seed)
    return tuple(0 if chosen.random() < rate else chosen.choice((1, 2, 4)) for _ in range(length))


MIXED = Pair(StepTimes.measured([(1, 10.0), (4, 10.5), (16, 16.0)]), flat(1.0), (text(0.8), text(0.6, seed=1)))


class TestByHand:
    def test_plain_is_a_token_a_step(self) -> None:
        pair = Pair(flat(9.0), flat(1.0), ((0,),), replace(FREE, step_ms=0.5, session_ms=0.25))
        assert plain_rate(pair, 2) == pytest.approx(1 / 10.0)

    def test_synchronous_steps_take_their_turns(self) -> None:
        # Two hints of 1 ms, two messages of 0.25 ms, a step of 7.5 ms: three tokens in 10 ms.
        pair = Pair(flat(7.5), flat(1.0), ((0,) * 30,), LINK)
        assert synchronous_rate(pair, 1, 2) == pytest.approx(3 / 10.0)

    def test_ahead_hides_a_draft_that_keeps_up(self) -> None:
        # The first hint comes after 2 × 0.25 + 1.5 × 1 = 2 ms, the second at 3 ms; none is waited for afterwards.
        pair = Pair(flat(10.0), flat(1.0), ((0,) * 30,), LINK)
        assert ahead_rate(pair, 1, 2, num_waited=2) == pytest.approx(30 / (3.0 + 10 * 10.0))

    def test_ahead_without_waiting_starts_with_a_plain_step(self) -> None:
        pair = Pair(flat(10.0), flat(1.0), ((0,) * 31,), LINK)
        assert ahead_rate(pair, 1, 2, num_waited=0) == pytest.approx(31 / (11 * 10.0))

    def test_a_slow_draft_gives_what_it_has(self) -> None:
        # A hint every 20 ms, a step every 10: each second step has one, after the first 30.
        pair = Pair(flat(10.0), flat(20.0), ((0,) * 301,), FREE)
        assert ahead_rate(pair, 1, 4, num_waited=0) < 1.6 / 10.0
        assert ahead_rate(pair, 1, 4, num_waited=0) >= plain_rate(pair, 1)

    def test_every_miss_costs_a_restart(self) -> None:
        # The draft is right, then wrong: wait 3 ms, step 10 ms, two tokens.
        pair = Pair(flat(10.0), flat(2.0), ((0, 4) * 50 + (0,),), FREE)
        assert ahead_rate(pair, 1, 1, num_waited=1) == pytest.approx(2 / 13.0, rel=0.02)

    def test_an_alternative_that_was_continued_saves_the_restart(self) -> None:
        unforeseen = Pair(flat(10.0), flat(2.0), ((0, 4) * 50 + (0,),), FREE)
        foreseen = replace(unforeseen, texts=((0, 2) * 50 + (0,),))
        assert ahead_rate(foreseen, 1, 1, num_waited=1) == pytest.approx(2 / 10.0, rel=0.02)
        # Sixteen sessions leave the draft no room for its third guesses.
        assert ahead_rate(foreseen, 1, 1, 1, sessions_per_draft=16) == pytest.approx(
            ahead_rate(unforeseen, 1, 1, 1, sessions_per_draft=16)
        )

    def test_pace_follows_the_sessions_of_a_draft_worker(self) -> None:
        pair = Pair(flat(10.0), flat(2.0), ((0,),), LINK)
        assert HintPace.of(pair, 1) == HintPace(0.5 + 1.0 + 2.0, 2.0, 4, 0.25)
        assert HintPace.of(pair, 4) == HintPace(0.5 + 1.0 + 2.0, 2.0, 2, 0.25)
        # Restarts of 32 sessions take four steps; then every second node is a hint on a primary path.
        assert HintPace.of(pair, 32) == HintPace(0.5 + 1.0 + 8.0, 16.0, 2, 0.25)


class TestLimits:
    @pytest.mark.parametrize("num_hints", [1, 3, 7])
    @pytest.mark.parametrize("batch", [1, 8])
    def test_a_free_draft_reaches_the_bound(self, num_hints: int, batch: int) -> None:
        pair = replace(MIXED, draft=FREE_DRAFT, overheads=FREE)
        found = ahead_rate(pair, batch, num_hints, num_waited=num_hints)
        assert found == pytest.approx(bound_rate(pair, batch, num_hints), rel=1e-6)

    @pytest.mark.parametrize("num_hints", [1, 3, 7])
    def test_a_free_draft_on_the_spot_makes_taking_turns_as_good(self, num_hints: int) -> None:
        pair = replace(MIXED, draft=FREE_DRAFT, overheads=FREE)
        assert synchronous_rate(pair, 1, num_hints) == pytest.approx(bound_rate(pair, 1, num_hints), rel=1e-6)

    @pytest.mark.parametrize("num_waited", [0, 1, 4])
    def test_a_draft_that_is_never_right_gains_nothing(self, num_waited: int) -> None:
        pair = replace(MIXED, texts=((4,) * 200,))
        assert ahead_rate(pair, 1, 4, num_waited) < plain_rate(pair, 1)
        assert synchronous_rate(pair, 1, 4) < plain_rate(pair, 1)
        assert bound_rate(pair, 1, 4) <= plain_rate(pair, 1)

    def test_no_time_passes_without_a_text(self) -> None:
        assert ahead_rate(replace(MIXED, texts=((0, 0),)), 1, 4, 0) == 0.0


class TestMonotone:
    def test_a_slower_draft_never_helps(self) -> None:
        rates = [best_ahead(replace(MIXED, draft=flat(ms)), 1, 4)[0] for ms in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > rates[-1]

    def test_more_sessions_on_a_draft_worker_never_help(self) -> None:
        rates = [best_ahead(MIXED, 1, 4, sessions)[0] for sessions in (1, 2, 4, 8, 16, 32, 64)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > rates[-1]

    def test_overheads_never_help(self) -> None:
        rates = [
            best_ahead(replace(MIXED, overheads=Overheads().scaled(factor)), 1, 4)[0] for factor in (0.0, 0.5, 1, 4)
        ]
        assert rates == sorted(rates, reverse=True)

    def test_better_drafts_help_at_every_block_length(self) -> None:
        for num_hints in (1, 2, 4, 8):
            pairs = [replace(MIXED, texts=(text(rate, 2000),)) for rate in (0.3, 0.5, 0.7, 0.9)]
            for rate_of in (
                lambda pair, n=num_hints: best_ahead(pair, 1, n)[0],
                lambda pair, n=num_hints: synchronous_rate(pair, 1, n),
                lambda pair, n=num_hints: bound_rate(pair, 1, n),
            ):
                rates = [rate_of(pair) for pair in pairs]
                assert rates == sorted(rates)

    @pytest.mark.parametrize("num_hints", [1, 2, 4, 8])
    def test_the_bound_is_one(self, num_hints: int) -> None:
        best_bound = max(bound_rate(MIXED, 1, count) for count in range(1, num_hints + 1))
        assert best_ahead(MIXED, 1, num_hints)[0] <= best_bound
        assert synchronous_rate(MIXED, 1, num_hints) <= best_bound
