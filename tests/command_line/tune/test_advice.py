"""Tests of the recommended number of hints: none if they do not help, the longest block if tokens are free, never more
than that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from command_line.tune.advice import NOISE, advise, choose, sessions_per_draft, usable_num_hints
from command_line.tune.model import Pair
from command_line.tune.times import StepTimes
from tests.command_line.tune.test_model import FREE, FREE_DRAFT, MIXED, flat, text


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_a_draft_that_is_never_right_is_not_listened_to(batch: int) -> None:
    found = advise(replace(MIXED, texts=((4,) * 100,)), batch, 8)
    assert found.num_speculative_tokens == 0
    assert found.speedup == 1.0
    assert max(found.by_num_hints) <= 1.0
    assert found.synchronous <= 1.0
    assert (found.bound, found.drafts_per_target, found.targets_per_draft) == (1.0, 0, 0)


def test_a_target_that_takes_forever_and_a_draft_that_is_right_want_the_longest_block() -> None:
    found = advise(Pair(flat(1e9), flat(1.0), ((0,) * 2600,)), 1, 12)
    assert found.num_speculative_tokens == 12
    assert found.speedup == pytest.approx(13.0, rel=0.01)
    assert found.bound == pytest.approx(13.0, rel=0.01)
    assert found.synchronous == pytest.approx(13.0, rel=0.01)


def test_a_free_draft_is_as_good_as_the_bound() -> None:
    found = advise(replace(MIXED, draft=FREE_DRAFT, overheads=FREE), 1, 8)
    assert max(found.by_num_hints) == pytest.approx(found.bound, rel=1e-6)


def test_a_draft_as_slow_as_the_target_is_not_worth_it() -> None:
    found = advise(replace(MIXED, draft=flat(40.0), texts=(text(0.5),)), 1, 8)
    assert found.num_speculative_tokens == 0


def test_blocks_get_shorter_where_tokens_cost() -> None:
    target = StepTimes.measured([(1, 10.0), (8, 11.0), (16, 14.0), (512, 300.0)])
    found = [advise(replace(MIXED, target=target), batch, 8) for batch in (1, 8, 32)]
    lengths = [each.num_speculative_tokens for each in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert found[0].bound > found[1].bound > found[2].bound


def test_of_equally_good_blocks_the_shortest() -> None:
    assert choose([1.5, 2.0, 2.01, 1.9]) == 2
    assert choose([1.0, 1.01]) == 0
    assert choose([0.4, 1.2]) == 2
    assert choose([]) == 0


def test_the_range_holds_the_prediction_and_is_never_too_sure() -> None:
    found = advise(MIXED, 1, 8)
    assert found.speedup_low <= found.speedup * (1 - NOISE)
    assert found.speedup_high >= found.speedup * (1 + NOISE)
    # Prompts that differ as much as these leave more doubt than prompts that are alike.
    alike = advise(replace(MIXED, texts=(text(0.7), text(0.7))), 1, 8)
    assert alike.speedup_high - alike.speedup_low < found.speedup_high - found.speedup_low


def test_a_quicker_draft_serves_more_sessions() -> None:
    served = [sessions_per_draft(replace(MIXED, draft=flat(ms)), 1, 3) for ms in (0.1, 0.5, 2.0, 8.0)]
    assert served == sorted(served, reverse=True)
    assert served[0] > served[-1] >= 1


def test_draft_workers_of_their_own_help_where_one_for_all_is_too_slow() -> None:
    found = advise(replace(MIXED, draft=flat(2.0)), 32, 6)
    assert max(found.by_num_hints) < found.dedicated < found.bound
    assert advise(MIXED, 1, 6).dedicated == max(advise(MIXED, 1, 6).by_num_hints)


def test_throughput_limits_how_many_are_served() -> None:
    # Eight nodes a millisecond, half of them hints, and 80 ms: 320 hints, of which each session wants four.
    pair = Pair(flat(80.0), flat(1.0), ((0,) * 200,), FREE)
    assert sessions_per_draft(pair, 1, 3) == 320 // 4


def test_pool_ratios_follow_the_sessions_that_are_served() -> None:
    found = advise(MIXED, 4, 8)
    few = replace(found, batch=4, sessions_per_draft=9)
    assert (few.targets_per_draft, few.drafts_per_target) == (2, 1)
    many = replace(found, batch=32, sessions_per_draft=9)
    assert (many.targets_per_draft, many.drafts_per_target) == (0, 4)


def test_texts_must_be_long_enough_for_one_hint() -> None:
    assert usable_num_hints(replace(MIXED, texts=((0, 0, 0), (0,))), 8) == 2
    with pytest.raises(ValueError, match="too short"):
        advise(replace(MIXED, texts=((0,), (4,))), 1, 8)
