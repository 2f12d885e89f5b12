"""A gRPC server of grpc.aio with the services of one replica, for a process that Ray Serve does not host.

Its limits are those of a replica behind HAProxy: messages of a bounded size, bounded calls and connections at once,
time limits for clients that do not read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc
import grpc.aio

from coordinator.api.grpc.grpc_calls import GrpcCalls
from coordinator.api.grpc.grpc_health import add_health
from coordinator.api.grpc.grpc_ingress import MESSAGE_BYTES_MAX, add_generation, readable, readable_stream, timed
from coordinator.api.grpc.grpc_reflection import add_reflection
from coordinator.intake.request_limit import RequestLimit
from outrider.security.call_admission import READING_OPTIONS, OpenCalls
from protos.outrider.v1 import generation_pb2

_OPTIONS: Final = (
    *READING_OPTIONS,
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # two coordinators on one port would share its connections at random
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Finds clients that vanished, so that their sequences end.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; clients connect again by themselves
)


def make_server(
    calls: GrpcCalls,
    limit: RequestLimit,
    is_leaving: Callable[[], bool],
    *,
    has_reflection: bool,
    connections_max: int,
) -> grpc.aio.Server:
    """Makes a server that has no port yet. `is_leaving`: whether this process is about to end. Without
    `connections_max` strangers could take all descriptors of the process."""
    bounds = (
        ("grpc.max_concurrent_streams", limit.num_max + 100),
        ("grpc.max_allowed_incoming_connections", connections_max),
    )
    server = grpc.aio.server(options=[*_OPTIONS, *bounds])

    async def is_here(_: Any, context: Any) -> bytes:
        if is_leaving():
            context.set_code(grpc.StatusCode.UNAVAILABLE)
        return b""

    async def is_ready(_: Any, __: Any) -> bytes:
        return calls.readiness().SerializeToString()

    add_generation(_Servicer(calls), server, calls.admission(limit))
    add_health(server, is_here, is_ready, OpenCalls())
    if has_reflection:
        add_reflection(server)
    return server


class _Servicer:
    """The methods of outrider.v1.Generation as grpc.aio calls them."""

    def __init__(self, calls: GrpcCalls) -> None:
        self._calls = calls
        self.Generate = readable_stream(timed(self._generate, lambda: calls.pace))
        self.ListModels = readable(self._list_models)

    async def _generate(self, request: generation_pb2.GenerationRequest, context: Any) -> AsyncGenerator[Any]:
        with self._calls.counted():
            chunks = await self._calls.generate(request, context.invocation_metadata())
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def _list_models(self, _: Any, context: Any) -> generation_pb2.ListModelsResponse:
        with self._calls.counted():
            return await self._calls.list_models(context.invocation_metadata())
