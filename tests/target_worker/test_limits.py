"""A worker that cannot work is refused at start, by the name of the flag to change (I7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draft_worker.limits import MAX_TREE_NODES, DraftLimits
from outrider.errors import ConfigurationError
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS
from target_worker.limits import MAX_BATCHED_TOKENS, SchedulerLimits


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: SchedulerLimits(max_num_seqs=0), "--max-num-seqs"),
        (lambda: SchedulerLimits(max_num_waiting=0), "--max-num-waiting"),
        (lambda: SchedulerLimits(max_num_batched_tokens=0), "--max-num-batched-tokens"),
        (lambda: SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=32), "--max-num-batched-tokens"),
        (lambda: SchedulerLimits(max_num_batched_tokens=MAX_BATCHED_TOKENS + 1), "--max-num-batched-tokens"),
        (lambda: SchedulerLimits(num_speculative_tokens=-1), "--num-speculative-tokens"),
        (
            lambda: SchedulerLimits(num_speculative_tokens=MAX_SPECULATIVE_TOKENS + 1),
            "--num-speculative-tokens",
        ),
        (lambda: DraftLimits(max_num_seqs=0), "--max-num-seqs"),
        (lambda: DraftLimits(max_lookahead=0), "--max-lookahead"),
        (lambda: DraftLimits(max_nodes=0), "--max-nodes"),
        (lambda: DraftLimits(max_nodes=MAX_TREE_NODES + 1), "--max-nodes"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_its_flag(make: Callable[[], object], flag: str) -> None:
    with pytest.raises(ConfigurationError, match=flag):
        make()


def test_defaults_and_extremes_are_permitted() -> None:
    assert SchedulerLimits().num_speculative_tokens <= MAX_SPECULATIVE_TOKENS
    assert SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=2, num_speculative_tokens=0)
    assert DraftLimits(max_nodes=MAX_TREE_NODES).max_nodes == MAX_TREE_NODES
