"""Replays lookup over the target's sequences: what it would have proposed at every position. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from command_line.tune.agreement import UNRANKED, DraftedRanks
from command_line.tune.sources.mask_path import accepted_by_length, num_leading
from target_worker.hints.lookup import LookupHints


@dataclass(frozen=True, slots=True)
class LookupBlocks:
    """Proposals of lookup along one sequence."""

    ranks: DraftedRanks
    num_offered: tuple[int, ...]  # hints by position, at most the longest block


def lookup_blocks(prompt: Sequence[int], token_ids: Sequence[int], num_hints_max: int) -> LookupBlocks:
    """Proposals of at most `num_hints_max` tokens at every position of an output, from it and its prompt alone."""
    hints = LookupHints()
    ranks, accepted, num_offered = [], [], []
    committed = list(prompt)
    for position, token_id in enumerate(token_ids):
        while not hints.read(committed):
            pass  # each call reads more of it
        rest = token_ids[position : position + num_hints_max]
        proposed = hints.propose(committed, [], num_hints_max).token_ids
        num_right = num_leading(proposed, rest)
        ranks.append(0 if num_right else UNRANKED)
        accepted.append(accepted_by_length(num_right, len(rest)))
        num_offered.append(len(proposed))
        committed.append(token_id)
    return LookupBlocks(DraftedRanks(tuple(ranks), tuple(accepted)), tuple(num_offered))
