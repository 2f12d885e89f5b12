"""Hints that a target worker finds itself: what followed the same tokens before. Pure.

Prompt lookup searches a session's own tokens, prompt included, for its last ones and proposes what followed them;
SuffixDecoding (arXiv 2411.04975) searches the outputs of other sessions, too. Both continue where a remote draft's
hints end.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from target_worker.hints.local_source import MAX_READ, NO_PROPOSAL, HintKind, MatchAcceptance, Proposal
from target_worker.hints.token_index import MIN_MATCH, NOWHERE, SEQUENCE_END, TokenIndex


class RecentOutputs:
    """Outputs of ended sessions of one worker; a scope finds only its own.

    Outputs are kept in segments, each an index of some outputs of one scope. Beyond `max_tokens` in all or
    `max_segments`, the segment that has not grown for longest is dropped as a whole. Being found does not count: an
    output that helped comes back within the output of the session it helped. About 200 bytes per token.
    """

    def __init__(self, *, max_tokens: int = 65536, max_segments: int = 256) -> None:
        if max_tokens < 1 or max_segments < 1:
            raise ValueError("max_tokens and max_segments must be positive")
        self.max_tokens, self.max_segments = max_tokens, max_segments
        self.segment_tokens = -(-max_tokens // 4)
        self.num_tokens = 0  # in segments, with one more for each output
        self.num_unread_tokens = 0
        self._unread: deque[tuple[str, list[int]]] = deque()
        self._segments: dict[str, list[TokenIndex]] = {}  # by scope, oldest first, never empty
        # The scope of every segment, in order of last growth.
        self._scopes: OrderedDict[TokenIndex, str] = OrderedDict()

    def add(self, token_ids: Sequence[int], scope: str = "") -> None:
        """Takes a complete output; `read_some` indexes it later. Only the beginning of a long one is kept.

        Beyond `max_tokens` not yet indexed, the oldest outputs are dropped.
        """
        # The end of the text before stands first: so it is there even if that text is forgotten while half read.
        kept = [SEQUENCE_END, *token_ids[: self.segment_tokens - 1]]
        if len(kept) <= MIN_MATCH + 1:
            return  # nothing could be found in it
        self._unread.append((scope, kept))
        self.num_unread_tokens += len(kept)
        while self.num_unread_tokens > self.max_tokens:
            self.num_unread_tokens -= len(self._unread.popleft()[1])

    def read_some(self, max_tokens: int = MAX_READ) -> None:
        """Indexes at most `max_tokens` of the outputs not yet indexed. Called once per step."""
        while self._unread and max_tokens > 0:
            scope, token_ids = self._unread.popleft()
            now, later = token_ids[:max_tokens], token_ids[max_tokens:]
            max_tokens -= len(now)
            self.num_unread_tokens -= len(now)
            if later:
                self._unread.appendleft((scope, later))
            self._read(scope, now)

    def _read(self, scope: str, token_ids: list[int]) -> None:
        segments = self._segments.get(scope)
        if segments is None or len(segments[-1]) + len(token_ids) > self.segment_tokens:
            segment = TokenIndex()
            self._segments.setdefault(scope, []).append(segment)
        else:
            segment = segments[-1]
        segment.append(token_ids)
        self._scopes[segment] = scope
        self._scopes.move_to_end(segment)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens or len(self._scopes) > self.max_segments:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        segment, scope = self._scopes.popitem(last=False)
        self.num_tokens -= len(segment)
        segments = self._segments[scope]
        segments.remove(segment)
        if not segments:
            del self._segments[scope]

    def continuation(self, window: list[int], max_len: int, scope: str = "") -> tuple[list[int], int]:
        """Returns (at most `max_len` tokens that followed the end of `window` in an output of `scope`, match
        length)."""
        found, position, match_len = None, NOWHERE, 0
        for segment in reversed(self._segments.get(scope, ())):
            other_position, other_len = segment.find(window)
            if other_len > match_len:
                found, position, match_len = segment, other_position, other_len
        return (found.following(position, max_len), match_len) if found is not None else ([], 0)


PRIOR_RATES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.9)
"""Acceptance rates after matches of 1, 2–3, 4–7, 8–15, 16–31 and more tokens. Measured with the demo's tokenizer on
Python sources and manuals, 25 % of each given and the rest predicted: 0.22, 0.46, 0.66, 0.76, 0.87 and 0.93."""


class LookupHints:
    """One session's hints from its own tokens and, where permitted, from recent outputs of its scope."""

    kind = HintKind.LOOKUP

    def __init__(self, recent: RecentOutputs | None = None, scope: str = "") -> None:
        self._own = TokenIndex()
        self._recent, self._scope = recent, scope
        self._asked_len = 0  # committed tokens of the last proposal
        self._own_acceptance, self._recent_acceptance = MatchAcceptance(PRIOR_RATES), MatchAcceptance(PRIOR_RATES)

    def read(self, committed: Sequence[int], max_tokens: int = MAX_READ) -> bool:
        """Indexes at most `max_tokens` of what was committed since the last call; returns whether that was all."""
        num_read = len(self._own)
        self._own.append(committed[num_read : num_read + max_tokens])
        return len(self._own) == len(committed)

    def propose(self, committed: Sequence[int], suffix: Sequence[int], max_len: int) -> Proposal:
        """Proposes at most `max_len` tokens after the committed ones and the hints already on the path.

        The longer match wins, the session's own among equals. Proposes nothing until a long prompt has been indexed. It
        reads once for each committed length: how far it is must not follow from how often a step that waits for drawn
        hints asks (I4).
        """
        if self._asked_len != len(committed):
            self._asked_len = len(committed)
            self.read(committed)
        if len(self._own) < len(committed) or max_len <= 0:
            return NO_PROPOSAL
        token_ids, match_len = self._own.continuation(suffix, max_len)
        if self._recent is not None and match_len < self._own.max_match:
            others, other_len = self._recent.continuation(self._own.window(suffix), max_len, self._scope)
            if other_len > match_len:
                return Proposal(others, other_len, is_recent=True)
        return Proposal(token_ids, match_len)

    def chances(self, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the probability that it is accepted, given that all before it are."""
        return self._acceptance_of(proposal).chances(proposal.match_len, len(proposal.token_ids))

    def observe(self, proposal: Proposal, num_matched: int, num_verified: int) -> None:
        """Takes the outcome of a proposal of which `num_verified` tokens were reached and verified."""
        self._acceptance_of(proposal).observe(proposal.match_len, num_matched, num_verified)

    def _acceptance_of(self, proposal: Proposal) -> MatchAcceptance:
        return self._recent_acceptance if proposal.is_recent else self._own_acceptance
