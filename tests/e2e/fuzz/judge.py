"""Whether an answer is one that a sound server gives to whatever came. Pure."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from outrider.errors import MESSAGE_BYTES_MAX

ERROR_FIELDS = {"message", "type", "param", "code"}
ANTHROPIC_ERROR_FIELDS = {"message", "type"}
DONE = "data: [DONE]"
STREAM_ENDS = (
    *(DONE, "event: message_stop\n", "event: error\n"),
    *(f"event: response.{how}\n" for how in ("completed", "incomplete", "failed")),
)
"""Beginnings of the last event of a stream: of OpenAI's completions, Anthropic's messages and OpenAI's responses."""
WELL_KNOWN = {
    "OK",
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
}
GRPC_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


HAPROXY_PAGE = b"<html><body><h1>4"
"""The beginning of HAProxy's answer to bytes that are not HTTP; it has no other message for them."""


@dataclass(slots=True)
class HttpAnswer:
    """The HTTP response that arrived over a connection up to its end."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)  # by names in lower case
    body: bytes = b""
    is_whole: bool = True


@dataclass(slots=True)
class GrpcAnswer:
    """The response to a gRPC call."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    reset: str = ""  # RST_STREAM, GOAWAY or what else ended it early

    @property
    def code(self) -> str:
        """The name of the call's gRPC status, or a description of the HTTP status if there is none."""
        number = self.trailers.get("grpc-status") or self.headers.get("grpc-status")
        if number is not None:
            return GRPC_CODES[int(number)] if number.isdigit() and int(number) < len(GRPC_CODES) else f"status {number}"
        status = self.headers.get(":status", "")
        return self.reset or (f"HTTP {status}" if status else "nothing")

    @property
    def message(self) -> str:
        return unquote(self.trailers.get("grpc-message") or self.headers.get("grpc-message", ""))


def read_answer(raw: bytes, *, is_head: bool = False) -> HttpAnswer | None:
    """Returns the last response of a connection, without those that only say "go on"; None if none came. Raises
    ValueError for bytes that are not HTTP."""
    if not raw:
        return None
    while raw.startswith(b"HTTP/1.1 100"):
        raw = raw.partition(b"\r\n\r\n")[2]
    response = http.client.HTTPResponse(_Bytes(raw), method="HEAD" if is_head else "POST")  # type: ignore[arg-type]
    try:
        response.begin()
    except http.client.HTTPException as error:
        raise ValueError(f"no HTTP: {type(error).__name__}: {raw[:200]!r}") from error
    answer = HttpAnswer(response.status, {name.lower(): value for name, value in response.getheaders()})
    try:
        answer.body = response.read()
    except http.client.IncompleteRead as error:
        answer.body, answer.is_whole = error.partial, False
    return answer


class _Bytes:
    """A socket that has received all there is."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def judge_http(
    answer: HttpAnswer | None,
    *,
    allows: tuple[str, ...] = (),
    may_hang_up: bool = False,
    is_head: bool = False,
) -> str | None:
    """Describes the fault of an HTTP response; returns None if there is none."""
    if answer is None:
        return None if may_hang_up else "the connection ended without an answer"
    status = answer.status
    if not answer.is_whole and not may_hang_up:
        return f"{status}: the answer ends in the middle"
    if 300 <= status < 400:
        return f"{status}: nobody is sent elsewhere"
    if status >= 500 and status != 503 and str(status) not in allows:
        return f"{status}: {answer.body[:300]!r}"
    if may_hang_up and 400 <= status < 500 and answer.body.startswith(HAPROXY_PAGE):
        return None
    if status >= 400:
        if not is_head and (fault := fault_of_error(answer.body)):
            return f"{status}: {fault}: {answer.body[:300]!r}"
        if status in (429, 503) and not answer.headers.get("retry-after", "").isdigit():
            return f"{status} without Retry-After"
        return None
    if status != 200:
        return f"{status}: {answer.body[:300]!r}"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return None if not answer.is_whole else fault_of_stream(answer.body)
    if not is_head and answer.headers.get("content-type") == "application/json":
        try:
            json.loads(answer.body)
        except ValueError as error:
            return f"200 whose body is no JSON: {error}"
    return None


def fault_of_error(body: bytes) -> str | None:
    """Describes the fault of an error's body; returns None if there is none."""
    try:
        content = json.loads(body)
    except ValueError:
        return "the error is no JSON"
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, Mapping) or error.keys() not in (ERROR_FIELDS, ANTHROPIC_ERROR_FIELDS):
        return "neither the shape of OpenAI's errors nor of Anthropic's"
    if error.keys() == ANTHROPIC_ERROR_FIELDS and content.get("type") != "error":
        return "an error of Anthropic's that does not say so"
    message, parameter = error["message"], error.get("param")
    if not isinstance(message, str) or not message.strip():
        return "no cause is named"
    if len(message.encode("utf-8", "replace")) > MESSAGE_BYTES_MAX + 300:
        return "the message is without end"
    if error["type"] == "internal_error" or message.startswith("internal error"):
        return "a defect of ours"
    return None if parameter is None or isinstance(parameter, str) else "param is no name"


def fault_of_stream(body: bytes) -> str | None:
    """Describes the fault of a body of server-sent events; returns None if there is none."""
    events = [event for event in body.decode("utf-8", "replace").split("\n\n") if event]
    if not events or not events[-1].startswith(STREAM_ENDS):
        return f"the stream ends without its last event: {body[-200:]!r}"
    for event in events if events[-1] != DONE else events[:-1]:
        data = next((line[6:] for line in event.split("\n") if line.startswith("data: ")), "")
        try:
            content: Any = json.loads(data)
        except ValueError:
            return f"an event is no JSON: {event[:200]!r}"
        if "error" in content and (fault := fault_of_error(data.encode())):
            return f"in the stream: {fault}: {data[:300]}"
    return None


def tokens_of_stream(body: bytes) -> list[int]:
    """Token ids of a stream of one sequence."""
    found: list[int] = []
    for line in body.decode("utf-8", "replace").split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                found += choice.get("token_ids") or ()
    return found


def error_of_stream(body: bytes) -> str | None:
    """Returns the error that ended a stream; None if it did not end with one."""
    for line in body.decode("utf-8", "replace").split("\n"):
        if line.startswith('data: {"error"'):
            return line[6:]
    return None


def judge_grpc(answer: GrpcAnswer, *, allows: tuple[str, ...] = ()) -> str | None:
    """Describes the fault of a gRPC response; returns None if there is none."""
    code = answer.code
    if code in WELL_KNOWN or code in allows:
        if code not in ("OK", *allows) and not answer.message.strip():
            return f"{code} without a cause"
        return None
    if code.startswith("HTTP 4"):
        return None
    return f"{code}: {answer.message[:300] or answer.headers}"


def status_class(answer: HttpAnswer | GrpcAnswer | None) -> str:
    """The column of the table in which a response is counted."""
    if answer is None:
        return "hung up"
    if isinstance(answer, HttpAnswer):
        return str(answer.status) if answer.status in (429, 503, 504) else f"{answer.status // 100}xx"
    return answer.code
