"""Tests of a request's line in the log and of its trace span: they show how it ended, and nothing that a client has
made up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.observability.statistics import RequestTimes, SpeculationCounts
from coordinator.output.sequence_output import SequenceFinished
from coordinator.request.choices import RequestFinished
from coordinator.request.environment import Environment
from coordinator.request.request_record import RequestRecord
from coordinator.settings import CoordinatorSettings
from outrider.errors import DeadlineExceeded
from outrider.observability.tracing import TRACEPARENT, Tracing
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2, target_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget, served_model

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
FINISHED = RequestFinished(
    (
        SequenceFinished(
            text="", finish_reason="stop", stop_reason=None, num_prompt_tokens=1, num_output_tokens=3,
            decoding_mode=common_pb2.DECODING_MODE_GREEDY, counts=SpeculationCounts(), times=RequestTimes(0.0),
            num_cached_tokens=None,
        ),
    )
)  # fmt: skip


def spec(request_id: str = "r1", tenant: str = "") -> GenerationSpec:
    sampling = SamplingParams(max_tokens=8)
    request = GenerationInput(request_id=request_id, text="x", tenant=tenant)
    return GenerationSpec(
        request=request,
        model="demo",
        prompt_token_ids=(1,),
        max_tokens=8,
        sampling=sampling,
        deadline_s=1.0,
        served=served_model(),
    )


def told(
    caplog: pytest.LogCaptureFixture,
    error: BaseException | None = None,
    *,
    has_finished: bool = True,
    what: GenerationSpec | None = None,
) -> tuple[str, ReadableSpan]:
    """Returns the log line and the trace span of a request that ended like this."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = CoordinatorSettings(tokenizer_dir="unused", redis_url="unused", logs_requests=True)
    parts = SimpleNamespace(metrics=CoordinatorMetrics(), tracing=Tracing(provider), settings=settings)
    caplog.set_level(logging.INFO, "coordinator.requests")
    caplog.clear()

    def run() -> None:
        with RequestRecord(cast(Environment, parts), what or spec()) as record:
            if has_finished:
                record.take(FINISHED)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    (record,), (span,) = caplog.records, exporter.get_finished_spans()
    return record.getMessage(), span


def fields(line: str) -> dict[str, str]:
    """As somebody reads them who splits at blanks."""
    pairs = [cast("tuple[str, str]", word.split("=")) for word in line.split()]
    assert all(len(pair) == 2 for pair in pairs), line
    assert len({name for name, _ in pairs}) == len(pairs), line
    return dict(pairs)


@pytest.mark.parametrize(
    ("error", "has_finished", "status", "is_error"),
    [
        (None, True, "OK", False),
        (None, False, "INTERNAL", False),  # nobody has said how it ended
        (RuntimeError("a defect"), False, "INTERNAL", True),
        (RuntimeError("a defect"), True, "INTERNAL", True),
        (DeadlineExceeded("late"), False, "DEADLINE_EXCEEDED", True),
        (asyncio.CancelledError(), False, "CANCELLED", False),
        (GeneratorExit(), False, "CANCELLED", False),
        # Whoever has heard the end may leave as they like.
        (asyncio.CancelledError(), True, "OK", False),
        (GeneratorExit(), True, "OK", False),
    ],
)
def test_the_status_is_the_one_that_failures_are_counted_by(
    caplog: pytest.LogCaptureFixture,
    error: BaseException | None,
    has_finished: bool,
    status: str,
    is_error: bool,
) -> None:
    line, span = told(caplog, error, has_finished=has_finished)
    assert fields(line)["status"] == status
    assert (span.status.status_code is StatusCode.ERROR) == is_error
    assert ("error.type" in (span.attributes or {})) == (status != "OK" and error is not None)


@pytest.mark.parametrize(
    "text",
    [
        "a\n2026-01-01 INFO coordinator.requests: request_id=r2 status=OK",
        "a status=OK tenant=other",
        'a" status=OK "',
        "status=OK",
        "a\tb\rc\x00\x1b[2K\x7f\x85\u2028\u202e\ud800ü",
        " ",
    ],
)
def test_no_field_can_be_forged_by_what_a_client_chooses(caplog: pytest.LogCaptureFixture, text: str) -> None:
    line, _ = told(caplog, what=spec(tenant=text, request_id=text))
    found = fields(line)
    assert line.isascii()
    assert line.isprintable()
    assert list(found)[:4] == ["request_id", "tenant", "model", "status"]
    assert json.loads(found["tenant"]) == json.loads(found["request_id"]) == text


def test_plain_words_are_written_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    line, _ = told(caplog, what=spec(tenant="team-a/search@eu:1.2"))
    assert line.startswith("request_id=r1 tenant=team-a/search@eu:1.2 model=demo status=OK num_prompt_tokens=1 ")


class Listening(FakeTarget):
    """Hears what comes beside the request."""

    metadata: dict[str, Any]

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[target_pb2.GenerateEvent]:
        self.metadata = dict(context.invocation_metadata() or ())
        async for event in super().Generate(request, context):
            yield event


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_workers_hear_whether_a_client_wants_a_trace(clusters: ClusterFactory, flags: str) -> None:
    target = Listening(clusters.script)
    # Nobody listens there; one that is not sampled has nothing to be sent.
    async with clusters.open([target], settings={"otlp_endpoint": "http://127.0.0.1:1"}) as cluster:
        headers = {TRACEPARENT: f"00-{TRACE_ID}-b7ad6b7169203331-{flags}"}
        body = {"prompt": "import", "temperature": 0, "max_tokens": 4}
        answer = await cluster.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
    _, trace_id, _, sampled = target.metadata[TRACEPARENT].split("-")
    assert (trace_id, sampled) == (TRACE_ID, flags)


async def test_where_there_are_no_traces_workers_hear_of_none(clusters: ClusterFactory) -> None:
    target = Listening(clusters.script)
    async with clusters.open([target]) as cluster:
        headers = {TRACEPARENT: f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        body = {"prompt": "import", "temperature": 0, "max_tokens": 4}
        assert (await cluster.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert TRACEPARENT not in target.metadata
