"""Scheduler of one memory worker: remembers what is committed, and answers with what followed such tokens before. Pure.

A session's output is remembered as it is committed, so that others of its scope find it at once. Its prompt is not:
lookup on the target searches that. A session's hint tree is sent anew, below a newer root, when it is half used up or
the committed tokens have left it; what the target commits meanwhile only moves its cursor down the tree.

A target that pauses hints sends the rest of the output when the session ends, so a paused session is remembered, too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from draft_worker.memory.guesses import GuessTree, MatchAcceptance
from draft_worker.memory.options import MemoryLimits
from draft_worker.memory.token_memory import TOKEN_ID_MAX, RememberedSequence, TokenMemory
from draft_worker.messages import (
    Action,
    AttachmentAccepted,
    AttachmentEnded,
    AttachmentRefused,
    AttachSession,
    CommitReceived,
    DetachSession,
    Event,
    LinkOpened,
    SendHints,
    Subscribe,
    Unsubscribe,
)
from outrider.concurrency.turnover import Turnover, retry_after_s
from outrider.errors import InvalidRequest, OutriderError, Overloaded

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


class MemoryScheduler:
    """All sessions of one memory worker."""

    def __init__(self, limits: MemoryLimits) -> None:
        self.limits = limits
        self.memory = TokenMemory(max_tokens=limits.max_memory_tokens, max_scopes=limits.max_scopes)
        self.counts = MemoryCounts()
        self._sessions: dict[str, MemorySession] = {}
        self._left: OrderedDict[str, RememberedSequence] = OrderedDict()  # by session id
        self._backlog: OrderedDict[str, tuple[MemorySession, list[int]]] = OrderedDict()  # tokens not remembered yet
        self._num_unread = 0  # tokens in it
        self._turnover = Turnover()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def has_backlog(self) -> bool:
        """Whether tokens wait for `read_backlog`."""
        return bool(self._backlog)

    def progress(self, session_id: str) -> MemorySession | None:
        """A session's progress for status reports, or None; callers must not change it."""
        return self._sessions.get(session_id)

    def check_room(self, *, is_background: bool = False) -> None:
        """Raises Overloaded when as many sessions are followed as may be. Safe to call from another thread."""
        if len(self._sessions) >= self.limits.max_num_seqs:
            raise Overloaded(
                f"all {self.limits.max_num_seqs} slots of this memory worker are taken",
                retry_after_s(self._turnover.stay_s() / self.limits.max_num_seqs),
            )

    def handle(self, event: Event, now: float = 0.0) -> list[Action]:
        """Handles one event. `now` is the shell's clock in seconds; only the retry time of a refusal depends on it."""
        match event:
            case AttachSession():
                return self._attach(event, now)
            case DetachSession():
                session = self._sessions.get(event.session_id)
                if session is not None and session.attachment == event.attachment:
                    self._remove(session, now)
                    return [Unsubscribe(session.target_address, session.session_id)]
            case LinkOpened():
                return self._introduce(event.target_address)
            case CommitReceived():
                return self._receive_commit(event, now)
        return []

    def _attach(self, event: AttachSession, now: float) -> list[Action]:
        try:
            self._check(event)
        except OutriderError as error:
            return [AttachmentRefused(event.session_id, event.attachment, error)]
        num_prompt_tokens = event.num_prompt_tokens or len(event.token_ids)
        scope = event.owner, event.cache_salt
        sequence = self._left.pop(event.session_id, None)
        if sequence is None or sequence.scope != scope or sequence.committed_len > len(event.token_ids):
            sequence = RememberedSequence.after(scope, event.token_ids[:num_prompt_tokens])
        max_len = num_prompt_tokens + event.sampling.max_tokens
        session = MemorySession(event.session_id, event.attachment, event.target_address, sequence, max_len, now)
        self._sessions[session.session_id] = session
        self._remember(session, event.token_ids[sequence.committed_len :])
        return [AttachmentAccepted(session.session_id), _subscribe(session), *self._propose(session)]

    def _check(self, event: AttachSession) -> None:
        """Raises the error with which the session is refused."""
        if event.session_id in self._sessions:
            raise InvalidRequest("session_id", f"session {event.session_id} is already attached here")
        if len(event.token_ids) >= self.limits.max_model_len:
            raise InvalidRequest(
                "token_ids", f"{len(event.token_ids)} tokens exceed --max-model-len {self.limits.max_model_len}"
            )
        if max(event.token_ids) > TOKEN_ID_MAX:
            raise InvalidRequest("token_ids", f"a token id is above {TOKEN_ID_MAX}")
        self.check_room()

    def _remove(self, session: MemorySession, now: float) -> None:
        del self._sessions[session.session_id]
        self._turnover.leave(now - session.attached_at)
        if session.session_id not in self._backlog:
            self._left[session.session_id] = session.sequence
            if len(self._left) > SEQUENCES_KEPT:
                self._left.popitem(last=False)

    def _introduce(self, target_address: str) -> list[Action]:
        actions: list[Action] = []
        for session in self._sessions.values():
            if session.target_address == target_address:
                session.tree = GuessTree(0)  # what was sent may be lost
                actions += [_subscribe(session), *self._propose(session)]
        return actions

    def _receive_commit(self, event: CommitReceived, now: float) -> list[Action]:
        session = self._sessions.get(event.session_id)
        if session is None:
            return []
        known_len = session.committed_len
        if event.from_len > known_len and not event.is_finished:  # a commit was missed: subscribe again from our length
            return [_subscribe(session)]
        new_token_ids = event.token_ids[known_len - event.from_len :] if event.from_len <= known_len else []
        has_ended = event.is_finished
        if new_token_ids and max(new_token_ids) > TOKEN_ID_MAX:
            new_token_ids, has_ended = [], True
        if 0 <= event.num_matched <= event.num_verified:
            self.counts.num_verified += event.num_verified
            self.counts.num_accepted += event.num_matched
        session.tree.commit(new_token_ids, session.acceptance)
        self._remember(session, new_token_ids)
        if has_ended or session.committed_len >= self.limits.max_model_len:
            self._remove(session, now)
            end = AttachmentEnded(session.session_id)
            return [end] if event.is_finished else [Unsubscribe(session.target_address, session.session_id), end]
        if event.accepts_hints and not session.accepts_hints:
            session.tree = GuessTree(0)  # the target has dropped what came meanwhile
        session.accepts_hints = event.accepts_hints
        return self._propose(session)

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
            _, (late, skipped) = self._backlog.popitem(last=False)
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


def _subscribe(session: MemorySession) -> Subscribe:
    where = session.target_address, session.session_id, session.attachment
    return Subscribe(*where, session.committed_len, is_memory=True)
