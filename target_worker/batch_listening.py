"""The listening policy, applied to the sessions of a worker. Pure.

A session that asks for speculation always neither rests nor counts: what its steps cost says nothing about what pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from target_worker.listening import Listeners, ListeningPolicy, SessionListening
from target_worker.messages import Step
from target_worker.session import Session


class Audience(NamedTuple):
    """The sessions of a step that have a draft worker, as they are before it is committed."""

    sessions: list[Session]  # those of them that may rest
    listeners: Listeners | None  # of these; None when there are none
    has_insisting: bool  # whether there are others, which listen whatever it costs


class BatchListening:
    """All sessions of one worker. Around a step: `audience`, `judge` for each session, `observe`, `turn`."""

    def __init__(self, *, may_rest: bool) -> None:
        """may_rest: whether any session may; otherwise all listen, always."""
        self._may_rest = may_rest
        self._policy = ListeningPolicy()

    def _may_session_rest(self, session: Session) -> bool:
        return self._may_rest and not session.speculation.is_always

    def start(self, session: Session, num_running: int) -> SessionListening:
        """The state of one that has a draft worker from now on."""
        return self._policy.start(num_running) if self._may_session_rest(session) else SessionListening()

    @property
    def speed(self) -> float | None:
        """As `ListeningPolicy.speed`."""
        return self._policy.speed

    def audience(self, running: Iterable[Session]) -> Audience:
        followed = [session for session in running if session.subscribers and session.may_listen]
        sessions = [session for session in followed if self._may_session_rest(session)]
        return Audience(sessions, _listeners(sessions), has_insisting=len(sessions) < len(followed))

    def judge(self, session: Session, worth_tokens: float) -> None:
        """What its hints gained in a step, less what they cost, tokens."""
        if self._may_session_rest(session) and session.can_expect_hints():
            self._policy.judge(session.listening, worth_tokens)

    def observe(
        self, audience: Audience, step: Step, num_committed: int, num_context: int, whole_ms: float
    ) -> None:
        """How fast a step was that did nothing but decode; see `ListeningPolicy.observe`."""
        if self._may_rest and not audience.has_insisting:
            self._policy.observe(
                *(len(step.items), step.num_tokens, num_committed, num_context),
                *(whole_ms, audience.listeners),
            )

    def turn(self, audience: Audience, num_running: int) -> list[Session]:
        """Lets sessions rest or listen from now on; those for which that has changed."""
        may_listen = self._policy.may_listen(num_running)
        return [session for session in audience.sessions if session.listening.turn(may_listen=may_listen)]


def _listeners(sessions: list[Session]) -> Listeners | None:
    if not sessions:
        return None
    listening = [session for session in sessions if not session.listening.is_resting]
    num_hearing = sum(session.timing.has_heard for session in listening)
    return Listeners(len(listening) / len(sessions), num_hearing / len(sessions))
