"""Synthetic models: a target step's tokens and a draft step's candidates, from the requests' sequences. Pure.

The target generates its sequence whatever the hints are. While the draft is on that sequence, the ranks decide
whether the right token is its first candidate, an alternative, or missing. Off the sequence no hint can be accepted,
but the draft continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from command_line.simulator.traffic import BESIDE, VOCAB_SIZE, Text
from draft_worker.messages import Expansion, StepItem
from outrider.engine.sampling.verdict import Verdict
from target_worker.messages import StepItem as TargetItem

_STRIDE: Final = 40503  # odd: candidates off the sequence differ by position


def verdict(item: TargetItem, text: Text) -> Verdict | None:
    """Verdict on the item's hints and branches; None if it decides nothing."""
    if not item.num_decided:
        return None
    at = len(item.context.token_ids) - item.context.num_prompt_tokens
    right = text.token_ids[at : at + item.num_decided]
    num_matched = 0
    for hint, token_id in zip(item.hints, right, strict=False):
        if hint.token_id != token_id:
            break
        num_matched += 1
    num_accepted = min(num_matched, item.num_fed_on_path)
    trail: tuple[int, ...] = ()
    for branch in item.branches:  # each comes after those that lead to it
        follows = branch.on_path == num_accepted and branch.trail[:-1] == trail
        if follows and branch.hint.token_id == right[num_accepted + len(trail)]:
            trail = branch.trail
    return Verdict(right[: num_accepted + len(trail) + 1], num_accepted, num_matched, trail=trail)


def expand(item: StepItem, said: Sequence[int], text: Text, num_alternatives: int) -> Expansion:
    """Guesses after the committed text and `said`. Chances as the draft worker has them (`draft_worker.runner`)."""
    start = len(item.context.token_ids) - item.context.num_prompt_tokens
    at = start + len(said)
    if at < len(text.token_ids) and text.token_ids[start:at] == said:
        right, rank, level = text.token_ids[at], text.ranks[at], text.levels[at]
    else:
        right, rank, level = said[-1] * _STRIDE + at if said else at, len(BESIDE) + 1, text.levels[0]
    token_ids = [(right + 1 + i) % VOCAB_SIZE for i in range(1 + num_alternatives)]
    if rank < len(token_ids):
        token_ids[rank] = right
    chance = item.acceptance_rate
    if item.calibration is not None:
        chance = item.calibration.chance(level, chance)
    others = [(1.0 - chance) * share for share in BESIDE[:num_alternatives]]
    return Expansion(token_ids[: 1 + len(others)], [chance, *others], confidence=level)


class Growth:
    """One item of a draft step while its chain is fed (`draft_worker.messages.Chain`)."""

    def __init__(self, item: StepItem, text: Text, num_alternatives: int) -> None:
        self.item = item
        self._text, self._num_alternatives = text, num_alternatives
        self.expansions = [
            expand(item, said, text, num_alternatives)
            for said, _ in zip(item.context.continuations, item.node_ids, strict=True)
        ]
        self._said: list[int] = []
        self._num_left, self._reach = 0, 0.0
        if item.chain is not None:
            self._said = list(item.context.continuations[0])
            self._num_left = item.chain.max_nodes
            self._reach = item.chain.reach * self.expansions[0].chances[0]

    @property
    def goes_on(self) -> bool:
        """Whether one more node is to be fed below the last one."""
        chain = self.item.chain
        return chain is not None and self._num_left > 0 and self._reach >= chain.min_reach

    def feed_one(self) -> None:
        """Feeds one node."""
        last = self.expansions[-1] if len(self._said) > len(self.item.context.continuations[0]) else self.expansions[0]
        self.item.kv.extend(1)
        self._said.append(last.token_ids[0])
        self._num_left -= 1
        self.expansions.append(expand(self.item, self._said, self._text, self._num_alternatives))
        self._reach *= self.expansions[-1].chances[0]
