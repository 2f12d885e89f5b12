"""Statistics of speculation in one session, in the message that reports them. Pure."""

from __future__ import annotations

from collections.abc import MutableSequence

from outrider.hints.hint_tree import HintTree
from outrider.sampling_params import UINT32_MAX
from protos.outrider.v1 import common_pb2


def count_step(stats: common_pb2.SpeculationStats, num_accepted: int, num_draft_tokens: int) -> None:
    """Counts a step that fed `num_draft_tokens` hints of a draft worker, of which the target accepted some."""
    stats.num_steps += 1
    if num_draft_tokens == 0:
        return
    stats.num_spec_steps += 1
    stats.num_draft_tokens += num_draft_tokens
    stats.num_accepted_draft_tokens += num_accepted
    _increment(stats.acceptance_histogram, num_accepted)
    _increment(stats.draft_length_histogram, num_draft_tokens)


def count_outcome(stats: common_pb2.SpeculationStats, tree: HintTree) -> None:
    """Counts whether the tree continues where the last step ended, at the time the next one could begin."""
    stats.num_outcomes += 1
    stats.num_predicted_outcomes += tree.cursor is not None
    stats.num_ready_outcomes += tree.primary_child(tree.cursor) is not None


def add_up_to_limit(stats: common_pb2.SpeculationStats, name: str, amount: int) -> None:
    """Adds to a counter whose size a draft worker controls, without exceeding the field's range."""
    setattr(stats, name, min(getattr(stats, name) + amount, UINT32_MAX))


def _increment(histogram: MutableSequence[int], index: int) -> None:
    while len(histogram) <= index:
        histogram.append(0)
    histogram[index] += 1
