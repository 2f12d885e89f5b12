"""Hints that a target worker finds by itself: what followed when the text last stood like this. Pure.

Prompt lookup searches a session's own text, prompt included, for its last tokens and proposes what came after them;
SuffixDecoding (arXiv 2411.04975) searches what other sessions said, too. Both go on where a remote draft's hints end.

A proposal is a function of the tokens before it, so its draft distribution is a single token, which verification
takes a hint without a distribution for. How much of it is verified may then depend on anything that stands before it;
here it depends on lengths of matches and on what became of earlier proposals only (invariant I4).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from outrider.acceptance import AcceptanceHistory
from target_worker.text_index import MAX_MATCH, MIN_MATCH, NOWHERE, TEXT_END, TextIndex

MAX_READ = 1024
"""Tokens indexed in one go, some 0.2 ms: the most that a long prompt or output takes away from one step."""


class RecentOutputs:
    """What sessions of one worker said that have ended; those of a scope find only each other's.

    Outputs are kept in segments, each the index of some outputs of one scope. Past `max_tokens` in all or
    `max_segments` the segment that has not grown for longest is forgotten as a whole. Being found does not count: a
    text that helped comes back with the output of the session that it helped. Some 200 bytes a token.
    """

    def __init__(
        self,
        *,
        max_tokens: int = 65536,
        max_segments: int = 256,
        min_match: int = MIN_MATCH,
        max_match: int = MAX_MATCH,
    ) -> None:
        if max_tokens < 1 or max_segments < 1:
            raise ValueError("max_tokens and max_segments must be positive")
        self.max_tokens, self.max_segments = max_tokens, max_segments
        self.segment_tokens = -(-max_tokens // 4)
        self.min_match, self.max_match = min_match, max_match
        self.num_tokens = 0  # in segments, with one more for each output
        self.num_unread_tokens = 0
        self._unread: deque[tuple[str, list[int]]] = deque()
        self._segments: dict[str, list[TextIndex]] = {}  # by scope, oldest first, none of them empty
        self._scopes: OrderedDict[TextIndex, str] = OrderedDict()  # of every segment, in order of last growth

    def __len__(self) -> int:
        """Segments."""
        return len(self._scopes)

    def add(self, token_ids: Sequence[int], scope: str = "") -> None:
        """Takes an output that is complete; `read_some` indexes it. Of a long one the beginning counts.

        Past `max_tokens` that wait to be read, those that have waited longest are forgotten.
        """
        # The end of the text before stands first: so it is there even if that text is forgotten while half read.
        kept = [TEXT_END, *token_ids[: self.segment_tokens - 1]]
        if len(kept) <= self.min_match + 1:
            return  # nothing could be found in it
        self._unread.append((scope, kept))
        self.num_unread_tokens += len(kept)
        while self.num_unread_tokens > self.max_tokens:
            self.num_unread_tokens -= len(self._unread.popleft()[1])

    def read_some(self, max_tokens: int = MAX_READ) -> None:
        """Indexes at most `max_tokens` of what waits. To be called once a step."""
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
            segment = TextIndex(min_match=self.min_match, max_match=self.max_match)
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
        """(at most `max_len` tokens that followed the end of `window` in an output of `scope`, match length)."""
        found, place, match_len = None, NOWHERE, 0
        for segment in reversed(self._segments.get(scope, ())):
            other_place, other_len = segment.find(window)
            if other_len > match_len:
                found, place, match_len = segment, other_place, other_len
        return (found.following(place, max_len), match_len) if found is not None else ([], 0)


class Proposal(NamedTuple):
    """Tokens that may come next, and how long the match is that says so."""

    token_ids: list[int]
    match_len: int  # tokens before the first of token_ids; 0 without any
    is_recent: bool = False  # found in recent outputs, not in the session's own text


NO_PROPOSAL = Proposal([], 0)

PRIOR_RATES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.9)
"""After matches of 1, 2–3, 4–7, 8–15, 16–31 and more tokens. Python sources and manuals, a quarter of each given and
the rest predicted, had 0.22, 0.46, 0.66, 0.76, 0.87 and 0.93, with the demo's tokenizer.
"""
PRIOR_WEIGHT = 4.0  # tokens tried


class LookupAcceptance:
    """How often proposed tokens held, by the length of the match before them.

    A proposed token that holds makes the match longer by one, so token i of a proposal counts as one after a match of
    `match_len + i` tokens; lengths share an entry by powers of two.
    """

    def __init__(self) -> None:
        self._histories = [AcceptanceHistory(rate * PRIOR_WEIGHT, PRIOR_WEIGHT) for rate in PRIOR_RATES]

    def history(self, match_len: int) -> AcceptanceHistory:
        return self._histories[min(match_len.bit_length(), len(self._histories)) - 1]

    def chances(self, match_len: int, num_tokens: int) -> list[float]:
        """For each of `num_tokens` proposed, the chance that it holds, given that those before it do."""
        return [self.history(match_len + i).rate for i in range(num_tokens)]

    def observe(self, match_len: int, num_held: int, num_verified: int) -> None:
        """Of `num_verified` tokens the first `num_held` held; those behind a rejection were not tried."""
        for i in range(min(num_held + 1, num_verified)):
            self.history(match_len + i).observe(int(i < num_held), 1)


class LocalHints:
    """One session's hints from its own text and, where it may see them, from recent outputs of its scope."""

    def __init__(
        self,
        recent: RecentOutputs | None = None,
        scope: str = "",
        *,
        min_match: int = MIN_MATCH,
        max_match: int = MAX_MATCH,
    ) -> None:
        self._own = TextIndex(min_match=min_match, max_match=max_match)
        self._recent, self._scope = recent, scope
        self._own_acceptance, self._recent_acceptance = LookupAcceptance(), LookupAcceptance()

    def read(self, committed: Sequence[int], max_tokens: int = MAX_READ) -> bool:
        """Indexes at most `max_tokens` of what was committed since the last call; whether that was all."""
        num_read = len(self._own)
        self._own.append(committed[num_read : num_read + max_tokens])
        return len(self._own) == len(committed)

    def propose(self, committed: Sequence[int], said: Sequence[int], max_len: int) -> Proposal:
        """At most `max_len` tokens after the committed ones and `said`, hints that are on the path already.

        The longer match wins, the session's own among equals. Nothing while a long text has not all been read.
        """
        if not self.read(committed) or max_len <= 0:
            return NO_PROPOSAL
        token_ids, match_len = self._own.continuation(said, max_len)
        if self._recent is not None and match_len < self._own.max_match:
            others, other_len = self._recent.continuation(self._own.window(said), max_len, self._scope)
            if other_len > match_len:
                return Proposal(others, other_len, is_recent=True)
        return Proposal(token_ids, match_len)

    def chances(self, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the chance that it holds, given that all before it do."""
        return self._acceptance_of(proposal).chances(proposal.match_len, len(proposal.token_ids))

    def observe(self, proposal: Proposal, num_held: int, num_verified: int) -> None:
        """Of a proposal the first `num_verified` were verified, all before it having held; `num_held` held."""
        self._acceptance_of(proposal).observe(proposal.match_len, num_held, num_verified)

    def _acceptance_of(self, proposal: Proposal) -> LookupAcceptance:
        return self._recent_acceptance if proposal.is_recent else self._own_acceptance
