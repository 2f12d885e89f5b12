"""gRPC as workers use it: limits of connections and messages, methods open to everybody, errors as statuses."""

from __future__ import annotations

from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.errors import OutriderError, Overloaded, Unavailable
from outrider.security.tls import ANY_ROLE

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
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
