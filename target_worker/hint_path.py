"""Which hints a step may verify: a draft worker's, tokens found in texts, tokens that the grammar forces. Pure.

Where a draft worker's hints end, or before there are any, what followed when the text last stood like this goes on
(`lookup`); after a long match that is better than what the draft says, and takes its place. Which of the two it is
depends on how many hints there are, on the match before the first of them and on what became of earlier ones; in greedy
and coupled mode on the draft's confidence, too; under rejection sampling never on a hint's token (invariant I4).

Where the grammar leaves one way to go on, its token is the hint, whatever the draft says there; that choice does not
look at the draft's own token, so it biases nothing (invariant I4). The draft's tree is followed along as far as it says
the same. Some hints are not worth a row of the forward pass, because nothing comes after them: one that the grammar
forbids, which is certain to be rejected, and one that ends the text. They may only stand last, where verifying costs
nothing. (A forbidden one must be verified all the same: if it were left out, the token would be drawn from the
target's distribution where the residual is due.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.confidence import Calibration
from outrider.grammar import GrammarState, GrammarViolation
from outrider.hint_tree import Hint, HintTree
from target_worker.lookup import NO_PROPOSAL, LocalHints, Proposal

FORCED_NODE_ID = -1
LOCAL_NODE_ID = -2
CERTAIN_MATCH = 8
"""Tokens of a match after which there is no need to wait for a draft worker, and what it says may be passed over."""


@dataclass(frozen=True, slots=True)
class HintPath:
    """Hints in a line, of which at most the first `num_feedable` are worth feeding."""

    hints: list[Hint]
    num_feedable: int
    proposal: Proposal = NO_PROPOSAL  # whose tokens the local hints are
    local_chances: Sequence[float] = ()  # that its tokens hold, each given those before it
    # That a draft worker's hint holds, by its place in `hints`, likewise. What is expected of a path is no part of it.
    remote_chances: Sequence[float] = field(default=(), compare=False)

    def gains(self) -> list[float]:
        """Per feedable hint, the chance that it and all before it hold; what a grammar forces is certain."""
        chance, chances, num_local = 1.0, [], 0
        for place, hint in enumerate(self.hints[: self.num_feedable]):
            if is_local(hint):
                chance *= self.local_chances[num_local]
                num_local += 1
            elif not is_forced(hint):
                chance *= self.remote_chances[place]
            chances.append(chance)
        return chances

    def tried_locally(self, num_verified: int, num_matched: int) -> tuple[int, int] | None:
        """(local hints that were verified, those that held); None when one before them did not, or none was."""
        hints = self.hints[:num_verified]
        first = next((i for i, hint in enumerate(hints) if is_local(hint)), None)
        if first is None or num_matched < first or not all(map(is_local, hints[first:])):
            return None
        return len(hints) - first, num_matched - first

    def for_step(self, num_fed: int) -> list[Hint]:
        """What a step verifies that feeds `num_fed`: one more stands last where there is one."""
        return self.hints[: num_fed + 1]


def is_forced(hint: Hint) -> bool:
    """Whether a hint comes from the grammar."""
    return hint.node_id == FORCED_NODE_ID


def is_local(hint: Hint) -> bool:
    """Whether a hint was found in a text."""
    return hint.node_id == LOCAL_NODE_ID


def is_remote(hint: Hint) -> bool:
    """Whether a hint comes from a draft worker."""
    return hint.node_id >= 0


@dataclass(frozen=True, slots=True)
class HintSources:
    """Where a session's hints come from; None where there is no such source."""

    tree: HintTree | None  # of a draft worker that is listened to
    acceptance: Sequence[float]  # how often its hints held, by place in a block, those before them held
    local: LocalHints | None
    grammar: GrammarState | None  # having read all committed output
    # Of its confidence; under rejection sampling, where nobody may look at that (I4), none.
    calibration: Calibration | None = None

    def remote_chances(self, hints: Sequence[Hint]) -> Sequence[float]:
        """That each hint of a path holds, those before it held; only a draft worker's are meant."""
        if self.calibration is None:
            return self.acceptance
        return [
            self.calibration.chance(hint.confidence, record)
            for hint, record in zip(hints, self.acceptance, strict=False)
        ]


def choose_path(
    sources: HintSources, committed: Sequence[int], stop_token_ids: frozenset[int], max_fed: int
) -> HintPath:
    """The hints below the committed tokens, at most `max_fed` and one that is not fed."""
    grammar, max_len = sources.grammar, max_fed + 1
    proposal = NO_PROPOSAL
    if grammar is not None:
        hints, proposal = _path_within(sources, grammar, committed, max_len)
    else:
        hints = sources.tree.primary_path(max_len) if sources.tree is not None else []
        if sources.local is not None:
            hints, proposal = _with_lookup(hints, sources, sources.local, committed, max_len)
    chances = sources.local.chances(proposal) if sources.local is not None and proposal.token_ids else ()
    num_feedable = min(len(hints), max_fed)
    for index, hint in enumerate(hints):
        if hint.token_id in stop_token_ids:
            hints, num_feedable = hints[: index + 1], min(index, num_feedable)
            return HintPath(hints, num_feedable, proposal, chances, sources.remote_chances(hints))
    if grammar is not None and hints and not _permits(grammar, [hint.token_id for hint in hints]):
        num_feedable = min(len(hints) - 1, num_feedable)
    return HintPath(hints, num_feedable, proposal, chances, sources.remote_chances(hints))


def _with_lookup(
    hints: list[Hint], sources: HintSources, local: LocalHints, committed: Sequence[int], max_len: int
) -> tuple[list[Hint], Proposal]:
    """The draft's path and what lookup says after it, or lookup's own path where a long match promises more."""
    proposal = local.propose(committed, [], max_len)
    if hints and not (
        proposal.match_len >= CERTAIN_MATCH
        and _expected(local.chances(proposal)) > _expected(sources.remote_chances(hints)[: len(hints)])
    ):
        proposal = local.propose(committed, [hint.token_id for hint in hints], max_len - len(hints))
        return hints + _local_hints(proposal), proposal
    return _local_hints(proposal), proposal


def _local_hints(proposal: Proposal) -> list[Hint]:
    return [Hint(LOCAL_NODE_ID, LOCAL_NODE_ID, token_id) for token_id in proposal.token_ids]


def _expected(chances: Sequence[float]) -> float:
    """Hints that hold on average, of hints in a line with these chances given those before."""
    total, chance = 0.0, 1.0
    for own in chances:
        chance *= own
        total += chance
    return total


def _path_within(
    sources: HintSources, grammar: GrammarState, committed: Sequence[int], max_len: int
) -> tuple[list[Hint], Proposal]:
    """Forced tokens where there are some, primary children elsewhere, then lookup, up to one that is not permitted."""
    tree, hints, proposal = sources.tree, list[Hint](), NO_PROPOSAL
    found: list[int] | None = None  # what is left of the proposal
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
            if found is not None:  # the proposal did not know of them
                break
            continue
        following = tree.primary_child(node_id) if tree is not None else None
        if following is not None and found is None:
            node_id = following.node_id
        else:
            if found is None and sources.local is not None:
                proposal = sources.local.propose(committed, said, max_len - len(hints))
                found = list(proposal.token_ids)
            if not found:
                break
            following = Hint(LOCAL_NODE_ID, LOCAL_NODE_ID, found.pop(0))
        hints.append(following)
        if not _permits(grammar, [*said, following.token_id]):
            break
    return hints, proposal


def _permits(grammar: GrammarState, token_ids: list[int]) -> bool:
    """Whether the grammar permits a path; one that runs into a limit of the parser counts as forbidden."""
    try:
        return grammar.num_valid(token_ids) == len(token_ids)
    except GrammarViolation:
        return False
