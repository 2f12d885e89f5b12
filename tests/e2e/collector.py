"""An OpenTelemetry collector for tests: takes spans over gRPC and keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class CollectedSpan:
    """One span of some process."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    start_ns: int
    end_ns: int


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves OTLP's trace service."""

    endpoint: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)

    async def trace(
        self, trace_id: str, is_whole: Callable[[list[CollectedSpan]], bool], timeout_s: float = 20.0
    ) -> list[CollectedSpan]:
        """The spans of a trace once it is whole; processes send what they have every five seconds."""
        async with asyncio.timeout(timeout_s):
            while True:
                found = [span for span in self.spans if span.trace_id == trace_id]
                if is_whole(found):
                    return found
                await asyncio.sleep(0.1)

    async def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            service = _values(group.resource.attributes)["service.name"]
            for scope in group.scope_spans:
                self.spans += [_collected(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector that listens while the context is open."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
