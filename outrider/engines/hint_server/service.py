"""One hint server: connects its engine's socket with the Hints service and the attachments. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any, Final

import grpc.aio

from outrider.addresses import join_address, with_port
from outrider.concurrency.background import end_tasks, keep_going
from outrider.engines.frames import FrameKind, FrameReader, pack
from outrider.engines.hint_server.attachments import Attachments
from outrider.engines.hint_server.draft_names import REFRESH_S, DraftNames
from outrider.engines.hint_server.draft_pool import DraftPool
from outrider.engines.hint_server.followed_requests import FollowedRequests
from outrider.engines.hint_settings import HintSettings
from outrider.errors import ConfigurationError, Overloaded
from outrider.hint_service.draft_streams import DraftStreams
from outrider.hint_service.messages import HintEvent
from outrider.observability.metrics_server import serve_metrics
from outrider.observability.telemetry import TargetMetrics, show_expiry
from outrider.security.tls import Dialer, Role, RoleCheck, TlsFiles, check_role
from outrider.worker.rpc import SERVER_OPTIONS
from protos.outrider.v1 import draft_pb2, hints_pb2, hints_pb2_grpc

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES: Final = 1024 * 1024
"""Bytes of hints that the engine has not read. A draft worker that sends more loses its stream."""
CALLS_END_S: Final = 0.5


class HintServer:
    """The hint server of one engine."""

    def __init__(self, settings: HintSettings, model_name: str, vocab_size: int, fingerprint: str) -> None:
        self._settings = settings
        files = None if settings.tls_folder is None else TlsFiles(settings.tls_folder)
        if files is not None:
            # To draft workers it is a target where they send hints, and a coordinator where it attaches requests.
            check_role(files.current(), Role.TARGET)
            check_role(files.current(), Role.COORDINATOR)
        self._files = files
        self._metrics = TargetMetrics(model_name, "hints")
        self._requests = FollowedRequests()
        self._streams = DraftStreams(self._submit, self._metrics, vocab_size, time.monotonic)
        permitted = {"/outrider.v1.Hints/Exchange": frozenset({Role.DRAFT})}
        interceptors = () if files is None else (RoleCheck(permitted),)
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._fingerprint = fingerprint
        self._writer: asyncio.StreamWriter | None = None
        self._is_flush_due = False

    async def run(self, engine: socket.socket, early: FrameReader) -> None:
        """Serves until the engine closes its end. `early` has what was read from it already. Raises OutriderError."""
        settings = self._settings
        hints_pb2_grpc.add_HintsServicer_to_server(self._streams, self._server)
        address = join_address(settings.host, settings.port)
        try:
            if self._files is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._files.server_credentials())
        except RuntimeError as error:
            raise ConfigurationError(f"cannot receive hints on {address}: {error}") from error
        if settings.metrics_port is not None:
            if self._files is not None:
                show_expiry(self._files, self._metrics.registry)
            serve_metrics(self._metrics.registry, settings.host, settings.metrics_port, self._files)
        await self._server.start()
        reached_at = with_port(settings.reached_at, port)
        pool = DraftPool(())
        names = DraftNames(settings.draft_workers, pool.replace)
        looking: asyncio.Task[None] | None = None
        if names.has_names:
            work = keep_going(names.keep_looking, "the look-up of draft workers", pause_s=REFRESH_S)
            looking = asyncio.create_task(work)
        attachments = Attachments(pool, Dialer(self._files), reached_at, self._fingerprint, time.monotonic)
        reader, self._writer = await asyncio.open_connection(sock=engine)
        self._metrics.show_state("ready")
        logger.info("hints are received at %s; draft workers: %s", reached_at, ", ".join(settings.draft_workers))
        try:
            await self._serve(reader, early, attachments)
        finally:
            await end_tasks(looking)
            await attachments.end()
            await self._server.stop(CALLS_END_S)
            self._writer.close()

    async def _serve(self, reader: asyncio.StreamReader, frames: FrameReader, attachments: Attachments) -> None:
        while True:
            for kind, number, body in frames.frames():
                self._take(kind, number, body, attachments)
            try:
                data = await reader.read(1 << 18)
            except ConnectionError:  # it left without reading its last hints
                return
            if not data:
                return
            frames.feed(data)

    def _take(self, kind: FrameKind, number: int, body: bytes, attachments: Attachments) -> None:
        """Takes a frame of the engine."""
        if kind is FrameKind.OPEN:
            request = self._requests.open(number, draft_pb2.AttachRequest.FromString(body))
            attachments.open(number, request.announcement, self._requests.committed_by)
        elif kind is FrameKind.COMMITS:
            actions, ended = self._requests.take_commits(hints_pb2.CommitFrame.FromString(body))
            for action in actions:
                self._streams.publish(action)
            for number in ended:
                attachments.close(number)

    def _submit(self, event: HintEvent, *, is_release: bool = False, is_from_peer: bool = False) -> None:
        """Takes what a draft worker sent. Raises Overloaded when the engine does not keep up, which ends its stream."""
        if is_from_peer and self._writer is not None:
            unread = self._writer.transport.get_write_buffer_size()
            if unread > MAX_UNREAD_BYTES:
                raise Overloaded(f"the engine has {unread} bytes of hints to read")
        for action in self._requests.handle(event):
            self._streams.publish(action)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the engine what has gathered in one turn of the loop."""
        self._is_flush_due = False
        hints: Any = self._requests.take_hints()
        if self._writer is None or self._writer.is_closing():  # the engine has gone
            return
        if hints.nodes or hints.subscribe or hints.unsubscribe:
            self._writer.write(pack(FrameKind.HINTS, hints.SerializeToString()))
