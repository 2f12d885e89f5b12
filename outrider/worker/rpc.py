"""gRPC as workers use it: limits of connections and messages, methods open to everybody, errors as statuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.errors import AnotherLife, OutriderError, Overloaded, Unavailable
from outrider.message_sizes import MAX_MESSAGE_BYTES
from outrider.security.tls import ANY_ROLE

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two workers on one port would share its connections at random
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Detects peers that vanished, so that their sessions are freed (I8).
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (
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
