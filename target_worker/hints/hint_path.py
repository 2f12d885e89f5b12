"""The hints that a step may verify: a draft worker's, tokens found by lookup, tokens that the grammar forces. Pure.

Where a draft worker's hints end or are missing, lookup continues the path. After a long match lookup may replace the
draft's hints, if it promises more. That choice depends on the number of hints, on the match before the first of them,
on the outcome of earlier ones, and in greedy and coupled mode on the draft's confidence; under rejection sampling never
on a hint's token (invariant I4).

Where the grammar permits only one token, that token is the hint, whatever the draft proposes. This choice ignores the
draft's token, so it biases nothing (invariant I4). The draft's tree is followed as long as it agrees. Two kinds of
hints are not worth a row of the forward pass, because nothing follows them: one that the grammar forbids, which is
certain to be rejected, and one that ends the sequence. They may only stand last, where verifying costs nothing. A
forbidden one must still be verified: without it, the token would be drawn from the target's distribution instead of the
residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.grammar import GrammarState, GrammarViolation
from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import Hint, HintTree
from target_worker.hints.lookup import NO_PROPOSAL, LocalHints, Proposal

FORCED_NODE_ID = -1
LOCAL_NODE_ID = -2
CERTAIN_MATCH = 8
"""Match length in tokens from which no draft worker is waited for, and lookup may replace its hints."""


@dataclass(frozen=True, slots=True)
class HintPath:
    """A chain of hints, of which at most the first `num_feedable` are worth feeding."""

    hints: list[Hint]
    num_feedable: int
    proposal: Proposal = NO_PROPOSAL  # source of the local hints
    local_chances: Sequence[float] = ()  # acceptance probability of each local hint, given those before it
    # The same of a draft worker's hints, by position in `hints`. Not compared: estimates are no part of a path.
    remote_chances: Sequence[float] = field(default=(), compare=False)

    def gains(self) -> list[float]:
        """Per feedable hint, the probability that it and all before it are accepted; a forced token is certain."""
        chance, chances, num_local = 1.0, [], 0
        for position, hint in enumerate(self.hints[: self.num_feedable]):
            if is_local(hint):
                chance *= self.local_chances[num_local]
                num_local += 1
            elif not is_forced(hint):
                chance *= self.remote_chances[position]
            chances.append(chance)
        return chances

    def tried_locally(self, num_verified: int, num_matched: int) -> tuple[int, int] | None:
        """Returns (local hints verified, local hints accepted); None when none was reached."""
        hints = self.hints[:num_verified]
        first = next((i for i, hint in enumerate(hints) if is_local(hint)), None)
        if first is None or num_matched < first or not all(map(is_local, hints[first:])):
            return None
        return len(hints) - first, num_matched - first

    def for_step(self, num_fed: int) -> list[Hint]:
        """The hints that a step with `num_fed` fed hints verifies: one more than fed, where there is one."""
        return self.hints[: num_fed + 1]


def is_forced(hint: Hint) -> bool:
    """Whether a hint comes from the grammar."""
    return hint.node_id == FORCED_NODE_ID


def is_local(hint: Hint) -> bool:
    """Whether a hint was found by lookup."""
    return hint.node_id == LOCAL_NODE_ID


def is_remote(hint: Hint) -> bool:
    """Whether a hint comes from a draft worker."""
    return hint.node_id >= 0


@dataclass(frozen=True, slots=True)
class HintSources:
    """The sources of one session's hints; None for a source that it lacks."""

    tree: HintTree | None  # of a draft worker whose hints are accepted
    acceptance: Sequence[float]  # rate by position in a block, given that the hints before were accepted
    local: LocalHints | None
    grammar: GrammarState | None  # has consumed all committed output
    # Calibrates the draft's confidence; None under rejection sampling, which must not use it (I4).
    calibration: Calibration | None = None

    def remote_chances(self, hints: Sequence[Hint]) -> Sequence[float]:
        """Acceptance probability of each hint of a path, given those before it; meaningful for a draft worker's hints
        only."""
        if self.calibration is None:
            return self.acceptance
        return [
            self.calibration.chance(hint.confidence, record)
            for hint, record in zip(hints, self.acceptance, strict=False)
        ]


def choose_path(
    sources: HintSources, committed: Sequence[int], stop_token_ids: frozenset[int], max_fed: int
) -> HintPath:
    """Returns the hints below the committed tokens: at most `max_fed`, and one that is not fed."""
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
    stop = next((index for index, hint in enumerate(hints) if hint.token_id in stop_token_ids), None)
    if stop is not None:
        hints, num_feedable = hints[: stop + 1], min(stop, num_feedable)
    elif grammar is not None and hints and not _permits(grammar, [hint.token_id for hint in hints]):
        num_feedable = min(len(hints) - 1, num_feedable)
    return HintPath(hints, num_feedable, proposal, chances, sources.remote_chances(hints))


def _with_lookup(
    hints: list[Hint], sources: HintSources, local: LocalHints, committed: Sequence[int], max_len: int
) -> tuple[list[Hint], Proposal]:
    """The draft's path continued by lookup, or lookup's own path where a long match promises more."""
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
    """Expected number of accepted hints in a chain, from each hint's probability given those before it."""
    total, chance = 0.0, 1.0
    for own in chances:
        chance *= own
        total += chance
    return total


def _path_within(
    sources: HintSources, grammar: GrammarState, committed: Sequence[int], max_len: int
) -> tuple[list[Hint], Proposal]:
    """Builds a path under a grammar: forced tokens where there are any, otherwise primary children, then lookup. Ends
    after a token that the grammar forbids."""
    tree, hints, proposal = sources.tree, list[Hint](), NO_PROPOSAL
    found: list[int] | None = None  # rest of the proposal
    node_id = tree.cursor if tree is not None else None
    while len(hints) < max_len:
        path_ids = [hint.token_id for hint in hints]
        try:
            forced = grammar.forced_after(path_ids, max_len - len(hints))
        except GrammarViolation:
            break
        for token_id in forced:
            hints.append(Hint(FORCED_NODE_ID, FORCED_NODE_ID, token_id))
            follower = tree.child_with_token(node_id, token_id) if tree is not None else None
            node_id = follower.node_id if follower is not None else None
        if forced:
            if found is not None:  # the proposal did not include them
                break
            continue
        following = tree.primary_child(node_id) if tree is not None else None
        if following is not None and found is None:
            node_id = following.node_id
        else:
            if found is None and sources.local is not None:
                proposal = sources.local.propose(committed, path_ids, max_len - len(hints))
                found = list(proposal.token_ids)
            if not found:
                break
            following = Hint(LOCAL_NODE_ID, LOCAL_NODE_ID, found.pop(0))
        hints.append(following)
        if not _permits(grammar, [*path_ids, following.token_id]):
            break
    return hints, proposal


def _permits(grammar: GrammarState, token_ids: list[int]) -> bool:
    """Whether the grammar permits a path; one that exceeds a limit of the parser counts as forbidden."""
    try:
        return grammar.num_valid(token_ids) == len(token_ids)
    except GrammarViolation:
        return False
