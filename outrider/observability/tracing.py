"""Traces of requests across coordinator, target worker and draft worker (OpenTelemetry).

with tracing.span("target.generate", tracing.parent_of(context), {"outrider.session_id": ...}) as span:
    span.event("step", {"tokens": 3})

A span's `traceparent` (W3C Trace Context) goes to the next process in the call's metadata; a client's own, in its
request, makes our trace a part of its own. Tracing is off by default and then does nothing. When it is on, spans wait
in a bounded queue for a thread that sends them; where the collector is slow or away they are dropped, and no request
waits.

Spans describe how an output was generated, never its content.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, Self

from outrider.errors import ConfigurationError, OutriderError

logger = logging.getLogger(__name__)

TRACEPARENT: Final = "traceparent"
EVENTS_MAX: Final = 1024  # of one span; later events are only counted, so that its beginning stays
# The longest spans take 0.1 MB each on the wire and 0.6 MB here. Collectors refuse messages of more than 4 MiB, and an
# unreachable one should cost at most some hundred MB of memory.
SPANS_PER_MESSAGE: Final = 32
SPANS_WAITING_MAX: Final = 512
_QUEUE_VARIABLE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
_ENDING_S: Final = 1.0
_CLOSING_S: Final = 3.0
_EXPORT_TIMEOUT_S: Final = 5

Attributes = Mapping[str, str | int | float | bool]


class Span:
    """A span that is not recorded. Recorded ones override its methods.

    Its traceparent belongs to a trace that is not sampled, so that the next process does not start one of its own; it
    is empty where there are no traces at all.
    """

    is_recorded: bool = False

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def event(self, name: str, attributes: Attributes) -> None:
        """Records an event that happens now."""

    def set(self, attributes: Attributes) -> None:
        """Sets attributes that were unknown when the span began."""


NO_SPAN: Final = Span()


class _RecordedSpan(Span):
    is_recorded = True

    def __init__(self, span: Any, traceparent: str) -> None:
        super().__init__(traceparent)
        self._span = span
        self._num_events = 0

    def event(self, name: str, attributes: Attributes) -> None:
        self._num_events += 1
        if self._num_events <= EVENTS_MAX:
            self._span.add_event(name, _finite(attributes))
        else:
            # The SDK would drop the oldest events, which show where the request went.
            self._span.set_attribute("outrider.num_events_left_out", self._num_events - EVENTS_MAX)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_finite(attributes))


class Tracing:
    """The tracer of one process, off without a provider. As a context manager it closes itself at the end."""

    def __init__(self, provider: Any = None) -> None:
        """`provider` is a TracerProvider of OpenTelemetry's SDK, or None."""
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("outrider")
        self._num_open = 0
        self._has_none_open = asyncio.Event()
        self._has_none_open.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @classmethod
    def to(cls, endpoint: str | None, service: str, instance: str) -> Tracing:
        """Sends spans to `endpoint`, an OTLP collector's gRPC port (http://host:4317, or https://); None: off.

        OpenTelemetry's own variables for sampling, headers and batches apply. Raises ConfigurationError.
        """
        if endpoint is None:
            return cls()
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"--otlp-endpoint {endpoint} is no URL of a collector, such as http://127.0.0.1:4317"
            )
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanLimits, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigurationError(
                f"--otlp-endpoint needs OpenTelemetry ({error}): pip install opentelemetry-exporter-otlp-proto-grpc"
            ) from error
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        provider = TracerProvider(resource=resource, span_limits=SpanLimits(max_events=EVENTS_MAX))
        exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT_S)
        try:
            processor = BatchSpanProcessor(
                exporter,
                max_queue_size=None if os.environ.get(_QUEUE_VARIABLE) else SPANS_WAITING_MAX,
                max_export_batch_size=_spans_per_message(os.environ),
            )
        except ValueError as error:
            raise ConfigurationError(f"OpenTelemetry's variables OTEL_BSP_...: {error}") from error
        provider.add_span_processor(processor)
        return cls(provider)

    @contextmanager
    def span(self, name: str, traceparent: str | None, attributes: Attributes) -> Iterator[Span]:
        """A span that is open while the context is. `traceparent` is the caller's, if any. An error that leaves is
        recorded."""
        if self._tracer is None:
            yield NO_SPAN
            return
        from opentelemetry import trace

        started = self._tracer.start_span(
            name,
            context=_context(traceparent),
            kind=trace.SpanKind.SERVER,
            attributes=_finite(attributes),
        )
        traceparent = _traceparent(started)
        self._num_open += 1
        self._has_none_open.clear()
        try:
            yield _RecordedSpan(started, traceparent) if started.is_recording() else Span(traceparent)
        except OutriderError as error:
            _fail(started, error, error.message)
            raise
        except Exception as error:
            _fail(started, error)  # a bug of ours, whose message may quote a prompt
            raise
        except BaseException as error:
            started.set_attribute("error.type", type(error).__name__)  # mainly a cancellation
            raise
        finally:
            started.end()
            self._num_open -= 1
            if not self._num_open:
                self._has_none_open.set()

    def parent_of(self, context: Any) -> str | None:
        """The traceparent of a gRPC call, from its metadata; None while tracing is off."""
        if self._tracer is None:
            return None
        return next((str(value) for name, value in context.invocation_metadata() or () if name == TRACEPARENT), None)

    async def close(self) -> None:
        """Sends the remaining spans, for a limited time: an exporter whose collector is away would retry for long."""
        if self._provider is None:
            return
        # A stopped gRPC server has cancelled its calls; they learn of it in the loop's next iteration.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                await self._has_none_open.wait()
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSING_S)


OFF: Final = Tracing()


def metadata_of(traceparent: str) -> tuple[tuple[str, str], ...] | None:
    """Metadata for a gRPC call that is part of a trace; None where there is none."""
    return ((TRACEPARENT, traceparent),) if traceparent else None


def _spans_per_message(variables: Mapping[str, str]) -> int | None:
    """Spans per message; None: the operator's setting. At most the length of the queue."""
    if variables.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE"):
        return None
    queue_size = variables.get(_QUEUE_VARIABLE, "")
    return min(SPANS_PER_MESSAGE, int(queue_size)) if queue_size.isdecimal() else SPANS_PER_MESSAGE


def _fail(span: Any, error: Exception, message: str | None = None) -> None:
    from opentelemetry import trace

    kind = error if isinstance(error, OutriderError) else OutriderError
    span.set_attributes({"error.type": type(error).__name__, "rpc.grpc.status": kind.grpc_code})
    span.set_status(trace.Status(trace.StatusCode.ERROR, message))


def _context(traceparent: str | None) -> Any:
    """The context of a traceparent; an invalid one starts a new trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, context=Context())


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    if not context.is_valid:  # the SDK is switched off by OpenTelemetry's own variables
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _finite(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if not isinstance(value, float) or math.isfinite(value)}
