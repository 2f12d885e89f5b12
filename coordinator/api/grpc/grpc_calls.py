"""The calls of the gRPC API over one service, for whatever server hosts them: callers, failures, pace of clients.

The host gives a call that raises the status of its error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

from grpc_health.v1 import health_pb2

from coordinator.access.api_keys import ANYBODY, Scope
from coordinator.api.grpc import grpc_api
from coordinator.api.grpc.grpc_ingress import MESSAGE_BYTES_MAX, Pace
from coordinator.intake.generation_request import Origin
from coordinator.intake.request_limit import RequestLimit
from coordinator.service.generation_service import GenerationService
from outrider.concurrency.background import until_ended
from outrider.errors import OutriderError
from outrider.observability.tracing import TRACEPARENT
from outrider.security.call_admission import Admission, Read
from protos.outrider.v1 import generation_pb2

_log = logging.getLogger(__name__)

LATE_S: Final = 1.0
"""After how long a message that is not complete counts with the most bytes that it may have."""

Metadata = Iterable[tuple[str, Any]] | None


class GrpcCalls:
    """outrider.v1.Generation, and the readiness for grpc.health.v1."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        environment = service.environment
        on_cut = environment.metrics.slow_readers.labels("connection").inc
        self.pace = Pace(environment.settings.client_stall_max_s, on_cut)
        """Limits on the pace of clients."""

    async def generate(
        self, request: generation_pb2.GenerationRequest, metadata: Metadata
    ) -> AsyncGenerator[generation_pb2.GenerationChunk]:
        """Serves Generation.Generate. Raises OutriderError, at once if the caller may not ask."""
        return grpc_api.generate(self._service, request, await self._origin(metadata))

    async def list_models(self, metadata: Metadata) -> generation_pb2.ListModelsResponse:
        """Serves Generation.ListModels. Raises Unauthenticated, Forbidden or Unavailable."""
        return grpc_api.list_models(self._service, (await self._origin(metadata)).caller)

    def admission(self, limit: RequestLimit) -> Admission:
        """Authenticates each call and counts it among the requests of the process, before its message is read."""

        @asynccontextmanager
        async def admission(context: Any, read: Read) -> AsyncGenerator[Any]:
            with ExitStack() as stack:
                with self.counted():
                    caller = (await self._origin(context.invocation_metadata())).caller
                    arriving = stack.enter_context(limit.entered(caller.tenant))
                    with arriving() as take_bytes:
                        request = await _read(read, take_bytes)
                yield request

        return admission

    async def authenticate(self, metadata: Metadata) -> None:
        """Raises Unauthenticated, Forbidden or Unavailable for a caller that may not ask."""
        await self._origin(metadata)

    def readiness(self) -> health_pb2.HealthCheckResponse:
        """Tells whether a target worker is usable."""
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._service.catalog.served(ANYBODY) else status.NOT_SERVING)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts an error that ends the call. One that is no OutriderError is a defect of ours: it is logged, and its
        text is for nobody else."""
        try:
            yield
        except Exception as error:
            self._service.count_failure(error)
            if isinstance(error, OutriderError):
                raise
            _log.exception("a call over gRPC failed", exc_info=error)
            raise OutriderError("internal error; the log has it") from None

    async def _origin(self, metadata: Metadata) -> Origin:
        """Authenticates a call by its metadata. Raises Unauthenticated, Forbidden or Unavailable."""
        found = dict(metadata or ())
        return Origin(
            await self._service.authenticate(found.get("authorization"), Scope.GENERATE),
            found.get(TRACEPARENT),
            found.get(grpc_api.CANARY_KEY_METADATA, ""),
        )


async def _read(read: Read, take_bytes: Callable[[int], None]) -> Any:
    """Reads a message. gRPC tells nothing of one before it is complete, so only those that are late count by bytes."""
    reading = asyncio.create_task(read())
    try:
        await asyncio.wait((reading,), timeout=LATE_S)
        if not reading.done():
            take_bytes(MESSAGE_BYTES_MAX)
        return await reading
    finally:
        reading.cancel()
        await until_ended(reading)
