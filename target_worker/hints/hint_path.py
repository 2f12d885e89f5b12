"""The hints that a step may verify: a draft worker's, those of local sources, tokens that the grammar forces. Pure.

Where a draft worker's hints end or are missing, the local source that promises the most continues the path. After a
long match, or with a head's draft, it may replace the draft's hints, if it promises more. `choices` decides that, and
how many hints a step may count on; it is not given hints. Here a path is put together as it was decided: what stands at
a position depends on the hints before it, never on the hint there (invariant I4).

Where the grammar permits only one token, that token is the hint, whatever the draft proposes. This choice ignores the
draft's token, so it biases nothing (invariant I4). The draft's tree is followed as long as it agrees. Two kinds of
hints are not worth a row of the forward pass, because nothing follows them: one that the grammar forbids, which is
certain to be rejected, and one that ends the sequence. They may only stand last, where verifying costs nothing. A
forbidden one must still be verified: without it, the token would be drawn from the target's distribution instead of the
residual.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.grammar import GrammarState, GrammarViolation
from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import Branch, Hint, HintTree
from target_worker.hints.branches import USUAL_PRICES, BranchSearch, LikelyBranch, RowPrices
from target_worker.hints.choices import drawn_chances, may_compete, may_replace, promises_more
from target_worker.hints.local_source import NOTHING_LOCAL, HintKind, LocalProposal, LocalSource, best_proposal


@dataclass(frozen=True, slots=True)
class HintPath:
    """A chain of hints, of which at most the first `num_feedable` are worth feeding."""

    hints: list[Hint]
    num_feedable: int
    local: LocalProposal = NOTHING_LOCAL  # source of the local hints
    # All that a choice of how many hints to feed may know of the path: per position the probability that a hint there
    # is accepted, given those before it. Where hints were drawn, there may be more of these than hints (I4). Not
    # compared: estimates are no part of a path.
    chances: Sequence[float] = field(default=(), compare=False)
    branches: Sequence[LikelyBranch] = ()
    max_fed: int = field(default=0, compare=False)  # hints in all, where there are branches
    is_always: bool = False  # all of the path is fed, whatever it is worth
    # Hints before those of its client's prediction, which ask for rows of their own; None without such.
    num_before_prediction: int | None = field(default=None, compare=False)

    @property
    def expected(self) -> float:
        """Hints of the path that are expected to be accepted."""
        return sum(self._chances())

    def gains(self) -> list[float]:
        """Worth of each hint that a step may count on, of the path and its branches: the probability that it and all
        before it are accepted, for a branch in proportion to its price. In falling order, in which they are fed. Under
        rejection sampling a step may count on more hints than there are: `num_fed` says how many it gets."""
        if not self.branches:
            return self._path_gains()
        return [-negative for negative, _ in self._rows()]

    def _rows(self) -> list[tuple[float, bool]]:
        """Hints in the order in which they are fed: negative gain, and whether it is a branch. Of equals the path's
        comes first: it may lead to the branch."""
        on_path = [(-gain, False) for gain in self._path_gains()]
        return sorted([*on_path, *((-each.gain, True) for each in self.branches)])[: self.max_fed]

    def _path_gains(self) -> list[float]:
        return [1.0] * len(self.chances) if self.is_always else self._chances()

    def _chances(self) -> list[float]:
        """Per position of the path, the probability that the hint there and all before it are accepted."""
        return list(itertools.accumulate(self.chances, operator.mul))

    def tried_locally(self, num_verified: int, num_matched: int) -> tuple[int, int] | None:
        """Returns (local hints verified, local hints accepted); None when none was reached."""
        hints = self.hints[:num_verified]
        first = next((i for i, hint in enumerate(hints) if is_local(hint)), None)
        if first is None or num_matched < first or not all(map(is_local, hints[first:])):
            return None
        return len(hints) - first, num_matched - first

    def observe_local(self, num_verified: int, num_matched: int) -> None:
        """Tells the source of the local hints what became of them, if any was reached."""
        tried = self.tried_locally(num_verified, num_matched)
        if tried is not None and self.local.source is not None:
            self.local.source.observe(self.local.proposal, num_matched=tried[1], num_verified=tried[0])

    def num_fed(self, num_counted_on: int) -> int:
        """Hints that a step feeds which counts on so many."""
        return num_counted_on if self.branches else min(num_counted_on, self.num_feedable)

    def is_all(self, num_verified: int) -> bool:
        """Whether so many hints of a draft worker are all that the path had, of more that it could have had."""
        return num_verified == sum(map(is_remote, self.hints)) and num_verified <= len(self.chances)

    def for_step(self, num_fed: int) -> tuple[list[Hint], list[Branch]]:
        """The path's hints and the branches that a step with `num_fed` fed hints verifies: of the path one more than
        fed, where there is one."""
        if not self.branches:
            return self.hints[: num_fed + 1], []
        num_branches = sum(is_branch for _, is_branch in self._rows()[:num_fed])
        return self.hints[: num_fed - num_branches + 1], [each.branch for each in self.branches[:num_branches]]


def is_forced(hint: Hint) -> bool:
    """Whether a hint comes from the grammar."""
    return hint.node_id == HintKind.FORCED


def is_local(hint: Hint) -> bool:
    """Whether a hint comes from a local source."""
    return hint.node_id < HintKind.FORCED


def is_remote(hint: Hint) -> bool:
    """Whether a hint comes from a draft worker."""
    return hint.node_id >= 0


def calibrate(calibration: Calibration, hints: Sequence[Hint], num_matched: int, records: Sequence[float]) -> None:
    """Learns from a verified path of which the first hints were accepted. records: what was known before, by
    position."""
    for position, hint in enumerate(hints[: num_matched + 1]):
        if is_remote(hint):
            calibration.observe(hint.confidence, records[position], is_accepted=position < num_matched)


@dataclass(frozen=True, slots=True)
class HintSources:
    """The sources of one session's hints; None for a source that it lacks."""

    tree: HintTree | None  # of a draft worker whose hints are accepted
    # Rate by position in a block, given that the hints before were accepted; of drawn ones, that they are there, too.
    acceptance: Sequence[float]
    local: Sequence[LocalSource]
    grammar: GrammarState | None  # has consumed all committed output
    # Calibrates the draft's confidence; None under rejection sampling, which must not use it (I4).
    calibration: Calibration | None = None
    of_branches: Calibration | None = None  # its confidence in alternatives; None: none are verified
    prices: RowPrices = USUAL_PRICES

    @property
    def are_drawn(self) -> bool:
        """Whether a draft worker's hints were drawn, so that no choice may know their values (I4)."""
        return self.calibration is None

    def promise(self, hints: Sequence[Hint], max_len: int) -> Sequence[float]:
        """Acceptance probability of each of a draft worker's hints, given those before it: all that a choice may know
        of them. Of drawn ones it says whether there are any, and the record of `max_len`."""
        if self.calibration is None:
            return self.acceptance[:max_len] if hints else ()
        return [
            self.calibration.chance(hint.confidence, record)
            for hint, record in zip(hints, self.acceptance, strict=False)
        ]

    def chances(self, hints: Sequence[Hint], local: LocalProposal, num_feedable: int, max_fed: int) -> Sequence[float]:
        """Returns what a path promises to the choice of how many hints are fed (`HintPath.chances`). A forced token is
        certain.

        max_fed: most hints of a path that begins with the draft worker's.
        """
        remote = self.promise(hints, max_fed)
        chances, num_local = list[float](), 0
        for position, hint in enumerate(hints[:num_feedable]):
            if is_local(hint):
                chances.append(local.chances[num_local])
                num_local += 1
            elif is_forced(hint):
                chances.append(1.0)
            elif self.are_drawn:
                break
            else:
                chances.append(remote[position])
        return drawn_chances(chances, remote) if self.are_drawn and any(map(is_remote, hints)) else chances

    def branches(self, path: Sequence[Hint], stop_token_ids: frozenset[int], max_fed: int) -> Sequence[LikelyBranch]:
        """Branches beside a path that begins with a draft worker's hints, of which at most `max_fed` may be fed. None
        under a grammar, which may exclude them."""
        if self.of_branches is None or self.calibration is None or self.tree is None or self.grammar is not None:
            return ()
        own = list(itertools.takewhile(is_remote, path))
        if not own:
            return ()
        # Hints of a local source have a limit of their own, and take no places from the draft's.
        max_branches = max_fed if len(own) == len(path) else max_fed - len(own)
        calibrations = self.calibration, self.of_branches
        search = BranchSearch(self.tree, self.acceptance, *calibrations, stop_token_ids, self.prices)
        return search.find(own, max_branches)


def choose_path(
    sources: HintSources,
    committed: Sequence[int],
    stop_token_ids: frozenset[int],
    max_fed: int,
    max_local: int | None = None,
) -> HintPath:
    """Returns the hints below the committed tokens: at most `max_fed`, or `max_local` where the last are local (None:
    as many), and one that is not fed. Under a grammar, whose check costs more with every hint, `max_local` is not used.
    """
    grammar, max_len, max_drafted = sources.grammar, max_fed + 1, max_fed
    if grammar is not None:
        hints, local = _path_within(sources, grammar, committed, max_len)
    else:
        hints, local = _open_path(sources, committed, max_len, max(max_fed, max_local or 0) + 1)
        if local.source is not None:
            max_fed = max(max_fed, max_local or 0)
    num_feedable = min(len(hints), max_fed)
    stop = next((index for index, hint in enumerate(hints) if hint.token_id in stop_token_ids), None)
    if stop is not None:
        hints, num_feedable = hints[: stop + 1], min(stop, num_feedable)
    elif grammar is not None and hints and not _permits(grammar, [hint.token_id for hint in hints]):
        num_feedable = min(len(hints) - 1, num_feedable)
    branches = sources.branches(hints[:num_feedable], stop_token_ids, max_drafted)
    chances = sources.chances(hints, local, num_feedable, max_drafted)
    # Behind drawn hints a prediction has no rows of its own, and whether it goes on there follows from them (I4).
    first = None
    is_predicted = local.source is not None and local.source.kind is HintKind.PREDICTION
    if is_predicted and not (sources.are_drawn and any(map(is_remote, hints))):
        first = next((index for index, hint in enumerate(hints) if hint.node_id == HintKind.PREDICTION), None)
    max_fed = max(max_fed, num_feedable)
    return HintPath(hints, num_feedable, local, chances, branches, max_fed, num_before_prediction=first)


def _open_path(
    sources: HintSources, committed: Sequence[int], max_len: int, max_local_len: int
) -> tuple[list[Hint], LocalProposal]:
    """The draft's path, continued by a local source if it has fewer than `max_len` hints, or a local path."""
    hints = sources.tree.primary_path(max_len) if sources.tree is not None else []
    competing = sources.local
    if hints and sources.are_drawn:
        competing = [each for each in competing if may_compete(each.kind)]
    local = best_proposal(competing, committed, [], max_local_len)
    if not hints or (may_replace(local) and promises_more(local, sources.promise(hints, max_len))):
        return local.hints(), local
    if len(hints) == max_len:
        return hints, NOTHING_LOCAL
    suffix = [hint.token_id for hint in hints]
    local = best_proposal(sources.local, committed, suffix, max_local_len - len(hints))
    return hints + local.hints(), local


def _path_within(
    sources: HintSources, grammar: GrammarState, committed: Sequence[int], max_len: int
) -> tuple[list[Hint], LocalProposal]:
    """Builds a path under a grammar: forced tokens where there are any, otherwise primary children, then a local
    source. Ends after a token that the grammar forbids."""
    tree, hints, local = sources.tree, list[Hint](), NOTHING_LOCAL
    found: list[Hint] | None = None  # rest of the proposal
    node_id = tree.cursor if tree is not None else None
    while len(hints) < max_len:
        path_ids = [hint.token_id for hint in hints]
        try:
            forced = grammar.forced_after(path_ids, max_len - len(hints))
        except GrammarViolation:
            break
        for token_id in forced:
            hints.append(Hint(HintKind.FORCED, HintKind.FORCED, token_id))
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
            if found is None:
                local = best_proposal(sources.local, committed, path_ids, max_len - len(hints))
                found = local.hints()
            if not found:
                break
            following = found.pop(0)
        hints.append(following)
        if not _permits(grammar, [*path_ids, following.token_id]):
            break
    return hints, local


def _permits(grammar: GrammarState, token_ids: list[int]) -> bool:
    """Whether the grammar permits a path; one that exceeds a limit of the parser counts as forbidden."""
    try:
        return grammar.num_valid(token_ids) == len(token_ids)
    except GrammarViolation:
        return False
