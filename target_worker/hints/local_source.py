"""Local sources of hints: what the target worker finds itself, without a draft worker. Pure.

A source proposes tokens that may follow the committed ones, says how probable each is, and learns from what became of
its proposals. `best_proposal` takes the source that promises the most. A source that knows only what follows the
committed tokens, such as a draft head (`head_hints`), proposes nothing behind other hints.

A proposal is a function of the tokens before it, so its draft distribution is a single token, which is how verification
reads a hint without a distribution. How much of it is verified may therefore depend on anything before it; here it
depends only on match lengths and on the outcome of earlier proposals (invariant I4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from outrider.concurrency.decayed_mean import DecayedMean
from outrider.hints.acceptance import DECAY, AcceptanceHistory
from outrider.hints.hint_tree import Hint

MAX_READ = 1024
"""Tokens that a source reads per call, about 0.2 ms: the most that a long prompt or output costs one step."""
PRIOR_WEIGHT = 4.0  # in verified tokens


class HintKind(IntEnum):
    """The source of a hint that no draft worker sent, as its node id: those of draft workers are not negative."""

    FORCED = -1  # the grammar permits nothing else
    LOOKUP = -2
    PREDICTION = -3
    HEAD = -4
    MEMORY = -5


class Proposal(NamedTuple):
    """Tokens that may come next, and the length of the match that suggests them."""

    token_ids: list[int]
    match_len: int  # tokens before the first of token_ids; 0 without any
    is_recent: bool = False  # found in recent outputs instead of the session's own tokens
    confidences: Sequence[int] = ()  # in each token, where the source has any (`outrider.hints.confidence`)


NO_PROPOSAL = Proposal([], 0)


class LocalSource(Protocol):
    """One session's hints of one kind."""

    kind: HintKind

    def read(self, committed: Sequence[int], max_tokens: int = MAX_READ) -> bool:
        """Reads at most `max_tokens` of what was committed since the last call; returns whether that was all."""

    def propose(self, committed: Sequence[int], suffix: Sequence[int], max_len: int) -> Proposal:
        """Proposes at most `max_len` tokens after the committed ones and the hints already on the path."""

    def chances(self, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the probability that it is accepted, given that all before it are."""

    def observe(self, proposal: Proposal, num_matched: int, num_verified: int) -> None:
        """Takes the outcome of a proposal of which `num_verified` tokens were reached and verified."""


@dataclass(frozen=True, slots=True)
class LocalProposal:
    """A proposal with its source and the probabilities of its tokens."""

    source: LocalSource | None = None
    proposal: Proposal = NO_PROPOSAL
    chances: Sequence[float] = ()  # acceptance probability of each token, given those before it

    @property
    def expected(self) -> float:
        """Expected number of accepted tokens."""
        return expected_tokens(self.chances)

    def hints(self) -> list[Hint]:
        """The proposed tokens as hints of their kind."""
        if self.source is None:
            return []
        kind = self.source.kind
        return [Hint(kind, kind, token_id) for token_id in self.proposal.token_ids]


NOTHING_LOCAL = LocalProposal()


def best_proposal(
    sources: Sequence[LocalSource], committed: Sequence[int], suffix: Sequence[int], max_len: int
) -> LocalProposal:
    """Returns the proposal with the most expected tokens; among equals that of the first source."""
    best, best_expected = NOTHING_LOCAL, 0.0
    for source in sources:
        proposal = source.propose(committed, suffix, max_len)
        if proposal.token_ids:
            candidate = LocalProposal(source, proposal, source.chances(proposal))
            if (expected := candidate.expected) > best_expected:
                best, best_expected = candidate, expected
    return best


def expected_tokens(chances: Sequence[float]) -> float:
    """Expected number of accepted hints in a chain, from each hint's probability given those before it."""
    total, chance = 0.0, 1.0
    for own in chances:
        chance *= own
        total += chance
    return total


class MatchAcceptance:
    """Acceptance of proposed tokens, by the length of the match before them.

    An accepted token lengthens the match by one, so token i of a proposal counts as one after a match of `match_len +
    i` tokens; lengths share an entry by powers of two.
    """

    def __init__(self, prior_rates: Sequence[float]) -> None:
        """`prior_rates`: after matches of at most 1, of 2–3, 4–7 and so on, the last for all that are longer."""
        self._histories = [
            AcceptanceHistory(DecayedMean(DECAY, rate * PRIOR_WEIGHT, PRIOR_WEIGHT)) for rate in prior_rates
        ]

    def history(self, match_len: int) -> AcceptanceHistory:
        return self._histories[min(max(match_len.bit_length(), 1), len(self._histories)) - 1]

    def chances(self, match_len: int, num_tokens: int) -> list[float]:
        """For each of `num_tokens` proposed, the probability that it is accepted, given that those before it are."""
        rates = [each.rate for each in self._histories]
        last = len(rates)
        return [rates[min(max((match_len + i).bit_length(), 1), last) - 1] for i in range(num_tokens)]

    def observe(self, match_len: int, num_matched: int, num_verified: int) -> None:
        """Takes a verified block whose leading tokens were accepted; those behind a rejection do not count."""
        for i in range(min(num_matched + 1, num_verified)):
            self.history(match_len + i).observe(int(i < num_matched), 1)
