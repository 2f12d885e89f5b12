"""One replica of the coordinator, whoever hosts it: its service, its batches, its metrics and the calls of both APIs.

    async with Replica(settings) as replica:
        app, calls = replica.http_application(), replica.grpc_calls

A replica is stateless: its knowledge is in the registry or in open requests.
"""

from __future__ import annotations

import gc
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Self

from fastapi import FastAPI

from coordinator.api.grpc.grpc_calls import GrpcCalls
from coordinator.api.http.application import create_app, request_limit
from coordinator.api.http.batch_service import BatchService
from coordinator.observability.metrics import serve_replica
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from outrider.concurrency import time_slices
from outrider.observability import logs

YOUNG_OBJECTS: Final = 20_000
"""Objects made and not freed between two searches for cyclic garbage, instead of Python's 700. Nearly all of ours are
freed with their last reference, and with 500 streams the searches took 13 % of a replica's time."""


class Replica:
    """A replica as both hostings share it; open it on the event loop that serves requests."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        """Prepares this process, too: its logs, its memory, its turns on the processor. Raises ConfigurationError."""
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        time_slices.use_short_slices()  # beside a worker's model thread on a small machine
        logs.configure(
            settings.log_format,
            level=logging.INFO if settings.logs_requests else logging.WARNING,
            path=None if settings.log_path is None else Path(settings.log_path),
        )
        self._service = GenerationService(settings)
        self.metrics_port = serve_replica(self._service.environment.metrics.registry, settings)
        """The port of its own `/metrics`; None without one."""
        self.grpc_calls = GrpcCalls(self._service)
        self.limit = request_limit(settings)
        """Bounds what both APIs take in together."""
        self._batches = BatchService(self._service)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._service)
            await stack.enter_async_context(self._batches)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def http_application(self, *, is_echoing_request_id: bool = True) -> FastAPI:
        """Builds the HTTP API; see `create_app`."""
        return create_app(
            self._service, self._batches.desk, is_echoing_request_id=is_echoing_request_id, limit=self.limit
        )

    def end_requests(self) -> None:
        """Ends every open request with an error that its client sees, and begins none from now on."""
        self._service.environment.open_requests.end_all()
