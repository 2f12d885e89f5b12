"""Traces: what a span tells, whose child it is, and that nothing of it is there where it is off."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import StatusCode

from outrider.errors import ConfigurationError, Overloaded
from outrider.local.free_ports import free_ports
from outrider.observability.tracing import EVENTS_MAX, OFF, SPANS_PER_MESSAGE, Tracing, metadata_of
from outrider.worker.worker_process import WorkerProcess
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.e2e.collector import Collector, collecting
from tests.models import model_dir

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def test_a_span_continues_the_callers_trace(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with (
        tracing.span("outer", PARENT, {"a": 1}) as outer,
        tracing.span("inner", outer.traceparent, {}) as inner,
    ):
        inner.event("step", {"tokens": 3, "step_ms": float("nan")})
        outer.set({"b": "two"})
    first, second = exporter.get_finished_spans()
    assert (first.name, second.name) == ("inner", "outer")
    assert f"{first.context.trace_id:032x}" == f"{second.context.trace_id:032x}" == PARENT.split("-")[1]
    assert first.parent is not None
    assert second.parent is not None
    assert first.parent.span_id == second.context.span_id
    assert f"{second.parent.span_id:016x}" == PARENT.split("-")[2]
    assert dict(second.attributes or {}) == {"a": 1, "b": "two"}
    assert [(event.name, dict(event.attributes or {})) for event in first.events] == [("step", {"tokens": 3})]


@pytest.mark.parametrize("nonsense", [None, "", "x", "00-zz-zz-01", PARENT + "-more", "\x00" * 55, "é"])
def test_what_is_no_parent_begins_a_trace_of_its_own(
    tracing: Tracing, exporter: InMemorySpanExporter, nonsense: str | None
) -> None:
    with tracing.span("outer", nonsense, {}) as span:
        assert span.is_recorded
    (only,) = exporter.get_finished_spans()
    assert only.parent is None


def test_a_client_that_does_not_sample_is_not_recorded(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with tracing.span("outer", PARENT.removesuffix("01") + "00", {}) as span:
        assert not span.is_recorded
        span.event("step", {})
        _, trace_id, span_id, flags = span.traceparent.split("-")
        assert (trace_id, flags) == (PARENT.split("-")[1], "00")
        assert span_id != PARENT.split("-")[2]
        ((_, passed_on),) = metadata_of(span.traceparent) or ()
        with tracing.span("of the next process", passed_on, {}) as inner:
            assert not inner.is_recorded
    assert not exporter.get_finished_spans()


def test_what_this_process_does_not_sample_the_next_one_does_not_either(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    choosy = Tracing(TracerProvider(sampler=ParentBased(ALWAYS_OFF)))
    with choosy.span("outer", None, {}) as outer, tracing.span("inner", outer.traceparent, {}) as inner:
        assert not outer.is_recorded
        assert not inner.is_recorded
    assert not exporter.get_finished_spans()


def test_an_sdk_that_is_switched_off_passes_no_trace_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with Tracing(TracerProvider()).span("outer", None, {}) as span:
        assert (span.is_recorded, metadata_of(span.traceparent)) == (False, None)


def test_an_error_is_told_and_goes_on(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(Overloaded), tracing.span("outer", None, {}):
        raise Overloaded("full")
    with pytest.raises(asyncio.CancelledError), tracing.span("outer", None, {}):
        raise asyncio.CancelledError
    refused, cancelled = exporter.get_finished_spans()
    assert dict(refused.attributes or {})["rpc.grpc.status"] == "RESOURCE_EXHAUSTED"
    assert refused.status.description == "full"
    assert dict(cancelled.attributes or {})["error.type"] == "CancelledError"
    assert (refused.status.status_code, cancelled.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)


def test_a_defect_of_ours_is_an_error_and_its_message_is_not_told(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(RuntimeError), tracing.span("outer", None, {}):
        raise RuntimeError("the prompt was: secret")
    (failed,) = exporter.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {}) == {"error.type": "RuntimeError", "rpc.grpc.status": "INTERNAL"}
    assert "secret" not in failed.to_json()


async def test_off_it_does_nothing() -> None:
    with OFF.span("outer", PARENT, {}) as span:
        span.event("step", {})
        span.set({"a": 1})
        assert (span.is_recorded, span.traceparent, metadata_of(span.traceparent)) == (False, "", None)
    await OFF.close()


def test_an_endpoint_that_is_no_url_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="no URL of a collector"):
        Tracing.to("collector:4317", "s", "i")


async def test_spans_reach_a_collector() -> None:
    async with collecting() as collector:
        tracing = Tracing.to(collector.endpoint, "outrider-test", "one")
        with tracing.span("outer", None, {"a": 1}):
            pass
        await tracing.close()
        await told(collector, 1)
    (span,) = collector.spans
    assert (span.service, span.name, span.attributes) == ("outrider-test", "outer", {"a": 1})


async def told(collector: Collector, num_spans: int) -> None:
    async with asyncio.timeout(20):
        while len(collector.spans) < num_spans:  # noqa: ASYNC110 - the collector knows of nobody who waits
            await asyncio.sleep(0.02)


def long_span(tracing: Tracing, num_steps: int) -> None:
    """As a target worker makes it."""
    with tracing.span("target.generate", None, {"outrider.session_id": "0" * 32}) as span:
        span.event("placed", {"target": "target-0"})
        step = {"tokens": 3, "draft_tokens": 4, "accepted_draft_tokens": 2, "step_ms": 17.25}
        for _ in range(num_steps):
            span.event("step", step)


async def test_of_a_long_span_the_beginning_is_kept_and_the_rest_is_counted() -> None:
    async with collecting() as collector:
        async with Tracing.to(collector.endpoint, "outrider-test", "one") as tracing:
            long_span(tracing, EVENTS_MAX + 9)
        await told(collector, 1)
    (span,) = collector.spans
    assert len(span.events) == EVENTS_MAX
    assert [name for name, _ in span.events[:2]] == ["placed", "step"]
    assert span.attributes["outrider.num_events_left_out"] == 10


@pytest.mark.thorough
async def test_many_long_spans_are_no_message_that_a_collector_refuses() -> None:
    """gRPC servers take 4 MiB unless told otherwise, and the collector is one."""
    async with collecting() as collector:
        async with Tracing.to(collector.endpoint, "outrider-test", "one") as tracing:
            for _ in range(SPANS_PER_MESSAGE - 1):
                long_span(tracing, 1)
            for _ in range(SPANS_PER_MESSAGE + 10):
                long_span(tracing, EVENTS_MAX)
            await told(collector, 2 * SPANS_PER_MESSAGE)
        assert len(collector.spans) == 2 * SPANS_PER_MESSAGE + 9


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 32),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "8"}, 8),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "100"}, 32),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": ""}, 32),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100"}, 100),
    ],
)
async def test_the_operators_own_variables_hold(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with Tracing.to("http://127.0.0.1:1", "outrider-test", "one") as tracing:
        (processor,) = tracing._provider._active_span_processor._span_processors
        assert processor._batch_processor._max_export_batch_size == expected


def test_variables_that_contradict_each_other_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "9")
    with pytest.raises(ConfigurationError, match="OTEL_BSP"):
        Tracing.to("http://127.0.0.1:1", "outrider-test", "one")


@pytest.mark.parametrize("ends", [True, False])
async def test_closing_waits_a_moment_for_spans_that_are_about_to_end(
    tracing: Tracing, exporter: InMemorySpanExporter, ends: bool
) -> None:
    async def call() -> None:
        with tracing.span("outer", None, {}):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05 if ends else 60)

    calling = asyncio.create_task(call())
    await asyncio.sleep(0)
    calling.cancel()
    async with asyncio.timeout(5):
        await tracing.close()
    assert len(exporter.get_finished_spans()) == int(ends)
    calling.cancel()


SERVING = health_pb2.HealthCheckResponse.SERVING


async def ready(channel: grpc.aio.Channel) -> None:
    """Returns once the worker has loaded its model."""
    stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
    async with asyncio.timeout(60):
        while (await stub.Check(request, wait_for_ready=True)).status != SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


SAMPLING = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=4)


@pytest.mark.parametrize(("role", "error"), [("target", "WorkerLeaves"), ("draft", "CancelledError")])
async def test_who_is_cut_off_at_the_end_of_a_drain_has_a_span_too(
    role: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, made = importlib.import_module(f"{role}_worker.__main__"), []

    class Remembered(WorkerProcess):
        async def __aenter__(self) -> Remembered:
            made.append(self)
            return await super().__aenter__()

    monkeypatch.setattr("outrider.worker.worker_main.WorkerProcess", Remembered)
    # A model that says nothing: whoever has begun is there until the end.
    monkeypatch.setattr("target_worker.runner.TargetCore.run_next", lambda self, now: ([], None))
    (port,) = free_ports(1)
    async with collecting() as collector:
        words = [
            *("--model", str(model_dir("llama")), "--dtype", "float32", "--port", str(port), "--metrics-port", "0"),
            *("--drain-grace-s", "0", "--kv-cache-gib", "0.05", "--otlp-endpoint", collector.endpoint),
        ]  # fmt: skip
        serving = asyncio.create_task(module.serve(module.parse_arguments(words)))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await ready(channel)
            call: Any = (
                target_pb2_grpc.TargetStub(channel).Generate(
                    target_pb2.GenerateRequest(session_id="s", token_ids=[5], sampling=SAMPLING),
                    wait_for_ready=True,
                )
                if role == "target"
                else draft_pb2_grpc.DraftStub(channel).Attach(
                    draft_pb2.AttachRequest(
                        session_id="s", target_address="127.0.0.1:1", token_ids=[5], sampling=SAMPLING
                    ),
                    wait_for_ready=True,
                )
            )
            reading = asyncio.ensure_future(call.read())
            await asyncio.wait([serving, reading], timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert reading.done()
            assert await reading  # and no end of the stream
            if role == "target":  # its first word may come before its span begins
                async with asyncio.timeout(30):
                    assert await call.read()
            made[0].request_stop()
            async with asyncio.timeout(30):
                await serving
                if role == "target":
                    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION, "nothing was lost to it"
        await told(collector, 1)
    (span,) = collector.spans
    assert (span.service, span.attributes["outrider.session_id"]) == (f"outrider-{role}", "s")
    assert span.attributes["error.type"] == error


@pytest.mark.thorough
async def test_a_collector_that_is_away_keeps_nobody_waiting(caplog: Any) -> None:
    tracing = Tracing.to("http://127.0.0.1:1", "outrider-test", "one")
    started = asyncio.get_running_loop().time()
    for _ in range(5000):
        with tracing.span("outer", None, {}) as span:
            span.event("step", {})
    assert asyncio.get_running_loop().time() - started < 10
    started = asyncio.get_running_loop().time()
    await tracing.close()
    assert asyncio.get_running_loop().time() - started < 5
