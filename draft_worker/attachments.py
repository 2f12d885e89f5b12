"""Sessions that are attached to a draft worker: whom it follows, and how it keeps up with their targets. Pure.

A session's life: `AttachSession` → refused, or a slot → subscribed at its target, which sends what it commits →
detached by its coordinator, ended by its target, or let go where this worker cannot follow it. What is hinted at
meanwhile is decided by the scheduler of a draft model or of a memory, which extends this class.

Sessions in the background, those of batches, give their slot to another session that has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

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
    Subscribe,
    Unsubscribe,
)
from outrider.concurrency.turnover import Turnover, retry_after_s
from outrider.errors import InvalidRequest, OutriderError, Overloaded, detached


class AttachedSession(Protocol):
    """A session, as far as its attachment goes."""

    session_id: str
    attachment: int
    target_address: str
    attached_at: float  # shell's clock, seconds
    is_background: bool
    accepts_hints: bool
    num_roots: int
    num_sent_nodes: int

    @property
    def committed_len(self) -> int: ...


SessionT = TypeVar("SessionT", bound=AttachedSession)


class Attachments(ABC, Generic[SessionT]):
    """All sessions of one worker."""

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._sessions: dict[str, SessionT] = {}
        self._turnover = Turnover()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def progress(self, session_id: str) -> SessionT | None:
        """A session's progress for status reports, or None; callers must not change it."""
        return self._sessions.get(session_id)

    @property
    def num_background(self) -> int:
        """Sessions in the background. Safe to call from any thread."""
        return sum(session.is_background for session in list(self._sessions.values()))

    def check_room(self, *, is_background: bool = False) -> None:
        """Raises Overloaded when all slots are taken. Safe to call from another thread."""
        num_taken = len(self._sessions) - (0 if is_background else self.num_background)
        if num_taken >= self.num_slots:
            raise Overloaded(f"all {self.num_slots} draft slots are taken", self._retry_after_s())

    def _retry_after_s(self) -> float:
        return retry_after_s(self._turnover.stay_s() / max(self.num_slots, 1))

    def handle(self, event: Event, now: float = 0.0) -> list[Action]:
        """Handles one event. `now` is the shell's clock in seconds: retry times and a tree's reach depend on it."""
        match event:
            case AttachSession():
                return self._attach(event, now)
            case DetachSession():
                session = self._sessions.get(event.session_id)
                if session is not None and session.attachment == event.attachment:
                    self._remove(session, now)
                    return [Unsubscribe(session.target_address, session.session_id)]
            case LinkOpened():
                told = [each for each in self._sessions.values() if each.target_address == event.target_address]
                return [action for each in told for action in (self._subscribe(each), *self._resend(each))]
            case CommitReceived():
                return self._receive_commit(event, now)
        return []

    def _attach(self, event: AttachSession, now: float) -> list[Action]:
        try:
            self._check(event)
        except OutriderError as error:
            return [AttachmentRefused(event.session_id, event.attachment, detached(error))]
        actions = self._make_room(now)
        session = self._sessions[event.session_id] = self._admit(event, now)
        return [*actions, AttachmentAccepted(event.session_id), self._subscribe(session), *self._begin(session)]

    def _check(self, event: AttachSession) -> None:
        """Raises the error with which the session is refused."""
        if event.session_id in self._sessions:
            raise InvalidRequest("session_id", f"session {event.session_id} is already attached here")
        if self._is_too_long(len(event.token_ids)):
            raise InvalidRequest(
                "token_ids",
                f"{len(event.token_ids)} tokens exceed what this draft worker can follow "
                f"(--max-model-len {self._max_model_len})",
            )
        if not self._knows(event.token_ids):
            raise InvalidRequest("token_ids", f"a token id is outside the vocabulary of {self.vocab_size}")
        self.check_room(is_background=event.is_background)

    def _is_too_long(self, num_tokens: int) -> bool:
        """Whether no hint can follow so many tokens: the last position of a model's context has no successor."""
        return num_tokens >= self._max_model_len - 1

    def _knows(self, token_ids: list[int]) -> bool:
        return min(token_ids, default=0) >= 0 and max(token_ids, default=0) < self.vocab_size

    def _make_room(self, now: float) -> list[Action]:
        """Ends the attachment of the newest session in the background if there is no free slot."""
        if len(self._sessions) < self.num_slots:
            return []
        session = next(each for each in reversed(self._sessions.values()) if each.is_background)
        self._remove(session, now)
        error = Overloaded("another session needs the draft slot", self._retry_after_s())
        return [
            Unsubscribe(session.target_address, session.session_id),
            AttachmentRefused(session.session_id, session.attachment, error),
        ]

    def _remove(self, session: SessionT, now: float) -> None:
        del self._sessions[session.session_id]
        self._turnover.leave(now - session.attached_at)
        self._forget(session)

    def _receive_commit(self, event: CommitReceived, now: float) -> list[Action]:
        session = self._sessions.get(event.session_id)
        if session is None:
            return []
        if 0 <= event.num_matched <= event.num_verified and event.num_verified > 0:
            self._judge(session, event.num_matched, event.num_verified)
        known_len = session.committed_len
        is_gap = event.from_len > known_len
        if is_gap and not event.is_finished:  # a commit was missed: subscribe again from our length
            return [self._subscribe(session)]
        new_token_ids = [] if is_gap else event.token_ids[known_len - event.from_len :]
        # The sequence may become longer than this worker can follow, or the target's vocabulary is larger and it
        # generated a token that this worker lacks.
        is_known = self._knows(new_token_ids)
        if event.is_finished or not is_known or self._is_too_long(known_len + len(new_token_ids)):
            self._end(session, new_token_ids if is_known else [])
            self._remove(session, now)
            end = AttachmentEnded(session.session_id, event.is_finished)
            # At once, so that the target waits for no hints that cannot come.
            return [end] if event.is_finished else [Unsubscribe(session.target_address, session.session_id), end]
        is_resumed = event.accepts_hints and not session.accepts_hints
        session.accepts_hints = event.accepts_hints
        return self._commit(session, event, new_token_ids, now, is_resumed=is_resumed)

    @abstractmethod
    def _admit(self, event: AttachSession, now: float) -> SessionT:
        """Returns a new session, which has a slot."""

    @abstractmethod
    def _subscribe(self, session: SessionT) -> Subscribe:
        """Asks the target for what the session lacks."""

    def _begin(self, session: SessionT) -> list[Action]:
        """Returns the first hints of a new session, if there are some already."""
        return []

    @abstractmethod
    def _resend(self, session: SessionT) -> list[Action]:
        """Returns the hints to send to a target that has none any more."""

    @abstractmethod
    def _judge(self, session: SessionT, num_matched: int, num_verified: int) -> None:
        """Takes the number of hints that a target verified, and of the leading ones of them that were accepted."""

    @abstractmethod
    def _commit(
        self, session: SessionT, event: CommitReceived, token_ids: list[int], now: float, *, is_resumed: bool
    ) -> list[Action]:
        """Takes committed tokens that follow those known, perhaps none; `is_resumed`: the target accepts hints again,
        and has dropped what came meanwhile."""

    def _end(self, session: SessionT, token_ids: list[int]) -> None:
        """Takes the last tokens of a session that is removed next."""

    @abstractmethod
    def _forget(self, session: SessionT) -> None:
        """Frees what belongs to a session that was removed."""
