"""Statistics of speculation in one session, in the message that reports them. Pure."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engine.sampling.verdict import Verdict
from outrider.hints.hint_tree import Hint, HintTree
from outrider.sampling_params import UINT32_MAX
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.hints.local_source import HintKind
from target_worker.messages import SourceCount, StepItem


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The tokens that one verdict added to a session, and their statistics."""

    token_ids: list[int]
    origins: list[common_pb2.TokenOrigin]
    num_draft_tokens: int  # fed hints of a draft worker, branches included
    num_accepted: int  # those of them among the tokens
    num_accepted_branches: int  # branches among these
    num_prediction_tokens: int  # verified hints of the client's prediction
    num_accepted_prediction_tokens: int  # those of them among the tokens
    sources: tuple[SourceCount, ...]
    num_verified: int  # verified hints of a draft worker, one that was not fed included
    num_matched: int  # the leading ones of them that were accepted
    logprobs: list[TokenLogprobs] | None
    reason: target_pb2.FinishReason | None  # set when the session has ended
    stop_token_id: int | None


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


def count_sources(
    stats: common_pb2.SpeculationStats, hints: Sequence[Hint], verdict: Verdict, num_committed: int
) -> tuple[int, int]:
    """Counts verified hints of sources other than draft workers, `num_committed` tokens of the verdict being kept.

    Returns how many were verified of a client's prediction and how many of them are in the output. There, a hint of the
    last position counts, too, though its token would have cost no other step.
    """
    if not hints:  # nothing to count, and every session has many such steps
        return 0, 0
    free, matched = (hints[: min(num, num_committed)] for num in (verdict.num_accepted, verdict.num_matched))
    stats.num_forced_tokens += _num_of(HintKind.FORCED, free)
    stats.num_lookup_tokens += _num_of(HintKind.LOOKUP, free)
    stats.num_memory_tokens += _num_of(HintKind.MEMORY, free)
    num_predicted = _num_of(HintKind.PREDICTION, hints)
    num_accepted = _num_of(HintKind.PREDICTION, matched)
    stats.num_prediction_tokens += num_predicted
    stats.num_accepted_prediction_tokens += num_accepted
    stats.num_head_tokens += _num_of(HintKind.HEAD, hints)
    stats.num_accepted_head_tokens += _num_of(HintKind.HEAD, matched)
    return num_predicted, num_accepted


SOURCES = {
    HintKind.FORCED: common_pb2.HINT_SOURCE_GRAMMAR,
    HintKind.LOOKUP: common_pb2.HINT_SOURCE_LOOKUP,
    HintKind.PREDICTION: common_pb2.HINT_SOURCE_PREDICTION,
    HintKind.HEAD: common_pb2.HINT_SOURCE_HEAD,
    HintKind.MEMORY: common_pb2.HINT_SOURCE_MEMORY,
}


def counts_by_source(item: StepItem, verdict: Verdict, num_committed: int) -> tuple[SourceCount, ...]:
    """Counts of the hints that a step fed, and how many of them are among the tokens that are kept, by source."""
    if not item.num_fed_hints:
        return ()
    num_held = min(verdict.num_accepted, num_committed)
    found: dict[common_pb2.HintSource, list[int]] = {}
    for position, hint in enumerate(item.hints[: item.num_fed_on_path]):
        kind = hint.node_id
        source = common_pb2.HINT_SOURCE_DRAFT if kind >= 0 else SOURCES[HintKind(kind)]
        counts = found.setdefault(source, [0, 0])
        counts[0] += 1
        counts[1] += position < num_held
    if item.branches:
        counts = found.setdefault(common_pb2.HINT_SOURCE_DRAFT, [0, 0])
        counts[0] += len(item.branches)
        counts[1] += num_accepted_branches(verdict, num_committed)
    return tuple(SourceCount(source, *counts) for source, counts in found.items())


def num_accepted_branches(verdict: Verdict, num_committed: int) -> int:
    """Branches among the tokens of a verdict of which so many are kept."""
    return min(len(verdict.trail), max(num_committed - verdict.num_accepted, 0))


def counts_of_draft(counts: Sequence[SourceCount]) -> tuple[int, int]:
    """Fed hints of a draft worker, and those of them that are kept."""
    for source, num_verified, num_accepted in counts:
        if source == common_pb2.HINT_SOURCE_DRAFT:
            return num_verified, num_accepted
    return 0, 0


def _num_of(kind: HintKind, hints: Sequence[Hint]) -> int:
    return sum(hint.node_id == kind for hint in hints)


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


def origins_of(verdict: Verdict, item: StepItem) -> list[common_pb2.TokenOrigin]:
    """Returns the origin of each token of a verdict."""
    trail = verdict.trail
    if item.num_fed_hints == 0:
        extra = common_pb2.TOKEN_ORIGIN_PLAIN
    elif (not trail and verdict.num_accepted < item.num_fed_on_path) or any(
        branch.on_path == verdict.num_accepted and branch.trail[:-1] == trail for branch in item.branches
    ):
        extra = common_pb2.TOKEN_ORIGIN_RECOVERED
    else:  # nothing was fed that could have come here
        extra = common_pb2.TOKEN_ORIGIN_BONUS
    return [common_pb2.TOKEN_ORIGIN_ACCEPTED] * (verdict.num_accepted + len(trail)) + [extra]
