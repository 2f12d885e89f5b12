"""Which hints a step may verify: the draft's, and tokens that the grammar forces. Pure.

Where the grammar leaves one way to go on, its token is the hint, whatever the draft says there; that choice does not
look at the draft's own token, so it biases nothing (invariant I4). The draft's tree is followed along as far as it says
the same. Some hints are not worth a row of the forward pass, because nothing comes after them: one that the grammar
forbids, which is certain to be rejected, and one that ends the text. They may only stand last, where verifying costs
nothing. (A forbidden one must be verified all the same: if it were left out, the token would be drawn from the
target's distribution where the residual is due.)
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.grammar import GrammarState, GrammarViolation
from outrider.hint_tree import Hint, HintTree

FORCED_NODE_ID = -1


@dataclass(frozen=True, slots=True)
class HintPath:
    """Hints in a line, of which at most the first `num_feedable` are worth feeding."""

    hints: list[Hint]
    num_feedable: int

    def gains(self, acceptance: float) -> list[float]:
        """Per feedable hint, the chance that it and all before it hold; what a grammar forces is certain."""
        chance, chances = 1.0, []
        for hint in self.hints[: self.num_feedable]:
            chance *= 1.0 if is_forced(hint) else acceptance
            chances.append(chance)
        return chances

    def for_step(self, num_fed: int) -> list[Hint]:
        """What a step verifies that feeds `num_fed`: one more stands last where there is one."""
        return self.hints[: num_fed + 1]


def is_forced(hint: Hint) -> bool:
    """Whether a hint comes from the grammar and not from a draft worker."""
    return hint.node_id == FORCED_NODE_ID


def choose_path(
    tree: HintTree | None, grammar: GrammarState | None, stop_token_ids: frozenset[int], max_fed: int
) -> HintPath:
    """The hints below the committed tokens, at most `max_fed` and one that is not fed.

    tree: None when the session does not listen. grammar: having read all committed output.
    """
    if grammar is None:
        hints = tree.primary_path(max_fed + 1) if tree is not None else []
    else:
        hints = _path_within(tree, grammar, max_fed + 1)
    num_feedable = min(len(hints), max_fed)
    for index, hint in enumerate(hints):
        if hint.token_id in stop_token_ids:
            return HintPath(hints[: index + 1], min(index, num_feedable))
    if grammar is not None and hints and not _permits(grammar, [hint.token_id for hint in hints]):
        return HintPath(hints, min(len(hints) - 1, num_feedable))
    return HintPath(hints, num_feedable)


def _path_within(tree: HintTree | None, grammar: GrammarState, max_len: int) -> list[Hint]:
    """Forced tokens where there are some, the draft's primary children elsewhere, up to one that is not permitted."""
    hints: list[Hint] = []
    node_id = tree.cursor if tree is not None else None
    while len(hints) < max_len:
        said = [hint.token_id for hint in hints]
        try:
            forced = grammar.forced_after(said, max_len - len(hints))
        except GrammarViolation:
            break
        for token_id in forced:
            hints.append(Hint(FORCED_NODE_ID, FORCED_NODE_ID, token_id))
            follower = tree.child_saying(node_id, token_id) if tree is not None else None
            node_id = follower.node_id if follower is not None else None
        if forced:
            continue
        primary = tree.primary_child(node_id) if tree is not None else None
        if primary is None:
            break
        hints.append(primary)
        if not _permits(grammar, [*said, primary.token_id]):
            break
        node_id = primary.node_id
    return hints


def _permits(grammar: GrammarState, token_ids: list[int]) -> bool:
    """Whether the grammar permits a path; one that runs into a limit of the parser counts as forbidden."""
    try:
        return grammar.num_valid(token_ids) == len(token_ids)
    except GrammarViolation:
        return False
