"""Connects one engine's socket with the draft workers that follow its requests. Runs on the event loop.

Hints are sent as the engine takes them. Those that wait are bounded by request (`pending_hints`), so that no draft
worker has to be cut off for what the engine does not read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from outrider.concurrency.background import end_tasks
from outrider.engines.followed_requests import FollowedRequest, FollowedRequests
from outrider.engines.frames import FrameKind, FrameReader, pack, time_number
from outrider.hint_service.messages import CommitPublished, HintEvent
from protos.outrider.v1 import draft_pb2, hints_pb2

logger = logging.getLogger(__name__)

READ_BYTES: Final = 1 << 18


class EngineBridge:
    """The requests of one engine, and the socket by which it tells of them and is told of hints."""

    def __init__(
        self,
        publish: Callable[[CommitPublished], Any],
        on_open: Callable[[FollowedRequest], None] = lambda request: None,
        on_end: Callable[[int], None] = lambda number: None,
        on_commits: Callable[[hints_pb2.CommitFrame, float], None] = lambda commits, waited_s: None,
    ) -> None:
        """`publish` sends a commit to a draft worker; the others are called when the engine announces a request, when
        one has ended, and with commits and the seconds that the engine waited for hints since the last ones."""
        self.requests = FollowedRequests()
        self._publish = publish
        self._on_open = on_open
        self._on_end = on_end
        self._on_commits = on_commits
        self._has_news = asyncio.Event()

    async def serve(self, engine: socket.socket, frames: FrameReader) -> None:
        """Serves until the engine closes its end. `frames` has what was read from it already. Raises BadFrame and
        DecodeError when the engine sends nonsense."""
        reader, writer = await asyncio.open_connection(sock=engine)
        writer.transport.set_write_buffer_limits(high=0)  # what the socket does not take waits in `requests`
        sending = asyncio.create_task(self._send(writer), name="hints to the engine")
        try:
            while True:
                for kind, number, body in frames.frames():
                    self._take(kind, number, body)
                try:
                    data = await reader.read(min(READ_BYTES, frames.room))
                except ConnectionError:  # it left without reading its last hints
                    return
                if not data:
                    return
                frames.feed(data)
        finally:
            await end_tasks(sending)
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        """Sends the engine what has gathered in one turn of the loop, and more whenever it has taken some."""
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                while (told := self.requests.take_hints()) is not None:
                    frame, arrived_at = told
                    at = arrived_at or time.monotonic()
                    writer.write(pack(FrameKind.HINTS, frame.SerializeToString(), time_number(at)))
                    await writer.drain()
        except ConnectionError:
            pass  # the reader notices the end, too
        except Exception:
            logger.exception("hints are not sent to the engine any more; it opens another link")
            writer.close()

    def _take(self, kind: FrameKind, number: int, body: bytes) -> None:
        """Takes a frame of the engine."""
        if kind is FrameKind.OPEN:
            self._on_open(self.requests.open(number, draft_pb2.AttachRequest.FromString(body)))
            self._has_news.set()
        elif kind is FrameKind.TAKEN:
            self.requests.taken(number)
            self._has_news.set()
        elif kind is FrameKind.COMMITS:
            commits = hints_pb2.CommitFrame.FromString(body)
            self._on_commits(commits, number / 1e6)
            actions, ended = self.requests.take_commits(commits)
            self.publish(actions)
            for ended_number in ended:
                self._on_end(ended_number)

    def publish(self, actions: Sequence[CommitPublished]) -> None:
        """Sends commits to draft workers."""
        for action in actions:
            self._publish(action)

    def submit(self, event: HintEvent) -> None:
        """Takes what a draft worker sent."""
        self.publish(self.requests.handle(event))
        self._has_news.set()
