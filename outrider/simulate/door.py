"""The coordinator: its real routing and its real fallback of each request, on reservations that are exact.

As in `coordinator.admission` a request waits for a place at a target, and is refused where that would take too long;
as in `coordinator.request_session` it goes on without a draft worker when none has room, and whether it is followed by
one from then on is `FallbackController`'s to say. Every replica has a router and a queue of its own and sees what the
others did with each refresh. Left out: what earlier requests teach later ones (`coordinator.priors`), priorities,
deadlines, failures.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.fallback import FallbackAction, FallbackController, FallbackPolicy
from coordinator.routing import Router, WorkerKey, key_of, prefix_key
from draft_worker.messages import Action as DraftAction
from draft_worker.messages import AttachmentRefused, AttachSession, DetachSession
from outrider.sampling_params import SamplingParams, SpeculationSettings
from outrider.simulate.clock import Clock, Link
from outrider.simulate.traffic import VOCAB_SIZE, Request
from outrider.simulate.workers import DraftWorker, TargetWorker
from outrider.turnover import Turnover
from outrider.worker_record import Pool, Snapshot, WorkerRecord
from target_worker.messages import (
    Action,
    ChangeSpeculation,
    SessionEnded,
    SessionRefused,
    StartSession,
    TokensCommitted,
)

REFRESH_S: Final = 0.5
"""As `outrider.worker_directory` reads the pools anew."""
CANDIDATES_MAX: Final = 8
"""Workers that are asked for a place, as in `coordinator.reservations`."""
DRAFT_ATTEMPTS_MAX: Final = 3
_MODEL: Final = "simulated"
_POLICY: Final = FallbackPolicy()
_PLAIN: Final = SpeculationSettings(enabled=False, is_plain=True)


@dataclass(slots=True, eq=False)
class Stream:
    """One request under way, and what became of it. Times are the coordinator's, seconds."""

    request: Request
    arrived_s: float
    is_refused: bool = False
    first_token_s: float | None = None
    ended_s: float | None = None
    queue_ms: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    last_step_s: float = 0.0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0


@dataclass(slots=True, eq=False)
class _Session:
    """What a replica holds of a stream at its workers."""

    session_id: str
    stream: Stream
    target: WorkerRecord
    controller: FallbackController
    sampling: SamplingParams
    began_s: float
    draft: WorkerRecord | None = None
    num_attachments: int = 0
    tried: set[WorkerKey] = field(default_factory=set)


@dataclass(slots=True)
class Reservations:
    """Places that are taken, of all replicas together, by incarnation; and what the registry said of it last."""

    targets: tuple[WorkerRecord, ...]
    drafts: tuple[WorkerRecord, ...]
    num_taken: Counter[str] = field(default_factory=Counter)
    snapshot: Snapshot = field(default_factory=Snapshot)
    on_released: list[Callable[[], None]] = field(
        default_factory=list
    )  # called when a target has a place again

    def refresh(self) -> None:
        self.snapshot = Snapshot(self.targets, self.drafts, num_reserved=dict(self.num_taken))

    def take(
        self, ranked: Sequence[WorkerRecord], limit_of: Callable[[WorkerRecord], int]
    ) -> WorkerRecord | None:
        for worker in ranked[:CANDIDATES_MAX]:
            if self.num_taken[worker.incarnation] < limit_of(worker):
                self.num_taken[worker.incarnation] += 1
                return worker
        return None

    def give_back(self, worker: WorkerRecord) -> None:
        self.num_taken[worker.incarnation] -= 1
        if worker.pool == "target":
            for tell in self.on_released:
                tell()


def record(
    pool: Pool, number: int, max_num_seqs: int, max_num_waiting: int, max_model_len: int
) -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"{pool}-{number}", pool=pool, address=f"{pool}:{number}", incarnation=f"{pool}-{number}",
        started_at_ms=0, model_name=_MODEL, tokenizer_fingerprint="", vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, dtype="", num_model_parameters=0,
        max_num_waiting=max_num_waiting,
    )  # fmt: skip


class Coordinator:
    """One replica."""

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        reservations: Reservations,
        targets: dict[str, TargetWorker],
        drafts: dict[str, DraftWorker],
        link_to: Callable[[str], Link],
        on_end: Callable[[Stream], None],
        max_queue_wait_s: float,
    ) -> None:
        """Workers by address; `on_end` is told of every stream that ended or was refused."""
        self._clock, self._reservations = clock, reservations
        self._targets, self._drafts, self._link_to, self._on_end = targets, drafts, link_to, on_end
        self._router = Router("", (), chance, quarantine_s=3.0)
        self._sessions: dict[str, _Session] = {}
        self._queue: deque[Stream] = deque()
        self._turnover = Turnover()
        self._max_queue_wait_s = max_queue_wait_s
        self.num_tokens = 0  # that came, of all requests
        reservations.on_released.append(self._give_out)

    def take(self, stream: Stream) -> None:
        """A request has come."""
        if not self._queue and self._begin(stream):
            return
        if self._turnover.wait_s(len(self._queue), len(self._sessions)) > self._max_queue_wait_s:
            self._refuse(stream)
        else:
            self._queue.append(stream)

    def _give_out(self) -> None:
        now_s = self._clock.now_s
        while self._queue:
            stream = self._queue[0]
            is_late = now_s > stream.arrived_s + self._max_queue_wait_s
            if is_late:
                self._refuse(stream)
            elif not self._begin(stream):
                return
            self._queue.popleft()

    def _refuse(self, stream: Stream) -> None:
        stream.is_refused = True
        self._on_end(stream)

    def _begin(self, stream: Stream) -> bool:
        """False when no target has a place."""
        request, now_s = stream.request, self._clock.now_s
        num_tokens = len(request.prompt) + request.num_output_tokens
        ranked = self._router.rank_targets(
            self._reservations.snapshot,
            now_s,
            model=_MODEL,
            num_tokens=num_tokens,
            excluded=(),
            prefix=prefix_key(request.prompt),
        )
        asked = [worker for worker in ranked if self._router.may_ask(worker, now_s)]
        target = self._reservations.take(asked, self._router.place_limit)
        if target is None:
            return False
        self._router.open_session(target)
        session = _Session(
            str(request.number),
            stream,
            target,
            FallbackController(_POLICY, is_enabled=bool(self._drafts)),
            SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True),
            began_s=now_s,
        )
        self._sessions[session.session_id] = session
        start = StartSession(
            session.session_id, request.prompt, len(request.prompt), session.sampling, self._speculation(session), 0
        )  # fmt: skip
        self._tell_target(session, start)
        self._apply(session, session.controller.start())
        return True

    def hear_target(self, actions: list[Action]) -> None:
        """What a target published; of sessions that another replica holds nothing comes here."""
        for action in actions:
            session = self._sessions.get(getattr(action, "session_id", ""))
            if session is None:
                continue
            match action:
                case TokensCommitted():
                    self._take_step(session, action)
                case SessionEnded():
                    waited_s = session.began_s - session.stream.arrived_s
                    session.stream.queue_ms = 1e3 * waited_s + action.queue_ms
                    self._end(session)
                case SessionRefused():
                    session.stream.is_refused = True
                    self._end(session)

    def hear_draft(self, action: DraftAction) -> None:
        """A draft worker has no room after all: another one is asked."""
        session = self._sessions.get(getattr(action, "session_id", ""))
        if session is None or session.draft is None or not isinstance(action, AttachmentRefused):
            return
        if action.attachment == session.num_attachments:
            self._let_go_of_draft(session)
            self._attach(session)

    def _take_step(self, session: _Session, step: TokensCommitted) -> None:
        stream, now_s = session.stream, self._clock.now_s
        gap_s = None if stream.first_token_s is None else now_s - stream.last_step_s
        stream.last_step_s = now_s
        if stream.first_token_s is None:
            stream.first_token_s = now_s
        stream.token_ids += step.token_ids
        self.num_tokens += len(step.token_ids)
        stream.num_steps += 1
        stream.num_draft_tokens += step.num_draft_tokens
        stream.num_accepted += step.num_accepted_draft_tokens
        self._apply(
            session,
            session.controller.on_step(
                len(step.token_ids),
                step.num_draft_tokens,
                step.num_accepted_draft_tokens,
                gap_s=gap_s,
                is_resting=step.is_resting,
            ),
        )

    def _apply(self, session: _Session, actions: Sequence[FallbackAction]) -> None:
        for action in actions:
            match action:
                case FallbackAction.ATTACH:
                    session.tried.clear()
                    self._attach(session)
                case FallbackAction.DETACH:
                    self._detach(session)
                case FallbackAction.START_LISTENING | FallbackAction.STOP_LISTENING:
                    change = ChangeSpeculation(session.session_id, self._speculation(session))
                    self._tell_target(session, change)

    def _speculation(self, session: _Session) -> SpeculationSettings:
        return SpeculationSettings(enabled=session.controller.is_listening) if self._drafts else _PLAIN

    def _attach(self, session: _Session) -> None:
        stream, worker = session.stream, None
        if len(session.tried) < DRAFT_ATTEMPTS_MAX:
            worker = self._reservations.take(
                self._router.rank_drafts(
                    self._reservations.snapshot,
                    self._clock.now_s,
                    num_tokens=len(stream.request.prompt) + stream.request.num_output_tokens,
                    excluded=session.tried,
                    target=session.target,
                ),
                lambda worker: worker.max_num_seqs,
            )
        if worker is None:
            self._apply(session, session.controller.on_no_draft())
            return
        self._router.open_session(worker)
        session.tried.add(key_of(worker))
        session.draft = worker
        session.num_attachments += 1
        attach = AttachSession(
            session.session_id,
            session.num_attachments,
            session.target.address,
            stream.request.prompt + stream.token_ids,
            session.sampling,
            seed=0,
            num_prompt_tokens=len(stream.request.prompt),
        )
        self._link_to(worker.address).send(self._drafts[worker.address].take, [attach])

    def _detach(self, session: _Session) -> None:
        if session.draft is not None:
            detach = DetachSession(session.session_id, session.num_attachments)
            self._link_to(session.draft.address).send(self._drafts[session.draft.address].take, [detach])
            self._let_go_of_draft(session)

    def _let_go_of_draft(self, session: _Session) -> None:
        assert session.draft is not None
        self._router.close_session(session.draft)
        self._reservations.give_back(session.draft)
        session.draft = None

    def _end(self, session: _Session) -> None:
        del self._sessions[session.session_id]
        self._detach(session)
        self._router.close_session(session.target)
        self._turnover.leave(self._clock.now_s - session.began_s)
        session.stream.ended_s = self._clock.now_s
        self._on_end(session.stream)
        self._reservations.give_back(session.target)

    def _tell_target(self, session: _Session, event: StartSession | ChangeSpeculation) -> None:
        address = session.target.address
        self._link_to(address).send(self._targets[address].take, [event])
