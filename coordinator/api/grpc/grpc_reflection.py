"""Registers gRPC's reflection with gRPC servers, in both versions that clients ask for: v1 and v1alpha.

Serve (2.60) knows only v1alpha, as does its library. The messages of v1 are the same under another name. Descriptors
are those of the services at this port alone. Reflection checks no keys, so it is registered only where there are none.

Serve's function runs inside the proxy or replica process, which finds it by its import path.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from coordinator.api.grpc.grpc_ingress import Unreadable, read_or_report
from outrider.security.call_admission import OpenCalls, admitted
from protos.outrider.v1 import common_pb2, generation_pb2

SERVICES: Final = tuple(f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha"))
REFLECTED: Final = ("outrider.v1.Generation", "grpc.health.v1.Health", *SERVICES)


def add_ReflectionServicer_to_server(servicer: Any, server: Any) -> None:
    """Registers both versions with a server of Serve's; `servicer` is Serve's placeholder."""
    for name in SERVICES:
        server.add_passthrough_service(name)  # else Serve would send its calls to a replica
    add_reflection(server)


def add_reflection(server: Any) -> None:
    """Registers both versions with any server."""
    method = grpc.stream_stream_rpc_method_handler(
        _Reflection(REFLECTED, descriptors()).reflect,
        request_deserializer=read_or_report(reflection_pb2.ServerReflectionRequest.FromString),
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    method = admitted(method, OpenCalls().admission)
    for name in SERVICES:
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def descriptors() -> DescriptorPool:
    """The files of the services at the port, and nothing else that the process has loaded."""
    pool = DescriptorPool()
    for module in (common_pb2, generation_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    older = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    newer = text_format.MessageToString(older).replace("v1alpha", "v1")
    pool.Add(text_format.Parse(newer, descriptor_pb2.FileDescriptorProto()))
    return pool


class _Reflection(ReflectionServicer):
    async def reflect(self, requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any]:
        async def readable() -> AsyncGenerator[Any]:
            async for request in requests:
                if isinstance(request, Unreadable):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.cause)
                yield request

        async for answer in self.ServerReflectionInfo(readable(), context):
            yield answer
