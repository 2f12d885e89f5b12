"""The draft side of one session at one target: attach, watch, try another draft worker, detach.

Invariant: at most one attachment is open, and while it is, one slot is counted at its worker. Whatever goes
wrong here costs speed only, so nothing raises into the request: when nobody will ride ahead, the owner is
told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from coordinator.environment import Environment
from coordinator.routing import WorkerKey, key_of
from coordinator.silence import SilenceWatch, is_own_loss
from coordinator.workers import describe, remaining_ms, remaining_s
from outrider.canary.plan import DraftChoice
from outrider.worker_record import WorkerRecord
from protos.outrider.v1 import common_pb2, draft_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedSession:
    """What a draft worker has to know of the session."""

    session_id: str
    hint_token: str
    target: WorkerRecord
    sampling: common_pb2.SamplingParams
    speculation: common_pb2.SpeculationParams
    num_prompt_tokens: int
    num_tokens_max: int  # prompt and output
    cache_salt: str = ""  # as the target got it
    owner: str = ""  # as the target got it
    drafts: DraftChoice  # the workers that may follow
    deadline_s: float  # on the environment's clock
    traceparent: str = ""  # of the request's span
    committed: Callable[[], Sequence[int]]  # tokens so far, prompt included


class DraftLink:
    """Attaches and detaches on command. `on_no_draft` is called on the event loop, at most once per `attach`."""

    def __init__(
        self, environment: Environment, session: LinkedSession, on_no_draft: Callable[[], None]
    ) -> None:
        self._environment = environment
        self._session = session
        self._on_no_draft = on_no_draft
        self._num_attachments = 0
        self._task: asyncio.Task[None] | None = None
        self.worker: WorkerRecord | None = None  # that follows now

    def attach(self) -> None:
        """Starts following with some draft worker; the worker of an earlier attachment is let go first."""
        self.detach()
        self._task = asyncio.create_task(self._follow(), name=f"draft of {self._session.session_id}")

    def detach(self) -> None:
        """Cancels the attachment, which frees the slot; does nothing without one."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Detaches and waits until the cancellation is on its way."""
        task = self._task
        self.detach()
        if task is not None:
            await asyncio.wait([task])

    async def _follow(self) -> None:
        environment, tried = self._environment, set[WorkerKey]()
        for _ in range(environment.settings.draft_attempts_max):
            ranked = environment.router.rank_drafts(
                environment.snapshot(),
                environment.now_s(),
                num_tokens=self._session.num_tokens_max,
                excluded=tried,
                target=self._session.target,
                choice=self._session.drafts,
            )
            token = self._session.session_id
            worker = await environment.reservations.take("draft", ranked, token)
            if worker is None:
                break
            tried.add(key_of(worker))
            environment.router.open_session(worker)
            self.worker = worker
            try:
                if await self._follow_one(worker):
                    return
            finally:
                self.worker = None
                environment.router.close_session(worker)
                environment.reservations.give_back(worker, token)
        self._on_no_draft()

    async def _follow_one(self, worker: WorkerRecord) -> bool:
        """Rides one attachment to its end. True when the session ended, False when the worker let go of it."""
        environment, session = self._environment, self._session
        self._num_attachments += 1
        request = draft_pb2.AttachRequest(
            session_id=session.session_id,
            hint_token=session.hint_token,
            attachment=self._num_attachments,
            target_address=session.target.address,
            token_ids=session.committed(),
            sampling=session.sampling,
            tokenizer_fingerprint=session.target.tokenizer_fingerprint,
            num_prompt_tokens=session.num_prompt_tokens,
            speculation=session.speculation,
            deadline_ms=remaining_ms(session.deadline_s, environment.now_s()),
            cache_salt=session.cache_salt,
            owner=session.owner,
        )
        timeout_s = remaining_s(session.deadline_s, environment.now_s())
        call = environment.channels.attach(worker.address, request, timeout_s, session.traceparent)
        watch = SilenceWatch(call.cancel, environment.settings.draft_silence_max_s, environment.lag)
        try:
            watch.start()
            while True:
                watch.begin()
                status = await call.read()
                watch.end()
                if not isinstance(status, draft_pb2.AttachStatus):  # end of the stream
                    return False
                if status.num_sent_nodes:
                    environment.router.has_served(worker)
                if status.is_finished:
                    return True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not watch.has_cancelled or (task is not None and task.cancelling()):
                raise  # the attachment is let go of
            self._lose(worker, "silent for too long", is_its_fault=True)
            return False
        except grpc.aio.AioRpcError as error:
            is_well = error.code() in _HEALTHY_REFUSALS or is_own_loss(error, environment.lag)
            self._lose(worker, describe(error), is_its_fault=not is_well)
            return False
        finally:
            watch.stop()
            call.cancel()

    def _lose(self, worker: WorkerRecord, reason: str, *, is_its_fault: bool) -> None:
        environment = self._environment
        _log.info("draft worker %s let go of %s: %s", worker.worker_id, self._session.session_id, reason)
        environment.metrics.attach_failures.inc()
        if is_its_fault:
            environment.router.pass_over(worker, environment.now_s())


# Answers of a worker that is well and only cannot take this session.
_HEALTHY_REFUSALS = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
