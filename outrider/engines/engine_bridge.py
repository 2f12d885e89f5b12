"""Connects one engine's socket with the draft workers that follow its requests. Runs on the event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from outrider.engines.followed_requests import FollowedRequest, FollowedRequests
from outrider.engines.frames import FrameKind, FrameReader, pack, time_number
from outrider.errors import Overloaded
from outrider.hint_service.messages import CommitPublished, HintEvent
from protos.outrider.v1 import draft_pb2, hints_pb2

MAX_UNREAD_BYTES: Final = 1024 * 1024
"""Bytes of hints that the engine has not read. A draft worker that sends more loses its stream."""
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
        self._writer: asyncio.StreamWriter | None = None
        self._is_flush_due = False

    async def serve(self, engine: socket.socket, frames: FrameReader) -> None:
        """Serves until the engine closes its end. `frames` has what was read from it already. Raises BadFrame and
        DecodeError when the engine sends nonsense."""
        reader, writer = await asyncio.open_connection(sock=engine)
        self._writer = writer
        try:
            while True:
                for kind, number, body in frames.frames():
                    self._take(kind, number, body)
                try:
                    data = await reader.read(READ_BYTES)
                except ConnectionError:  # it left without reading its last hints
                    return
                if not data:
                    return
                frames.feed(data)
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()

    def _take(self, kind: FrameKind, number: int, body: bytes) -> None:
        """Takes a frame of the engine."""
        if kind is FrameKind.OPEN:
            self._on_open(self.requests.open(number, draft_pb2.AttachRequest.FromString(body)))
            self._flush_soon()
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

    def submit(self, event: HintEvent, *, is_from_peer: bool = False) -> None:
        """Takes what a draft worker sent. Raises Overloaded when the engine does not keep up, which ends its stream."""
        if is_from_peer and self._writer is not None:
            unread = self._writer.transport.get_write_buffer_size()
            if unread > MAX_UNREAD_BYTES:
                raise Overloaded(f"the engine has {unread} bytes of hints to read")
        self.publish(self.requests.handle(event))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the engine what has gathered in one turn of the loop."""
        self._is_flush_due = False
        hints: Any = self.requests.take_hints()
        if self._writer is None or self._writer.is_closing():  # the engine has gone
            return
        if hints.nodes or hints.subscribe or hints.unsubscribe:
            self._writer.write(pack(FrameKind.HINTS, hints.SerializeToString(), time_number(time.monotonic())))
