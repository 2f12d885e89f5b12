"""One session at one target: the call, its draft and memory workers, and changes of speculation meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import grpc.aio

from coordinator.placement.slot_queue import Slot
from coordinator.request.draft_link import DraftLink, LinkedSession, takes_both
from coordinator.request.environment import Environment
from coordinator.request.target_call import TargetCall
from coordinator.speculation.fallback import FallbackAction
from coordinator.workers.channels import describe
from outrider.registry.worker_record import WorkerRecord
from protos.outrider.v1 import common_pb2, target_pb2

_log = logging.getLogger(__name__)

_SET_SPECULATION_TIMEOUT_S: Final = 2.0


class Attempt:
    """An attempt to generate a sequence at one target, open from construction to `leave`; `close` waits until the
    attachments of draft and memory workers have ended.

    A memory worker follows the session from its beginning to its end, whatever becomes of the draft worker."""

    def __init__(
        self,
        environment: Environment,
        slot: Slot,
        session: LinkedSession,
        *,
        speculation: Callable[[], common_pb2.SpeculationParams],
        on_no_draft: Callable[[], None],
    ) -> None:
        """`speculation` returns the target's current settings; `on_no_draft` is called when no draft worker is attached
        any more."""
        self._environment = environment
        self._slot = slot
        self._session = session
        self._speculation = speculation
        self._call = TargetCall(environment, session)
        has_both = takes_both(session.target)
        self._link = DraftLink(environment, session, on_no_draft, is_memory=False if has_both else None)
        self._memory_link = DraftLink(environment, session, is_memory=True)
        request = session.spec.request
        is_wanted = request.speculation.enabled and not request.speculation.is_plain
        if has_both and is_wanted and environment.settings.may_remember(request.tenant):
            self._memory_link.attach()
        self._background: set[asyncio.Task[None]] = set()
        self._is_open = True

    @property
    def draft(self) -> WorkerRecord | None:
        """The attached draft worker."""
        return self._link.worker

    async def read(self) -> target_pb2.GenerateEvent:
        """Reads the next event of the target's stream; raises as `TargetCall.read`."""
        return await self._call.read()

    def leave(self) -> None:
        """Cancels the call and the attachment, and gives the slot back."""
        if self._is_open:
            self._is_open = False
            self._call.cancel()
            self._environment.placement.admission.leave(self._session.spec.model, self._slot)
            for task in self._background:
                task.cancel()
            self._link.detach()
            self._memory_link.detach()

    async def close(self) -> None:
        """Waits, after `leave`, until the cancellations have been sent to the draft and the memory worker."""
        await self._link.close()
        await self._memory_link.close()

    def apply(self, actions: Sequence[FallbackAction]) -> None:
        """Performs the controller's actions."""
        for action in actions:
            match action:
                case FallbackAction.ATTACH:
                    self._link.attach()
                case FallbackAction.DETACH:
                    self._link.release()
                case FallbackAction.START_ACCEPTING_HINTS | FallbackAction.STOP_ACCEPTING_HINTS:
                    task = asyncio.create_task(self._set_speculation())
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)

    async def _set_speculation(self) -> None:
        target = self._slot.target
        request = target_pb2.SetSpeculationRequest(session_id=self._session.session_id, speculation=self._speculation())
        try:
            await self._environment.channels.set_speculation(target.address, request, _SET_SPECULATION_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # This costs speed only, and a session that has just ended answers NOT_FOUND.
            _log.info("target %s did not change speculation: %s", target.worker_id, describe(error))
