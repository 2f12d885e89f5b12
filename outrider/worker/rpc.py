"""gRPC as workers use it: limits of connections and messages, methods open to everybody, health, errors as statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from outrider.errors import AnotherLife, OutriderError, Overloaded, Unavailable
from outrider.message_sizes import MAX_MESSAGE_BYTES
from outrider.security.call_admission import READING_OPTIONS, UNCOMPRESSED
from outrider.security.tls import ANY_ROLE

SERVER_OPTIONS = (
    *READING_OPTIONS,
    ("grpc.so_reuseport", 0),  # two workers on one port would share its connections at random
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Detects peers that vanished, so that their sessions are freed (I8).
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
HEALTH_SERVER_OPTIONS = (*SERVER_OPTIONS, ("grpc.max_concurrent_streams", 100))
"""For the health port, which asks for no certificate."""
CHANNEL_OPTIONS = (
    UNCOMPRESSED,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

OPEN_METHODS: Final = dict.fromkeys(
    (
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ),
    ANY_ROLE,
)
"""Methods of every worker beside its own services, open to every role."""


class HealthService(health_pb2_grpc.HealthServicer):
    """grpc.health.v1, with statuses that never wait for watchers: gRPC's own service keeps a lock while it writes, and
    one watcher that takes nothing would hold up a worker's start and end."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._change = asyncio.Event()  # set at the next change, and replaced

    def set(self, service: str, status: Any) -> None:
        """Sets the status of a service; watchers are told on their next turn."""
        self._statuses[service] = status
        self._change.set()
        self._change = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def List(self, request: Any, context: Any) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        sent = None
        while True:
            change = self._change
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status == sent:
                await change.wait()
                continue
            await context.write(health_pb2.HealthCheckResponse(status=status))
            sent = status


class LateServices(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Services of a server that has started, added as to a server itself: gRPC takes none any more by then.

    Until they are opened every method is refused. Whoever calls one knows the worker from its earlier life, and goes to
    another worker at once.
    """

    def __init__(self) -> None:
        self._handlers: list[Any] = []
        self._is_open = False

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Does nothing: they are among the generic ones."""

    def open(self) -> None:
        self._is_open = True

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not self._is_open:
            return grpc.stream_stream_rpc_method_handler(_refuse_unready)
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((method for method in found if method is not None), None)


async def _refuse_unready(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await abort(context, AnotherLife("this worker is loading its model; whatever it was before has ended"))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> None:
    """Ends the call with the error's own status; never returns.

    A temporary error carries google.rpc.RetryInfo with the retry delay.
    """
    code = grpc.StatusCode[error.grpc_code]
    status = status_pb2.Status(code=code.value[0], message=error.message)
    if isinstance(error, Overloaded | Unavailable):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1e3))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    await context.abort(code, error.message, rpc_status.to_status(status).trailing_metadata)
