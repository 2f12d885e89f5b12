"""Hints of a draft head that runs beside the target's model, on the states that it has computed. Pure.

The head drafts between two steps, for the sessions that `scheduling.head_turns` chooses. What it drafted follows the
tokens committed then, and nothing else: it proposes nothing behind another source's hints.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.concurrency.decayed_mean import DecayedMean
from outrider.engine.kv.kv_cache import KVSequence
from outrider.hints.acceptance import DECAY, AcceptanceHistory, BlockAcceptance
from outrider.hints.confidence import Calibration
from target_worker.hints.local_source import MAX_READ, NO_PROPOSAL, PRIOR_WEIGHT, HintKind, Proposal

NUM_PASSED_OVER = 64
"""Steps without its hints after which a head is tried anew."""
NUM_PASSED_OVER_MAX = 1024


class HeadHints:
    """One session's hints from a draft head."""

    kind = HintKind.HEAD

    def __init__(
        self, kv: KVSequence | None, calibration: Calibration | None = None, usual: AcceptanceHistory | None = None
    ) -> None:
        """kv: of the head, whose entries have all been run on states of the target; None for a head without attention.
        calibration: of the head's confidence; None under rejection sampling, which must not use it (I4). usual: the
        acceptance of all sessions' hints, from which this one's begins."""
        self.kv = kv
        self.calibration, self._usual = calibration, usual
        self._acceptance = self._initial_acceptance()
        self._base_len = -1  # committed tokens that the draft follows
        self._token_ids: list[int] = []
        self._levels: list[int] = []  # confidence in each
        self._num_passed_over = 0
        self._retry_after = NUM_PASSED_OVER

    def _initial_acceptance(self) -> BlockAcceptance:
        if self._usual is None:
            return BlockAcceptance()
        return BlockAcceptance(AcceptanceHistory(DecayedMean(DECAY, self._usual.rate * PRIOR_WEIGHT, PRIOR_WEIGHT)))

    def num_pending(self, committed_len: int) -> int:
        """Committed tokens that the head must run before, or while, it drafts what follows them."""
        return 1 if self.kv is None else committed_len - self.kv.length

    def has_drafted(self, committed_len: int) -> bool:
        """Whether the draft follows exactly so many committed tokens."""
        return self._base_len == committed_len

    def take(self, committed_len: int, token_ids: Sequence[int], levels: Sequence[int]) -> None:
        """Takes a draft of the tokens that follow; levels: confidence in each (`confidence.confidence_level`)."""
        self._base_len, self._token_ids, self._levels = committed_len, list(token_ids), list(levels)
        self._num_passed_over = 0

    def pass_over(self) -> None:
        """Notes a step for which it was not worth drafting. After some of them the acceptance that it began with
        counts again: where nothing is drafted, nothing shows that it has become better."""
        self._num_passed_over += 1
        if self._num_passed_over >= self._retry_after:
            self._acceptance, self._num_passed_over = self._initial_acceptance(), 0
            self._retry_after = min(2 * self._retry_after, NUM_PASSED_OVER_MAX)

    def likely(self, num_hints: int) -> list[float]:
        """Acceptance probability of each hint of a draft not made yet, given those before it."""
        return self._acceptance.chances(num_hints)

    def forget(self) -> None:
        """Returns its KV blocks; the head would run all tokens again."""
        if self.kv is not None:
            self.kv.free()

    def read(self, committed: Sequence[int], max_tokens: int = MAX_READ) -> bool:
        """Reads nothing: the head reads what it needs when it drafts."""
        return True

    def propose(self, committed: Sequence[int], suffix: Sequence[int], max_len: int) -> Proposal:
        """Proposes what was drafted, if it follows exactly the committed tokens."""
        if suffix or max_len <= 0 or not self.has_drafted(len(committed)):
            return NO_PROPOSAL
        return Proposal(self._token_ids[:max_len], 0)

    def chances(self, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the probability that it is accepted, given that all before it are."""
        records = self.likely(len(proposal.token_ids))
        if self.calibration is None:
            return records
        return [self.calibration.chance(level, record) for level, record in zip(self._levels, records, strict=False)]

    def observe(self, proposal: Proposal, num_matched: int, num_verified: int) -> None:
        """Takes the outcome of a proposal of which `num_verified` tokens were reached and verified."""
        if not num_verified:
            return
        if self.calibration is not None:
            records = self.likely(num_verified)
            for index in range(min(num_matched + 1, num_verified)):
                self.calibration.observe(self._levels[index], records[index], is_accepted=index < num_matched)
        self._acceptance.observe(num_matched, num_verified)
        if self._usual is not None:
            self._usual.observe(num_matched, num_verified)
        if num_matched:
            self._retry_after = NUM_PASSED_OVER
