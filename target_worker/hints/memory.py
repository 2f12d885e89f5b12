"""Hints of a memory worker, beside those of a draft worker: what followed the same tokens in other sequences. Pure.

They have a hint tree of their own, which stands behind the interface of local sources. So they continue a draft's path,
compete with lookup and a client's prediction, and are not mixed with what is known of the draft worker: its acceptance,
its calibration, whether its hints pay and how long they are waited for.

A path counts as one after a match: the tokens before the tree's root that the memory worker found elsewhere, and those
that agreed with the tree since. In greedy and coupled mode the memory's confidence in a token, its share of what
followed, refines the probability; under rejection sampling only match lengths and earlier outcomes do (invariant I4).
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.hint_service.messages import HintsArrived
from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import Hint, HintTree
from target_worker.hints.local_source import MAX_READ, NO_PROPOSAL, HintKind, MatchAcceptance, Proposal

PRIOR_RATES = (0.4, 0.45, 0.6, 0.74, 0.87, 0.9)
"""Acceptance rates after matches of at most 1, of 2–3, 4–7, 8–15, 16–31 and more tokens: those that a memory worker
assumes."""


class MemoryHints:
    """One session's hints from memory workers."""

    kind = HintKind.MEMORY

    def __init__(self, committed_len: int, calibration: Calibration | None) -> None:
        """calibration: of memory workers' confidence; None under rejection sampling."""
        self._tree = HintTree()
        self._num_read = committed_len
        self._match_len = 0  # tokens before the root
        self._calibration = calibration
        self._acceptance = MatchAcceptance(PRIOR_RATES)
        self._outcome = 0, 0

    def add(self, committed: Sequence[int], event: HintsArrived) -> None:
        """Takes hints that arrived for a session with these committed tokens."""
        self.read(committed)
        root = self._tree.root
        self._tree.add(committed, event.attachment, event.base_len, event.hints)
        if self._tree.root != root:
            self._match_len = event.match_len

    def read(self, committed: Sequence[int], max_tokens: int = MAX_READ) -> bool:
        """Moves the tree's cursor along what was committed since the last call. All of it at once: a tree is not deep,
        and after tokens that leave it nothing is left to do."""
        self._tree.commit(committed[self._num_read :])
        self._num_read = len(committed)
        return True

    def propose(self, committed: Sequence[int], suffix: Sequence[int], max_len: int) -> Proposal:
        """Proposes at most `max_len` tokens after the committed ones and the hints already on the path."""
        self.read(committed)
        tree, node_id, path = self._tree, self._tree.cursor, list[Hint]()
        for token_id in suffix:
            child = tree.child_with_token(node_id, token_id)
            node_id = None if child is None else child.node_id
        while len(path) < max_len and (child := tree.primary_child(node_id)) is not None:
            path.append(child)
            node_id = child.node_id
        if not path:
            return NO_PROPOSAL
        match_len = self._match_len + len(committed) - tree.root[1] + len(suffix)
        confidences = [] if self._calibration is None else [hint.confidence for hint in path]
        return Proposal([hint.token_id for hint in path], match_len, confidences=confidences)

    def chances(self, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the probability that it is accepted, given that all before it are."""
        records = self._acceptance.chances(proposal.match_len, len(proposal.token_ids))
        if self._calibration is None:
            return records
        return [
            self._calibration.chance(confidence, record)
            for confidence, record in zip(proposal.confidences, records, strict=True)
        ]

    def observe(self, proposal: Proposal, num_matched: int, num_verified: int) -> None:
        """Takes the outcome of a proposal of which `num_verified` tokens were reached and verified."""
        if self._calibration is not None:
            records = self._acceptance.chances(proposal.match_len, num_verified)
            tried = zip(proposal.confidences, records[: num_matched + 1], strict=False)
            for position, (confidence, record) in enumerate(tried):
                self._calibration.observe(confidence, record, is_accepted=position < num_matched)
        self._acceptance.observe(proposal.match_len, num_matched, num_verified)
        self._outcome = num_verified, num_matched

    def take_outcome(self) -> tuple[int, int]:
        """Returns (hints verified, hints accepted) since the last call, for the memory workers."""
        outcome, self._outcome = self._outcome, (0, 0)
        return outcome
