"""Applies the hint intake policy to the sessions of a worker. Pure.

A session that requests speculation always is never paused and not measured: its steps say nothing about what pays. The
same goes for one that needs hints for its objective, while it does; a pause of its own, for hints that are hardly ever
accepted, it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outrider.hints.hint_intake import IntakePolicy, IntakeShares, SessionIntake
from target_worker.messages import Step
from target_worker.scheduling.session import Session


class HintedSessions(NamedTuple):
    """The sessions of a step that have a draft worker, in their state before the step is committed."""

    sessions: list[Session]  # those that may be paused
    shares: IntakeShares | None  # shares of these; None when there are none
    needing: list[Session]  # those that need hints for their objectives
    has_always: bool  # whether others than `sessions` accept hints at any cost


class BatchIntake:
    """Hint intake of all sessions of a worker. Around a step: `hinted`, `judge` each session, `observe`, `update`."""

    def __init__(self, *, may_pause: bool) -> None:
        """may_pause: whether sessions may be paused; otherwise all accept hints always."""
        self._may_pause = may_pause
        self._policy = IntakePolicy()

    def _may_pause_session(self, session: Session) -> bool:
        return self._may_pause and not session.speculation.is_always and not session.needs_hints

    def start(self, session: Session, num_running: int) -> SessionIntake:
        """Returns the state of a session that gets a draft worker now."""
        return self._policy.start(num_running) if self._may_pause_session(session) else SessionIntake()

    @property
    def speed(self) -> float | None:
        """Recent speed relative to plain decoding of the same batches; None while unknown."""
        return self._policy.speed

    def hinted(self, running: Iterable[Session]) -> HintedSessions:
        """The sessions of a batch that could have hints, and their shares of it."""
        followed = [session for session in running if session.is_drafted and session.wants_hints]
        sessions = [session for session in followed if self._may_pause_session(session)]
        needing = [session for session in followed if session.needs_hints and not session.speculation.is_always]
        return HintedSessions(sessions, _shares(sessions), needing, has_always=len(sessions) < len(followed))

    def judge(self, session: Session, worth_tokens: float) -> None:
        """Takes the tokens that a session's hints gained in a step, less their cost in tokens."""
        if self._may_pause_session(session) and session.can_expect_hints():
            self._policy.judge(session.intake, worth_tokens)

    def observe(
        self, hinted: HintedSessions, step: Step, num_committed: int, num_context: int, whole_ms: float
    ) -> None:
        """Takes the time of a step that only decoded; see the policy's `observe`."""
        if self._may_pause and not hinted.has_always:
            self._policy.observe(
                len(step.items),
                step.num_tokens,
                num_committed,
                num_context,
                whole_ms,
                hinted.shares,
            )

    def update(self, hinted: HintedSessions, num_running: int) -> list[Session]:
        """Pauses or resumes sessions; returns those for which that has changed."""
        if not (hinted.sessions or hinted.needing):
            return []
        may_accept_hints = self._policy.may_accept_hints(num_running)
        changed = [session for session in hinted.sessions if session.intake.update(may_accept_hints=may_accept_hints)]
        return changed + [session for session in hinted.needing if session.intake.update(may_accept_hints=True)]


def _shares(sessions: list[Session]) -> IntakeShares | None:
    if not sessions:
        return None
    accepting = [session for session in sessions if not session.intake.is_paused]
    num_receiving = sum(session.timing.has_received for session in accepting)
    return IntakeShares(len(accepting) / len(sessions), num_receiving / len(sessions))
