"""Hints beside the path that are worth verifying in the same step: a draft worker's other guesses. Pure.

Where the path goes wrong, an alternative to the wrong hint often is right. Its own row then decides one more token, as
a hint of the path does. The target takes the nodes of its hint tree that are most likely to be reached, as EAGLE-2 does
(Li et al. 2406.16858), by probabilities learned from earlier steps.

Only for greedy and coupled decoding, where the target's choice does not depend on what is verified. Rejection sampling
would have to know how the alternatives were drawn (invariant I4).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.engine.sampling.verdict import Verdict
from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import Branch, Hint, HintTree

LEAST_GAIN = 0.02
"""Probability of being reached below which a hint is not looked at: its row would hardly pay anywhere."""
NUM_ALTERNATIVES_MAX = 8
"""Alternatives to one hint that are looked at; a draft may send hundreds."""
NO_RECORD = 0.5
"""Stands for the acceptance rate of alternatives, which is not counted; it has no effect on a calibration."""


def observe_branches(of_alternatives: Calibration, branches: Sequence[Branch], verdict: Verdict) -> None:
    """Learns from the alternatives to hints of the path whose places were decided."""
    for index, branch in enumerate(branches):
        if len(branch.trail) == 1 and branch.on_path <= verdict.num_accepted:
            is_accepted = verdict.trail[:1] == (index,)
            of_alternatives.observe(branch.hint.confidence, NO_RECORD, is_accepted=is_accepted)


class LikelyBranch(NamedTuple):
    """A branch, and the probability that it is accepted with all hints before it."""

    branch: Branch
    gain: float


@dataclass(frozen=True, slots=True)
class BranchSearch:
    """Finds the branches of one session's hint tree."""

    tree: HintTree
    records: Sequence[float]  # acceptance rate of primary children by depth
    of_primary: Calibration
    of_alternatives: Calibration
    stop_token_ids: frozenset[int]  # after which nothing follows

    def find(self, path: Sequence[Hint], max_branches: int) -> list[LikelyBranch]:
        """Returns at most so many branches beside the primary path, of which `path` is the beginning; the likeliest
        first, and each after those that lead to it."""
        waiting: list[tuple[float, int, Hint, int, tuple[int, ...]]] = []  # by falling gain, then in order of discovery
        num_seen = 0
        gain, node_id = 1.0, self.tree.cursor
        for depth, following in enumerate((*path, None)):
            if node_id is None or gain < LEAST_GAIN:
                break
            primary, alternatives = self._below(node_id, depth)
            for hint, chance in alternatives:
                waiting.append((-gain * chance, num_seen, hint, depth, ()))
                num_seen += 1
            if following is not None:
                gain, node_id = gain * primary, following.node_id
        heapq.heapify(waiting)
        found: list[LikelyBranch] = []
        while waiting and len(found) < max_branches and -waiting[0][0] >= LEAST_GAIN:
            negative, _, hint, on_path, before = heapq.heappop(waiting)
            branch = Branch(hint, on_path, (*before, len(found)))
            found.append(LikelyBranch(branch, -negative))
            for each, chance in self._children(hint.node_id, branch.depth):
                heapq.heappush(waiting, (negative * chance, num_seen, each, on_path, branch.trail))
                num_seen += 1
        return found

    def _children(self, node_id: int, depth: int) -> Iterator[tuple[Hint, float]]:
        first = self.tree.primary_child(node_id)
        if first is None:
            return
        primary, alternatives = self._below(node_id, depth)
        if first.token_id not in self.stop_token_ids:
            yield first, primary
        yield from alternatives

    def _below(self, node_id: int, depth: int) -> tuple[float, list[tuple[Hint, float]]]:
        """Acceptance probability of a node's primary child, and the alternatives to it with theirs; `depth` hints lead
        to the node."""
        first = self.tree.primary_child(node_id)
        if first is None:
            return 0.0, []
        primary = self.of_primary.chance(first.confidence, self.records[min(depth, len(self.records) - 1)])
        return primary, [
            (hint, min(self.of_alternatives.chance(hint.confidence, NO_RECORD), 1.0 - primary))
            for hint in self.tree.alternatives(node_id, NUM_ALTERNATIVES_MAX)
            # A draft that does not say how sure it is has its path verified only.
            if hint.confidence and hint.token_id not in self.stop_token_ids
        ]
