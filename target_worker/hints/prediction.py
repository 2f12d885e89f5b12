"""Hints from a client's prediction of its output: OpenAI's Predicted Outputs, `prediction` of a request. Pure.

The output is followed through the prediction token by token. Where the two differ, the position from which to continue
is searched from there on: a deleted part is skipped, nothing is proposed during an inserted or changed one, and a block
that moved is found behind. A position counts if the `MIN_EVIDENCE` tokens before it are the last ones of the output, so
it matters little how the text at the border of an edit is tokenized. Among `MAX_CANDIDATES` positions the longest match
wins, among equals the nearest.

Work is bounded: a token that agrees is one comparison, and one that does not is a search of at most `SEARCH_AHEAD`
tokens ahead and `SEARCH_BEHIND` behind. The prediction is kept as a string with one character for each token, so that
both are single calls of `str`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from target_worker.hints.local_source import MAX_READ, NO_PROPOSAL, HintKind, MatchAcceptance, Proposal

LOST = -1
MIN_EVIDENCE = 2
MAX_EVIDENCE = 8
MAX_CANDIDATES = 8
SEARCH_AHEAD = 4096
SEARCH_BEHIND = 1024
PART_LEN = 32
MAX_SEARCHES = 64
"""Tokens that are searched for per call, about 1 ms: the most that a replayed output costs one step."""
CONFIRMED = 8
"""Length of agreement from which a position is trusted: the next search begins where the agreement ends. After a
shorter one it begins where the last did."""
PRIOR_RATES = (0.7, 0.5, 0.7, 0.85, 0.93, 0.97)
"""Acceptance rates of the first tokens of all, and after agreements of 2–3, 4–7, 8–15, 16–31 and more tokens."""
_NUM_CODE_POINTS = 0x110000


class Alignment(NamedTuple):
    """How the output so far lies in the prediction."""

    position: int  # of the token that is expected next, or LOST
    agreement: int  # tokens before it that are the output's last ones, as far as they were compared
    anchor: int  # position from which a lost output is searched
    tail: str  # the output's last tokens, at most MAX_EVIDENCE


BEGIN = Alignment(0, 0, 0, "")


class PredictionHints:
    """One session's hints from what its client predicts."""

    kind = HintKind.PREDICTION

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """`token_ids`: the predicted output, whose first token is committed after `num_prompt_tokens`."""
        self._token_ids = array("q", token_ids)
        self._text = ""  # of what was read
        self._num_read = num_prompt_tokens  # committed tokens
        self._at = BEGIN
        self._asked_len = 0  # committed tokens of the last proposal
        self._acceptance = MatchAcceptance(PRIOR_RATES)

    def read(self, committed: Sequence[int], max_tokens: int = MAX_READ) -> bool:
        """Reads at most `max_tokens` each of the prediction and of what was committed since the last call, and fewer
        where they disagree; returns whether that was all that was committed."""
        if len(self._text) < len(self._token_ids):
            self._text += _as_text(self._token_ids[len(self._text) : len(self._text) + max_tokens])
        end, num_searches = min(self._num_read + max_tokens, len(committed)), 0
        while self._num_read < end and num_searches < MAX_SEARCHES:
            part = committed[self._num_read : min(self._num_read + PART_LEN, end)]
            before, self._at = self._at, self.follow(self._at, _as_text(part))
            self._num_read += len(part)
            if self._at.agreement != before.agreement + len(part):
                num_searches += len(part)
        return self._num_read >= len(committed)

    def propose(self, committed: Sequence[int], suffix: Sequence[int], max_len: int) -> Proposal:
        """Proposes at most `max_len` tokens after the committed ones and the hints already on the path.

        Proposes nothing while the output is lost, and until all committed tokens were read. It reads once for each
        committed length, as lookup does.
        """
        if self._asked_len != len(committed):
            self._asked_len = len(committed)
            self.read(committed)
        if self._num_read < len(committed) or max_len <= 0:
            return NO_PROPOSAL
        at = self.follow(self._at, _as_text(suffix)) if suffix else self._at
        if at.position == LOST:
            return NO_PROPOSAL
        token_ids = self._token_ids[at.position : at.position + max_len].tolist()
        return Proposal(token_ids, at.agreement) if token_ids else NO_PROPOSAL

    def chances(self, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the probability that it is accepted, given that all before it are."""
        return self._acceptance.chances(proposal.match_len, len(proposal.token_ids))

    def observe(self, proposal: Proposal, num_matched: int, num_verified: int) -> None:
        """Takes the outcome of a proposal of which `num_verified` tokens were reached and verified."""
        self._acceptance.observe(proposal.match_len, num_matched, num_verified)

    def follow(self, at: Alignment, tokens: str) -> Alignment:
        """Returns the alignment after further tokens of the output."""
        position, agreement, anchor, tail = at
        seen, num_before, index = tail + tokens, len(tail), 0
        while index < len(tokens):
            if position != LOST:
                num_equal = _num_equal(self._text, position, tokens, index)
                position, agreement, index = position + num_equal, agreement + num_equal, index + num_equal
                if index == len(tokens):
                    break
                if agreement >= CONFIRMED:
                    anchor = position
            end = num_before + index + 1
            position, agreement = self._find(seen[max(end - MAX_EVIDENCE, 0) : end], anchor)
            index += 1
        return Alignment(position, agreement, anchor, seen[-MAX_EVIDENCE:])

    def _find(self, window: str, anchor: int) -> tuple[int, int]:
        """Returns (position after the best match of the end of `window`, its length), or (LOST, 0)."""
        if len(window) < MIN_EVIDENCE:
            return LOST, 0
        text, gram = self._text, window[-MIN_EVIDENCE:]
        best, best_len = LOST, 0
        start, end = max(anchor - MIN_EVIDENCE, 0), anchor + SEARCH_AHEAD
        for _ in range(MAX_CANDIDATES):
            found = text.find(gram, start, end)
            if found < 0:
                break
            length = _match_len(text, found + MIN_EVIDENCE, window)
            if length > best_len:
                best, best_len = found + MIN_EVIDENCE, length
                if length == len(window):
                    break
            start = found + 1
        if best == LOST:
            found = text.rfind(gram, max(anchor - SEARCH_BEHIND, 0), anchor)
            if found >= 0:
                best = found + MIN_EVIDENCE
                best_len = _match_len(text, best, window)
        return best, best_len


def _as_text(token_ids: Iterable[int]) -> str:
    """One character for each token. Ids above all code points, which no vocabulary has, share others' characters."""
    return "".join([chr(token_id % _NUM_CODE_POINTS) for token_id in token_ids])


def _num_equal(text: str, position: int, tokens: str, index: int) -> int:
    """Length of the common beginning of `text` from `position` on and `tokens` from `index` on."""
    num_left = len(tokens) - index
    if text.startswith(tokens[index:], position):
        return num_left
    most = min(num_left, len(text) - position)
    return next((i for i in range(most) if text[position + i] != tokens[index + i]), most)


def _match_len(text: str, position: int, window: str) -> int:
    """Length of the common end of `text` before `position` and `window`, which have MIN_EVIDENCE tokens in common."""
    length, longest = MIN_EVIDENCE, min(len(window), position)
    while length < longest and text[position - length - 1] == window[-length - 1]:
        length += 1
    return length
