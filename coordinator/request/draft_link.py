"""The draft side of one session at one target: attach, watch, try another draft or memory worker, detach.

Invariant: at most one attachment is open, and one slot is counted at its worker while it is. A failure here costs speed
only, so none is raised into the request: the owner is told when no draft worker is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from coordinator.intake.generation_request import GenerationSpec
from coordinator.placement.routing import WorkerKey, key_of
from coordinator.request.environment import Environment
from coordinator.workers.channels import describe, remaining_ms, remaining_s
from coordinator.workers.silence import SilenceWatch, is_own_loss
from outrider.registry.worker_record import MEMORY, WorkerRecord
from protos.outrider.v1 import common_pb2, draft_pb2, target_pb2

_log = logging.getLogger(__name__)
VLLM: Final = "vllm"
"""`WorkerRecord.engine` of a target whose model vLLM runs."""
_OURS: Final = frozenset({"", "outrider"})


@dataclass(frozen=True, slots=True)
class LinkedSession:
    """A session at a target that draft workers may join."""

    spec: GenerationSpec
    request: target_pb2.GenerateRequest  # as the target got it
    target: WorkerRecord
    deadline_s: float  # on the environment's clock
    committed: Callable[[], Sequence[int]]  # tokens so far, prompt included
    committed_len: Callable[[], int]  # their number, without a copy of them

    @property
    def session_id(self) -> str:
        return self.request.session_id


def drafting(sampling: common_pb2.SamplingParams, engine: str) -> common_pb2.SamplingParams:
    """How a draft worker chooses tokens for a target. vLLM takes a hint as certain and accepts it with the target's
    probability of its token, so that the likeliest is the best one."""
    if engine != VLLM or not sampling.temperature:
        return sampling
    greedy = common_pb2.SamplingParams()
    greedy.CopyFrom(sampling)
    greedy.temperature = 0.0
    greedy.ClearField("seed")
    return greedy


def takes_both(target: WorkerRecord) -> bool:
    """Whether a session at this target may have a memory worker beside its draft worker. Other engines than ours have
    one hint tree for each request."""
    return target.engine in _OURS


class DraftLink:
    """Attaches and detaches draft workers on command. `on_no_draft` is called on the event loop, at most once per
    `attach`, and not after `release`."""

    def __init__(
        self,
        environment: Environment,
        session: LinkedSession,
        on_no_draft: Callable[[], None] = lambda: None,
        *,
        is_memory: bool | None,
    ) -> None:
        """is_memory: whether it attaches memory workers; None: one of either kind."""
        self._is_memory = is_memory
        self._environment = environment
        self._session = session
        self._on_no_draft = on_no_draft
        self._num_attachments = 0
        self._is_awaited = False  # whether hints of the attached worker are wanted
        self._task: asyncio.Task[None] | None = None
        self._last_task: asyncio.Task[None] | None = None
        self.worker: WorkerRecord | None = None  # the attached one

    def attach(self) -> None:
        """Attaches some draft worker, after detaching an earlier one."""
        self.detach()
        self._is_awaited = True
        self._task = asyncio.create_task(self._follow(), name=f"draft of {self._session.session_id}")
        self._last_task = self._task

    def release(self) -> None:
        """Frees the draft worker for other sessions. A memory worker stays: what the target generates without hints
        is worth remembering, too."""
        if self.worker is not None and self.worker.engine == MEMORY:
            self._is_awaited = False
        else:
            self.detach()

    def detach(self) -> None:
        """Cancels the attachment, which frees the slot; does nothing without one."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Detaches and waits until the cancellation has been sent."""
        self.detach()
        if self._last_task is not None:
            await asyncio.wait([self._last_task])

    async def _follow(self) -> None:
        environment, tried = self._environment, set[WorkerKey]()
        router, is_background = environment.placement.router, self._session.spec.is_background
        for _ in range(environment.settings.draft_attempts_max):
            ranked = router.rank_drafts(
                environment.snapshot(),
                environment.now_s(),
                num_known=self._session.committed_len(),
                num_tokens=self._session.spec.num_tokens_max,
                excluded=tried,
                target=self._session.target,
                admits=self._admits,
                choice=self._session.spec.drafts,
                is_background=is_background,
            )
            token = self._session.session_id
            limits = [router.slot_limit(worker, is_background=is_background) for worker in ranked]
            worker = await environment.placement.reservations.take("draft", ranked, token, limits)
            if worker is None:
                break
            tried.add(key_of(worker))
            router.open_session(worker)
            self.worker = worker
            try:
                if await self._follow_one(worker) or not self._is_awaited:
                    return
            finally:
                self.worker = None
                router.close_session(worker)
                environment.placement.reservations.give_back(worker, token)
        self._on_no_draft()

    def _admits(self, worker: WorkerRecord) -> bool:
        """Whether a draft worker may see the session's tokens and send hints for it."""
        spec, is_memory = self._session.spec, worker.engine == MEMORY
        is_permitted = not is_memory or self._environment.settings.may_remember(spec.request.tenant)
        return is_permitted and self._is_memory in (None, is_memory) and spec.served.admits_draft(worker)

    async def _follow_one(self, worker: WorkerRecord) -> bool:
        """Follows one attachment to its end. True if the session ended, False if the worker ended the attachment: it
        is lost, or the sequence has become longer than it can follow, which is no fault."""
        environment, session = self._environment, self._session
        self._num_attachments += 1
        request = draft_pb2.AttachRequest(
            session_id=session.session_id,
            hint_token=session.request.hint_token,
            attachment=self._num_attachments,
            target_address=session.target.address,
            token_ids=session.committed(),
            sampling=drafting(session.request.sampling, session.target.engine),
            tokenizer_fingerprint=session.target.tokenizer_fingerprint,
            head_fingerprint=session.target.head_fingerprint,
            num_prompt_tokens=session.request.num_prompt_tokens,
            speculation=session.spec.request.speculation.to_proto(),
            deadline_ms=remaining_ms(session.deadline_s, environment.now_s()),
            cache_salt=session.request.cache_salt,
            owner=session.request.owner,
            priority=session.request.priority,
        )
        timeout_s = remaining_s(session.deadline_s, environment.now_s())
        call = environment.channels.attach(worker.address, request, timeout_s, session.spec.span.traceparent)
        watch = SilenceWatch(call.cancel, environment.settings.draft_silence_max_s, environment.loop.lag)
        try:
            watch.start()
            while True:
                watch.begin()
                status = await call.read()
                watch.end()
                if not isinstance(status, draft_pb2.AttachStatus):  # end of the stream
                    return False
                if status.num_sent_nodes:
                    environment.placement.router.has_served(worker)
                if status.is_finished:
                    return True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not watch.has_cancelled or (task is not None and task.cancelling()):
                raise  # the attachment was cancelled
            self._lose(worker, "silent for too long", is_its_fault=True)
            return False
        except grpc.aio.AioRpcError as error:
            is_well = error.code() in _HEALTHY_REFUSALS or is_own_loss(error, environment.loop.lag)
            self._lose(worker, describe(error), is_its_fault=not is_well)
            return False
        finally:
            watch.stop()
            call.cancel()

    def _lose(self, worker: WorkerRecord, reason: str, *, is_its_fault: bool) -> None:
        environment = self._environment
        _log.info("draft worker %s detached from %s: %s", worker.worker_id, self._session.session_id, reason)
        environment.metrics.attach_failures.inc()
        if is_its_fault:
            environment.placement.router.pass_over(worker, environment.now_s())


# Refusals of a healthy worker that cannot take this session.
_HEALTHY_REFUSALS = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
