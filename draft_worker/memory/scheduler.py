"""Scheduler of one memory worker: remembers what is committed, and answers with what followed such tokens before. Pure.

A session's output is remembered as it is committed, so that others of its scope find it at once. Its prompt is not:
lookup on the target searches that. A session's hint tree is sent anew, below a newer root, when it is half used up or
the committed tokens have left it; what the target commits meanwhile only moves its cursor down the tree.

What waits to be remembered, and what is kept of sessions that have left, is bounded as the memory itself is: beyond a
bound the tenant with the most loses its oldest.

A target that pauses hints sends the rest of the output when the session ends, so a paused session is remembered, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

from draft_worker.attachments import Attachments
from draft_worker.memory.guesses import GuessTree, MatchAcceptance
from draft_worker.memory.options import MemoryLimits
from draft_worker.memory.token_memory import TOKEN_ID_MAX, RememberedSequence, TokenMemory
from draft_worker.messages import Action, AttachSession, CommitReceived, SendHints, Subscribe

MAX_READ: Final = 2048
"""Tokens remembered at a time, about 2 ms: the most that one long output delays the hints of others."""
SEQUENCES_KEPT: Final = 4096
"""Sequences of sessions that were detached, to go on with when they are attached again."""


@dataclass(slots=True)
class MemorySession:
    """A session that is followed, and the tree that its target has."""

    session_id: str
    attachment: int
    target_address: str
    sequence: RememberedSequence
    max_len: int  # of the whole sequence, tokens
    attached_at: float  # shell's clock, seconds
    is_background: bool = False
    acceptance: MatchAcceptance = field(default_factory=MatchAcceptance)
    tree: GuessTree = field(default_factory=lambda: GuessTree(0))
    accepts_hints: bool = True
    num_unread: int = 0  # tokens in the backlog
    num_sent_nodes: int = 0
    num_roots: int = 0

    @property
    def committed_len(self) -> int:
        return self.sequence.committed_len + self.num_unread


@dataclass(slots=True)
class MemoryCounts:
    """Events counted since the start."""

    num_lookups: int = 0
    num_hits: int = 0  # lookups that found something
    num_verified: int = 0  # hints, told by targets
    num_accepted: int = 0


class MemoryScheduler(Attachments[MemorySession]):
    """All sessions of one memory worker."""

    def __init__(self, limits: MemoryLimits) -> None:
        super().__init__(limits.max_num_seqs, limits.max_model_len, TOKEN_ID_MAX + 1)
        self.limits = limits
        self.memory = TokenMemory(max_tokens=limits.max_memory_tokens, max_scopes=limits.max_scopes)
        self.counts = MemoryCounts()
        self._left: OrderedDict[str, RememberedSequence] = OrderedDict()  # by session id
        self._num_left: Counter[str] = Counter()  # by tenant
        self._backlog: OrderedDict[str, tuple[MemorySession, list[int]]] = OrderedDict()  # tokens not remembered yet
        self._num_unread = 0  # tokens in it

    @property
    def has_backlog(self) -> bool:
        """Whether tokens wait for `read_backlog`."""
        return bool(self._backlog)

    def _admit(self, event: AttachSession, now: float) -> MemorySession:
        num_prompt_tokens = event.num_prompt_tokens or len(event.token_ids)
        scope = event.owner, event.cache_salt
        sequence = self._take_left(event.session_id)
        if sequence is None or sequence.scope != scope or sequence.committed_len > len(event.token_ids):
            sequence = RememberedSequence.after(scope, event.token_ids[:num_prompt_tokens])
        max_len = num_prompt_tokens + event.sampling.max_tokens
        told = event.session_id, event.attachment, event.target_address
        session = MemorySession(*told, sequence, max_len, now, event.is_background)
        self._remember(session, event.token_ids[sequence.committed_len :])
        return session

    def _subscribe(self, session: MemorySession) -> Subscribe:
        where = session.target_address, session.session_id, session.attachment
        return Subscribe(*where, session.committed_len, is_memory=True)

    def _begin(self, session: MemorySession) -> list[Action]:
        return self._propose(session)

    def _resend(self, session: MemorySession) -> list[Action]:
        session.tree = GuessTree(0)  # what was sent may be lost
        return self._propose(session)

    def _judge(self, session: MemorySession, num_matched: int, num_verified: int) -> None:
        self.counts.num_verified += num_verified
        self.counts.num_accepted += num_matched

    def _commit(
        self, session: MemorySession, event: CommitReceived, token_ids: list[int], now: float, *, is_resumed: bool
    ) -> list[Action]:
        self._end(session, token_ids)
        return self._resend(session) if is_resumed else self._propose(session)

    def _end(self, session: MemorySession, token_ids: list[int]) -> None:
        session.tree.commit(token_ids, session.acceptance)
        self._remember(session, token_ids)

    def _forget(self, session: MemorySession) -> None:
        if session.session_id not in self._backlog:
            self._left[session.session_id] = session.sequence
            self._num_left[session.sequence.scope[0]] += 1
            if len(self._left) > SEQUENCES_KEPT:
                most = _most(self._num_left)
                self._take_left(next(each for each, left in self._left.items() if left.scope[0] == most))

    def _take_left(self, session_id: str) -> RememberedSequence | None:
        sequence = self._left.pop(session_id, None)
        if sequence is not None:
            owner = sequence.scope[0]
            self._num_left[owner] -= 1
            if not self._num_left[owner]:
                del self._num_left[owner]
        return sequence

    def _remember(self, session: MemorySession, token_ids: list[int]) -> None:
        """Remembers a session's new tokens, many of them later."""
        if not session.num_unread and len(token_ids) <= MAX_READ:
            self.memory.append(session.sequence, token_ids)
            return
        _, unread = self._backlog.setdefault(session.session_id, (session, []))
        unread += token_ids
        session.num_unread += len(token_ids)
        self._num_unread += len(token_ids)
        while self._num_unread > self.limits.max_memory_tokens:
            unread_of = Counter[str]()
            for late, skipped in self._backlog.values():
                unread_of[late.sequence.scope[0]] += len(skipped)
            most = _most(unread_of)
            late, skipped = self._backlog.pop(
                next(each for each, (late, _) in self._backlog.items() if late.sequence.scope[0] == most)
            )
            self._take_from_backlog(late, skipped)
            late.sequence.skip(skipped)

    def _take_from_backlog(self, session: MemorySession, token_ids: list[int]) -> None:
        session.num_unread -= len(token_ids)
        self._num_unread -= len(token_ids)

    def read_backlog(self) -> list[Action]:
        """Remembers at most MAX_READ tokens of those that wait."""
        session_id, (session, unread) = self._backlog.popitem(last=False)
        now, later = unread[:MAX_READ], unread[MAX_READ:]
        self.memory.append(session.sequence, now)
        self._take_from_backlog(session, now)
        if later:
            self._backlog[session_id] = session, later
            return []
        return self._propose(session) if self._sessions.get(session_id) is session else []

    def _propose(self, session: MemorySession) -> list[Action]:
        """Sends a new tree if the last one is about to be used up and there is a longer one."""
        num_ahead = session.tree.num_ahead
        if not session.accepts_hints or session.num_unread or 2 * num_ahead >= self.limits.max_lookahead:
            return []
        sequence, limits = session.sequence, self.limits
        self.counts.num_lookups += 1
        match = self.memory.find(sequence.scope, sequence.tail)
        self.counts.num_hits += match.length > 0
        tree = GuessTree.grow(
            self.memory,
            match,
            session.acceptance,
            sequence.committed_len,
            max_lookahead=min(limits.max_lookahead, session.max_len - sequence.committed_len),
            max_nodes=limits.max_nodes,
            min_reach=limits.min_reach,
        )
        if tree.num_ahead <= num_ahead:
            return []
        session.tree = tree
        session.num_roots += 1
        session.num_sent_nodes += len(tree.hints)
        where = session.target_address, session.session_id, session.attachment
        return [SendHints(*where, tree.base_len, tree.hints, match_len=match.length)]


def _most(amounts: Counter[str]) -> str:
    """The tenant with the most; of equal ones the first."""
    return max(amounts, key=amounts.__getitem__)
