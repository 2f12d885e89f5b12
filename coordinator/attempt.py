"""One session at one target: the call, the draft worker that follows it, and what the target is told meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, Self

import grpc.aio

from coordinator.admission import Place
from coordinator.draft_link import DraftLink, LinkedSession
from coordinator.environment import Environment
from coordinator.fallback import FallbackAction
from coordinator.target_call import TargetCall
from coordinator.workers import describe
from outrider.worker_record import WorkerRecord
from protos.outrider.v1 import common_pb2, target_pb2

_log = logging.getLogger(__name__)

_SET_SPECULATION_TIMEOUT_S: Final = 2.0


class Attempt:
    """Runs while the context is open; leaving it, by whatever way, cancels both sides and leaves the place."""

    def __init__(
        self,
        environment: Environment,
        place: Place,
        model: str,
        request: target_pb2.GenerateRequest,
        session: LinkedSession,
        *,
        speculation: Callable[[], common_pb2.SpeculationParams],
        on_no_draft: Callable[[Attempt], None],
    ) -> None:
        """`speculation` says what the target should do as of now; `on_no_draft` is told when nobody follows."""
        self._environment = environment
        self._place = place
        self._model = model
        self._request = request
        self._speculation = speculation
        self._call = TargetCall(environment, place.target, request, session.deadline_s, session.traceparent)
        self._link = DraftLink(environment, session, on_no_draft=lambda: on_no_draft(self))
        self._background: set[asyncio.Task[None]] = set()

    @property
    def target(self) -> WorkerRecord:
        return self._place.target

    @property
    def draft(self) -> WorkerRecord | None:
        """The draft worker that follows."""
        return self._link.worker

    @property
    def is_trial(self) -> bool:
        """Whether the target is to have no other run that one more loss would end."""
        return self._request.trial_tokens > 0

    @property
    def is_replay(self) -> bool:
        """Whether it goes on with what another target had begun."""
        return len(self._request.token_ids) > self._request.num_prompt_tokens

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        self._environment.admission.leave(self._model, self._place)
        for task in self._background:
            task.cancel()
        await self._link.close()

    def events(self) -> AsyncGenerator[target_pb2.GenerateEvent]:
        """As `TargetCall.events`."""
        return self._call.events()

    def apply(self, actions: Sequence[FallbackAction]) -> None:
        """Does what the controller decided."""
        for action in actions:
            match action:
                case FallbackAction.ATTACH:
                    self._link.attach()
                case FallbackAction.DETACH:
                    self._link.detach()
                case FallbackAction.START_LISTENING | FallbackAction.STOP_LISTENING:
                    task = asyncio.create_task(self._set_speculation())
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)

    async def _set_speculation(self) -> None:
        request = target_pb2.SetSpeculationRequest(
            session_id=self._request.session_id, speculation=self._speculation()
        )
        try:
            await self._environment.channels.set_speculation(
                self.target.address, request, _SET_SPECULATION_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            # It costs speed only, and a session that has just ended answers NOT_FOUND.
            _log.info("target %s did not change speculation: %s", self.target.worker_id, describe(error))
