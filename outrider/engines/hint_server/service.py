"""One hint server: connects its engine with the Hints service and the attachments. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Final

import grpc.aio

from outrider.addresses import join_address, own_host_towards, with_port
from outrider.concurrency.background import end_tasks, keep_going
from outrider.engines.engine_bridge import EngineBridge
from outrider.engines.followed_requests import FollowedRequest
from outrider.engines.frames import FrameReader
from outrider.engines.hint_server.attachments import Attachments
from outrider.engines.hint_server.draft_names import REFRESH_S, DraftNames
from outrider.engines.hint_server.draft_pool import DraftPool
from outrider.engines.hint_settings import HintSettings
from outrider.errors import ConfigurationError
from outrider.hint_service.draft_streams import DraftStreams
from outrider.hint_service.messages import HintEvent
from outrider.observability.metrics_server import serve_metrics
from outrider.observability.telemetry import TargetMetrics, show_expiry
from outrider.security.tls import Dialer, Role, RoleCheck, TlsFiles, check_role
from outrider.worker.rpc import SERVER_OPTIONS
from protos.outrider.v1 import hints_pb2, hints_pb2_grpc

logger = logging.getLogger(__name__)

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
        self._streams = DraftStreams(self._submit, self._metrics, vocab_size, time.monotonic)
        self._bridge = EngineBridge(self._streams.publish, self._attach, self._detach, self._count)
        self._attachments: Attachments | None = None
        permitted = {"/outrider.v1.Hints/Exchange": frozenset({Role.DRAFT})}
        interceptors = () if files is None else (RoleCheck(permitted),)
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._fingerprint = fingerprint

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

        def reached_by(worker: str) -> str:
            """The address at which a draft worker reaches this server. Raises OSError where there is no way to it."""
            return with_port(settings.reached_at or own_host_towards(worker), port)

        pool = DraftPool(())
        names = DraftNames(settings.draft_workers, pool.replace)
        looking: asyncio.Task[None] | None = None
        if names.has_names:
            work = keep_going(names.keep_looking, "the look-up of draft workers", pause_s=REFRESH_S)
            looking = asyncio.create_task(work)
        dialer = Dialer(self._files)
        self._attachments = Attachments(pool, dialer, reached_by, self._fingerprint, time.monotonic)
        self._metrics.show_state("ready")
        shown = join_address(settings.reached_at or settings.host, port)
        logger.info("hints are received at %s; draft workers: %s", shown, ", ".join(settings.draft_workers))
        try:
            await self._bridge.serve(engine, early)
        finally:
            await end_tasks(looking)
            await self._attachments.end()
            await self._server.stop(CALLS_END_S)

    def _attach(self, request: FollowedRequest) -> None:
        if self._attachments is not None:
            self._attachments.open(request.number, request.announcement, self._bridge.requests.committed_by)

    def _detach(self, number: int) -> None:
        if self._attachments is not None:
            self._attachments.close(number)

    def _count(self, commits: hints_pb2.CommitFrame, waited_s: float) -> None:
        self._metrics.hint_wait_s.inc(waited_s)
        for commit in commits.commits:
            self._metrics.generation_tokens.inc(len(commit.token_ids))
            if commit.num_tried_hints:
                self._metrics.num_drafts.inc()
                self._metrics.num_draft_tokens.inc(commit.num_tried_hints)
                self._metrics.num_accepted_tokens.inc(commit.num_held_hints)
                self._metrics.observe_accepted(commit.num_held_hints)

    def _submit(self, event: HintEvent, *, is_release: bool = False, peer: str | None = None) -> None:
        """Takes what a draft worker sent."""
        self._bridge.submit(event)
