"""Draft workers' hints on their way to vLLM's scheduler, and its commits on their way back. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from google.protobuf.message import DecodeError

from outrider.concurrency.background import end_tasks
from outrider.engines.engine_bridge import EngineBridge
from outrider.engines.followed_requests import FollowedRequest
from outrider.engines.frames import FROM_ENGINE, BadFrame, FrameReader
from outrider.engines.target_door import LINK, open_door
from outrider.hint_service.messages import (
    CloseStream,
    CommitPublished,
    HintEvent,
    HintsArrived,
    SubscribeDraft,
    UnsubscribeDraft,
)
from target_worker.limits import SchedulerLimits
from target_worker.scheduling.early_events import EarlyEvents

logger = logging.getLogger(__name__)

RECEIVE_S: Final = 1.0
"""How long an engine that has connected may take to say why. It says so at once."""


class SessionHints:
    """The hints of all sessions of one worker."""

    def __init__(
        self,
        publish: Callable[[CommitPublished], Any],
        on_wait: Callable[[float], None] = lambda waited_s: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`publish` sends a commit to a draft worker; `on_wait` takes the seconds that steps waited for hints; `now` is
        a clock, seconds."""
        self._bridge = EngineBridge(publish, on_commits=lambda commits, waited_s: on_wait(waited_s))
        self._early = EarlyEvents(SchedulerLimits())
        self._now = now

    def open(self, name: str, token_ids: list[int], *, is_on: bool) -> None:
        """A session begins. is_on: whether its caller permits hints."""
        self._bridge.requests.expect(name, token_ids, is_on=is_on)
        for event in self._early.take(name):
            self._bridge.submit(event)

    def switch(self, name: str, *, is_on: bool) -> None:
        """Its caller permits hints, or no longer."""
        self._bridge.publish(self._bridge.requests.switch(name, is_on=is_on))

    def close(self, name: str) -> None:
        """A session has ended, whether the engine knows it or not."""
        self._bridge.publish(self._bridge.requests.close(name))

    def named(self, name: str) -> FollowedRequest | None:
        """An open session, as draft workers see it."""
        return self._bridge.requests.named(name)

    def is_resting(self, name: str) -> bool:
        """Whether hints are permitted, and the engine has paused them itself."""
        request = self.named(name)
        return request is not None and request.is_on and request.is_paused

    def submit(self, event: HintEvent) -> None:
        """Takes what a draft worker sent."""
        match event:
            case SubscribeDraft() | HintsArrived() if self.named(event.session_id) is None:
                self._early.keep(event.session_id, event, self._now())
                return
            case UnsubscribeDraft():
                self._early.forget_subscriber(event.stream_id, event.session_id)
            case CloseStream():
                self._early.forget_subscriber(event.stream_id)
        self._bridge.submit(event)

    async def serve(self, engine: socket.socket) -> None:
        """Serves a link to the engine until it is closed."""
        try:
            await self._bridge.serve(engine, FrameReader(FROM_ENGINE))
        except (BadFrame, DecodeError, OSError) as error:
            logger.warning("the link to vLLM's scheduler broke: %s", error)
        finally:
            self._bridge.publish(self._bridge.requests.lose_engine())


class EngineDoor:
    """The socket at which this worker's engine asks for its link. Of the links only the last one counts."""

    def __init__(self, hints: SessionHints) -> None:
        self._hints = hints
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-vllm-"))  # for this user alone
        self._socket, self.path = open_door(self._folder)
        self._tethers: list[socket.socket] = []
        self._link: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        await end_tasks(self._link)
        for each in (self._socket, *self._tethers):
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._socket.accept()
            connection.settimeout(RECEIVE_S)
            what, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if what != LINK:
                self._tethers.append(connection)  # until this process ends
                return
            connection.close()
            link = socket.socket(fileno=descriptors[0])
            link.setblocking(False)
            before, self._link = self._link, asyncio.create_task(self._serve(link, self._link), name="engine's link")
            if before is not None:
                before.cancel()

    async def _serve(self, link: socket.socket, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._hints.serve(link)
