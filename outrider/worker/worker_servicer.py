"""The part of a gRPC service that both kinds of worker share: its description, its model thread, its drain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol

import grpc.aio

from outrider.errors import Overloaded
from outrider.worker.model_thread import ActionT, EventT, EventT_contra
from protos.outrider.v1 import common_pb2

Context = grpc.aio.ServicerContext[Any, Any]


class Driver(Protocol[EventT_contra]):
    """Whatever takes a servicer's events: the model thread, or another engine's sessions."""

    def submit(self, event: EventT_contra, *, is_release: bool = False, peer: str | None = None) -> bool: ...
    def has_room(self, peer: str) -> bool: ...
    def has_events(self) -> bool: ...
    def stalled_s(self) -> float: ...


class WorkerServicer(ABC, Generic[EventT, ActionT]):
    """The service of one worker, on the event loop; the scheduler and the model run on a thread of their own."""

    def __init__(self, info: common_pb2.WorkerInfo) -> None:
        self.info = info
        self._thread: Driver[EventT] | None = None
        self._is_draining = False

    def bind(self, thread: Driver[EventT]) -> None:
        """Connects whatever takes the events; must be called before the server starts."""
        self._thread = thread

    def start_draining(self) -> None:
        """Refuses new sessions from now on."""
        self._is_draining = True

    def has_events(self) -> bool:
        """Whether events wait for the model thread."""
        return self._thread is not None and self._thread.has_events()

    def _has_room(self, peer: str) -> bool:
        """Whether a peer's connection may be read: otherwise too much that came on it waits for the model thread."""
        return self._thread is None or self._thread.has_room(peer)

    @abstractmethod
    def dispatch(self, actions: list[ActionT]) -> None:
        """Carries out the scheduler's actions, on the event loop."""

    def _submit(self, event: EventT, *, is_release: bool = False, peer: str | None = None) -> None:
        """Sends an event to the scheduler. Raises Overloaded when it is too far behind."""
        assert self._thread is not None
        if not self._thread.submit(event, is_release=is_release, peer=peer):
            raise Overloaded("the worker is too far behind to take more")

    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: Context) -> common_pb2.WorkerInfo:
        return self.info
