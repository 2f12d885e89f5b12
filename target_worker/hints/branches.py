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

from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import Branch, Hint, HintTree
from outrider.hints.step_cost import StepLine

LEAST_GAIN = 0.02
"""Probability of being reached below which a hint is not looked at: its row would hardly pay anywhere."""
NUM_ALTERNATIVES_MAX = 8
"""Alternatives to one hint that are looked at; a draft may send hundreds."""
NUM_ALTERNATIVES_LEARNED = 2
"""Alternatives to one hint that are learned from: the likeliest ones, for this takes time in every step."""
NO_RECORD = 0.5
"""Stands for the acceptance rate of alternatives, which is not counted; it has no effect on a calibration."""


def observe_alternatives(of_alternatives: Calibration, tree: HintTree, token_ids: Sequence[int]) -> None:
    """Learns from the alternatives at the places that `token_ids` decide, which are about to be committed. Whether they
    were fed makes no difference: if they are thought not to pay, they are seen to improve."""
    node_id = tree.cursor
    for token_id in token_ids:
        if node_id is None:
            return
        for hint in tree.alternatives(node_id, NUM_ALTERNATIVES_LEARNED):
            of_alternatives.observe(hint.confidence, NO_RECORD, is_accepted=hint.token_id == token_id)
        following = tree.child_with_token(node_id, token_id)
        node_id = None if following is None else following.node_id


class RowPrices(NamedTuple):
    """The least that a branch must promise to be worth its row. Others are not looked for."""

    least_gain: float = LEAST_GAIN  # tokens; of a row of the path
    branch_share: float = 1.0  # time of such a row over that of a branch, which reads the context again

    @classmethod
    def at(cls, line: StepLine, num_sessions: int, num_context: int) -> RowPrices:
        """num_context: committed tokens of the session. A step without hints bounds the price of a row from below: it
        takes the share of its time that a row adds."""
        price = line.token_ms * num_sessions / line.step_ms(num_sessions)
        return cls(max(price, LEAST_GAIN), line.token_ms / line.branch_ms(num_context))


USUAL_PRICES = RowPrices()


class LikelyBranch(NamedTuple):
    """A branch, and the probability that it is accepted with all hints before it, in proportion to its price."""

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
    prices: RowPrices = USUAL_PRICES

    def find(self, path: Sequence[Hint], max_branches: int) -> list[LikelyBranch]:
        """Returns at most so many branches beside the primary path, of which `path` is the beginning; the likeliest
        first, and each after those that lead to it."""
        least_gain = self.prices.least_gain / self.prices.branch_share
        waiting: list[tuple[float, int, Hint, int, tuple[int, ...]]] = []  # by falling gain, then in order of discovery
        num_seen = 0
        gain, node_id = 1.0, self.tree.cursor
        for depth, following in enumerate((*path, None)):
            if node_id is None or gain < least_gain:
                break
            primary, alternatives = self._below(node_id, depth)
            for hint, chance in alternatives:
                if gain * chance >= least_gain:
                    waiting.append((-gain * chance, num_seen, hint, depth, ()))
                    num_seen += 1
            if following is not None:
                gain, node_id = gain * primary, following.node_id
        heapq.heapify(waiting)
        found: list[LikelyBranch] = []
        while waiting and len(found) < max_branches:
            negative, _, hint, on_path, before = heapq.heappop(waiting)
            branch = Branch(hint, on_path, (*before, len(found)))
            found.append(LikelyBranch(branch, -negative * self.prices.branch_share))
            for each, chance in self._children(hint.node_id, branch.depth):
                if -negative * chance >= least_gain:
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
