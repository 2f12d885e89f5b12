"""The draft worker's gRPC service: coordinators attach sessions here. Runs on the event loop."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Protocol

from draft_worker.links import Dial, TargetLinks
from draft_worker.messages import (
    Action,
    AttachmentAccepted,
    AttachmentEnded,
    AttachmentRefused,
    AttachSession,
    DetachSession,
    Event,
    SendHints,
    Subscribe,
)
from outrider.addresses import split_address
from outrider.errors import (
    DeadlineExceeded,
    HeadMismatch,
    InvalidRequest,
    OutriderError,
    TokenizerMismatch,
    Unavailable,
)
from outrider.grammar import GrammarCompiler
from outrider.observability.telemetry import DraftMetrics
from outrider.observability.tracing import OFF, Attributes, Tracing
from outrider.sampling_params import BACKGROUND_PRIORITY, SamplingParams, SpeculationSettings
from outrider.worker.rpc import abort
from outrider.worker.session_checks import check_session
from outrider.worker.worker_servicer import Context, WorkerServicer
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc

STATUS_EVERY_S = 1.0


class Progress(Protocol):
    """The facts about a session that the status of its attachment tells."""

    num_sent_nodes: int
    num_roots: int

    @property
    def committed_len(self) -> int: ...


class Sessions(Protocol):
    """The scheduler, as far as the service reads it."""

    def check_room(self, *, is_background: bool = False) -> None: ...
    def progress(self, session_id: str) -> Progress | None: ...


@dataclass(slots=True)
class _Caller:
    """The coordinator's call that attached a session."""

    actions: asyncio.Queue[Action]  # not yet reported to it
    hint_token: str  # required by the target
    num_sent_nodes: int = 0


class DraftServicer(WorkerServicer[Event, Action], draft_pb2_grpc.DraftServicer):
    """Serves outrider.v1.Draft."""

    def __init__(
        self,
        info: common_pb2.WorkerInfo,
        scheduler: Sessions,
        metrics: DraftMetrics,
        grammars: GrammarCompiler | None,
        dial: Dial | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        """`grammars` None: hints are made without regard to grammars, which the target applies."""
        super().__init__(info)
        self._grammars = grammars
        self._scheduler = scheduler
        self._metrics = metrics
        self._callers: dict[str, _Caller] = {}
        self._links = TargetLinks(lambda event, target: self._submit(event, peer=target), dial, self._has_room)
        self._tracing = tracing

    @property
    def round_trips(self) -> str:
        """Round trips to the targets in the registry's format."""
        return self._links.distances.record_text()

    async def close(self) -> None:
        await self._links.close()

    def dispatch(self, actions: list[Action]) -> None:
        """Carries out the scheduler's actions, on the event loop."""
        for action in actions:
            if isinstance(action, AttachmentAccepted | AttachmentRefused | AttachmentEnded):
                caller = self._callers.get(action.session_id)
                if caller is not None:
                    caller.actions.put_nowait(action)
            else:
                if isinstance(action, Subscribe) and action.session_id in self._callers:
                    token = self._callers[action.session_id].hint_token
                    self._links.join(action.target_address, action.session_id, token)
                elif isinstance(action, SendHints):
                    self._metrics.num_sent_nodes.inc(len(action.hints))
                    if action.session_id in self._callers:
                        self._callers[action.session_id].num_sent_nodes += len(action.hints)
                self._links.put(action)

    async def Attach(self, request: draft_pb2.AttachRequest, context: Context) -> AsyncIterator[draft_pb2.AttachStatus]:
        try:
            event = self._parse(request)
            if event.sampling.grammar is not None and self._grammars is not None:
                self._scheduler.check_room(is_background=event.is_background)  # refuse before any work
                compiling = asyncio.create_task(self._grammars.compile_async(event.sampling.grammar, event.owner))
                try:
                    while not (await asyncio.wait([compiling], timeout=STATUS_EVERY_S))[0]:
                        yield draft_pb2.AttachStatus()  # without messages the worker would seem dead
                    event = replace(event, grammar=compiling.result())
                finally:
                    compiling.cancel()
                self._check_free(event.session_id)
        except OutriderError as error:
            await abort(context, error)
            return
        actions: asyncio.Queue[Action] = asyncio.Queue()
        caller = self._callers[event.session_id] = _Caller(actions, request.hint_token)
        try:
            self._submit(event)
            attributes: Attributes = {
                "outrider.session_id": event.session_id,
                "outrider.attachment": event.attachment,
            }
            with self._tracing.span("draft.attach", self._tracing.parent_of(context), attributes) as span:
                try:
                    async for status in self._follow(event.session_id, actions, request.deadline_ms / 1e3):
                        yield status
                finally:
                    span.set({"outrider.num_sent_nodes": caller.num_sent_nodes})
        except OutriderError as error:
            await abort(context, error)
        finally:
            del self._callers[event.session_id]
            self._links.leave(event.target_address, event.session_id)
            self._submit(DetachSession(event.session_id, event.attachment), is_release=True)

    async def _follow(
        self, session_id: str, actions: asyncio.Queue[Action], left_s: float
    ) -> AsyncIterator[draft_pb2.AttachStatus]:
        """Yields the statuses of one attachment until it ends. The last one says whether the session has finished; else
        this worker cannot follow it any further.

        Raises the error it was refused with, and DeadlineExceeded after `left_s` unless that is 0. The call's own
        deadline cancels this generator.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + (left_s or math.inf)
        status, is_over = draft_pb2.AttachStatus(), False
        while not is_over:
            if loop.time() >= until:
                raise DeadlineExceeded("the request's deadline has passed")
            try:
                async with asyncio.timeout_at(min(loop.time() + STATUS_EVERY_S, until)):
                    action = await actions.get()
                if isinstance(action, AttachmentRefused):
                    raise action.error
                if isinstance(action, AttachmentEnded):
                    is_over, status.is_finished = True, action.is_finished
            except TimeoutError:
                pass
            session = self._scheduler.progress(session_id)
            if session is not None:
                status.num_sent_nodes = session.num_sent_nodes
                status.num_roots = session.num_roots
                status.committed_len = session.committed_len
            yield status

    def _parse(self, request: draft_pb2.AttachRequest) -> AttachSession:
        """Parses and checks a request; raises an OutriderError that names the fault."""
        if self._is_draining:
            raise Unavailable("this worker is draining")
        check_session(request)
        self._check_free(request.session_id)
        try:
            split_address(request.target_address)
        except ValueError as error:
            raise InvalidRequest(
                "target_address", f"target_address is {request.target_address!r}; host:port is required"
            ) from error
        ours, theirs = self.info.tokenizer_fingerprint, request.tokenizer_fingerprint
        if theirs and theirs != ours:
            raise TokenizerMismatch(ours, theirs, "the target")
        if (head := self.info.head_fingerprint) and head != request.head_fingerprint:
            raise HeadMismatch(head, request.head_fingerprint)
        sampling = SamplingParams.from_proto(request.sampling)
        return AttachSession(
            request.session_id,
            request.attachment,
            request.target_address,
            list(request.token_ids),
            sampling,
            sampling.seed if sampling.seed is not None else secrets.randbits(64),
            min(request.num_prompt_tokens, len(request.token_ids)),
            SpeculationSettings.from_proto(request.speculation),
            cache_salt=request.cache_salt,
            owner=request.owner,
            is_background=request.priority >= BACKGROUND_PRIORITY,
        )

    def _check_free(self, session_id: str) -> None:
        if session_id in self._callers:
            raise InvalidRequest("session_id", f"session {session_id} is already attached here")
