"""Which answers are right to whatever came, and how late a loop was by its own work."""

from __future__ import annotations

import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.api.answer.openai_response import error_body
from outrider.errors import InvalidRequest, Overloaded
from outrider.observability.telemetry import show_loop_lag
from tests.e2e.fuzz.footprint import DESCRIPTORS_MORE, Footprint, growth
from tests.e2e.fuzz.judge import (
    HAPROXY_PAGE,
    GrpcAnswer,
    HttpAnswer,
    judge_grpc,
    judge_http,
    read_answer,
    status_class,
    tokens_of_stream,
)
from tests.e2e.fuzz.lag import LagTable, Reading

ANTHROPIC_ERROR = (
    b'{"type": "error", "error": {"type": "invalid_request_error", "message": "n is odd"}, "request_id": "1"}'
)
ERROR = json.dumps(error_body(InvalidRequest("n", "n is odd"))).encode()
FULL = json.dumps(error_body(Overloaded("full"))).encode()
JSON, EVENTS = {"content-type": "application/json"}, {"content-type": "text/event-stream; charset=utf-8"}


def test_an_answer_is_read_from_its_bytes() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    answer = read_answer(b"HTTP/1.1 100 Continue\r\n\r\n" + chunked)
    assert answer == HttpAnswer(200, {"transfer-encoding": "chunked", "a": "b"}, b"ab")
    assert read_answer(b"") is None
    cut = read_answer(b"HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\nab")
    assert cut is not None
    assert not cut.is_whole
    with pytest.raises(ValueError, match="no HTTP"):
        read_answer(b"SSH-2.0\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        HttpAnswer(200, JSON, b"{}"),
        HttpAnswer(400, JSON, ERROR),
        HttpAnswer(429, {"retry-after": "1"}, FULL),
        HttpAnswer(503, {"retry-after": "2"}, FULL),
        HttpAnswer(200, EVENTS, b'data: {"a":1}\n\ndata: [DONE]\n\n'),
        HttpAnswer(400, JSON, ANTHROPIC_ERROR),
        HttpAnswer(200, EVENTS, b'event: a\ndata: {"a":1}\n\nevent: message_stop\ndata: {}\n\n'),
        HttpAnswer(200, EVENTS, b"event: error\ndata: " + ANTHROPIC_ERROR + b"\n\n"),
        HttpAnswer(200, EVENTS, b'event: response.completed\ndata: {"a":1}\n\n'),
    ],
)
def test_what_a_sound_server_says_is_right(answer: HttpAnswer) -> None:
    assert judge_http(answer) is None


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (None, "without an answer"),
        (HttpAnswer(500, JSON, ERROR), "500"),
        (HttpAnswer(502, JSON, ERROR), "502"),
        (HttpAnswer(504, JSON, ERROR), "504"),
        (HttpAnswer(503, {}, FULL), "Retry-After"),
        (HttpAnswer(429, {}, FULL), "Retry-After"),
        (HttpAnswer(400, {}, b"Bad Request"), "no JSON"),
        (HttpAnswer(400, {}, HAPROXY_PAGE), "no JSON"),
        (HttpAnswer(400, {}, b'{"detail": "x"}'), "shape"),
        (HttpAnswer(400, {}, ERROR.replace(b"n is odd", b" ")), "no cause"),
        (HttpAnswer(400, {}, ERROR.replace(b"invalid_request_error", b"internal_error")), "defect"),
        (HttpAnswer(200, JSON, b"{"), "no JSON"),
        (HttpAnswer(200, JSON, b"{}", is_whole=False), "in the middle"),
        (HttpAnswer(200, EVENTS, b'data: {"a":1}\n\n'), "last event"),
        (HttpAnswer(200, EVENTS, b"event: message_stop\ndata: {\n\n"), "no JSON"),
        (HttpAnswer(400, JSON, ANTHROPIC_ERROR.replace(b'"type": "error"', b'"type": "x"')), "does not say so"),
        (HttpAnswer(400, JSON, ANTHROPIC_ERROR.replace(b"n is odd", b"internal error; the log has it")), "defect"),
        (HttpAnswer(200, EVENTS, b"data: {\n\ndata: [DONE]\n\n"), "no JSON"),
        (HttpAnswer(200, EVENTS, b'data: {"error":{}}\n\ndata: [DONE]\n\n'), "shape"),
    ],
)
def test_everything_else_is_a_fault(answer: HttpAnswer | None, fault: str) -> None:
    assert fault in (judge_http(answer) or "")


def test_what_an_input_allows_is_right_for_it_alone() -> None:
    assert judge_http(HttpAnswer(504, JSON, ERROR), allows=("504",)) is None
    assert judge_http(None, may_hang_up=True) is None
    assert judge_http(HttpAnswer(400, {}, HAPROXY_PAGE), may_hang_up=True) is None


@pytest.mark.parametrize(
    ("number", "message", "allows", "is_right"),
    [
        ("0", "", (), True),
        ("3", "n is odd", (), True),
        ("3", "", (), False),
        ("2", "Unexpected", (), False),
        ("13", "internal", (), False),
        ("14", "unavailable", (), False),
        ("4", "late", (), False),
        ("4", "late", ("DEADLINE_EXCEEDED",), True),
        ("99", "x", (), False),
    ],
)
def test_calls_end_with_a_status_that_names_a_cause(
    number: str, message: str, allows: tuple[str, ...], is_right: bool
) -> None:
    answer = GrpcAnswer(trailers={"grpc-status": number, "grpc-message": message})
    assert (judge_grpc(answer, allows=allows) is None) == is_right


def test_a_call_without_a_status_is_a_fault_unless_http_refused_it() -> None:
    assert judge_grpc(GrpcAnswer()) is not None
    assert judge_grpc(GrpcAnswer(reset="RST_STREAM")) is not None
    assert judge_grpc(GrpcAnswer(headers={":status": "502"})) is not None
    assert judge_grpc(GrpcAnswer(headers={":status": "415"})) is None


def test_answers_have_a_column() -> None:
    assert [status_class(answer) for answer in (None, HttpAnswer(404), HttpAnswer(429), GrpcAnswer())] == [
        "hung up", "4xx", "429", "nothing",
    ]  # fmt: skip


def test_tokens_of_a_stream_are_put_together() -> None:
    events = [b'id: a\ndata: {"choices":[{"token_ids":[1,2]}]}', b'data: {"choices":[{"token_ids":[3]}]}']
    body = b"\n\n".join([*events, b"data: [DONE]\n\n"])
    assert tokens_of_stream(body) == [1, 2, 3]


class TestLag:
    def test_the_worst_is_bounded_by_bucket_and_by_sum(self) -> None:
        registry = CollectorRegistry()
        observe = show_loop_lag(registry, "coordinator")

        def read() -> Reading:
            return Reading.parse(generate_latest(registry).decode())

        table, begin = LagTable(), read()
        for _ in range(50):
            observe(0.002, 0.002)
        quiet = read()
        assert table.take(begin, quiet, ["a"]) == 0
        assert table.own_max_s["a"] == pytest.approx(0.005), "no tick of them was beyond its bucket"
        observe(0.3, 0.06)
        observe(0.4, 0.0)
        late = read()
        assert table.take(quiet, late, ["b"]) == 1
        assert table.own_max_s["b"] == pytest.approx(0.06)
        assert table.any_max_s == pytest.approx(0.5)
        assert (table.num_own_late, table.num_late) == (1, 2)

    def test_a_page_without_the_histogram_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="no histogram"):
            Reading.parse("# TYPE a counter\na_total 1\n")


def test_growth_is_what_goes_beyond_its_bounds() -> None:
    most, mib = 10 + DESCRIPTORS_MORE, 1 << 20
    before = Footprint({"a": 10, "b": 10}, {"a": 100 * mib, "b": 100 * mib}, redis_keys={"k"})
    within = Footprint({"a": 20, "b": most}, {"a": 200 * mib, "b": 90 * mib}, redis_keys={"k"})
    assert growth(before, within) == []
    beyond = Footprint({"a": most + 1, "b": 10}, {"a": 100 * mib, "b": 250 * mib}, redis_keys={"k", "l"})
    grown = growth(before, beyond)
    assert len(grown) == 3
    assert f"a holds {most + 1} file descriptors" in grown[0]
