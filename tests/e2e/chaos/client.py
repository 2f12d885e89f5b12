"""One request over one of the two public edges, as an ordinary client sends it, and waits no longer than a bound."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import httpx

from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.certificates import TENANTS
from tests.e2e.chaos.ledger import POISONOUS
from tests.e2e.chaos.verdict import Answer, Choice, Incident

SILENCE_S_MAX = 300.0
"""For the next token, or the end. Who waits for longer counts as hung. It covers the longest wait for a slot, and the
time it takes to generate again, without showing it, what was lost with the journal."""
ANSWER_S_MAX = 900.0
"""For the whole answer, likewise. A long one takes minutes on a busy machine."""
RECONNECT_S = 0.3
RETRY_AFTER_S_MAX = 2.0
_REFUSALS = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED})
_PASSING = frozenset({"overloaded", "unavailable", "slow_reader", "poisonous_request"})
"""Codes of errors that another attempt may not meet."""
POISONOUS_AGAIN_S = 10.0
_NOBODY_THERE = frozenset({httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT})
"""Statuses that the load balancer itself sends when it reaches no coordinator."""
_TRANSPORT_WORDS = (
    "failed to connect", "connection reset", "socket closed", "connection closed", "stream removed", "rst_stream",
    "goaway", "received http2 header", "broken pipe", "endpoint closing", "recvmsg", "keepalive", "tls handshake",
    "handshake", "channel is closed", "peer closed",
)  # fmt: skip
"""Parts of gRPC's own error messages, in lower case, which tell a broken connection from an error that the system
reports."""
_OWN_WORDS = re.compile(
    r"(the connection to a|a|no) target worker (failed|was lost|fell silent|broke|does not answer|could be reached)"
    r"|the sequence stops after"
)
"""Messages with which the system reports the loss that ended a request, whatever gRPC's message adds."""
_NO_SUCH_WEIGHTS = "none of the target workers that are there has the weights and numerics that it began with"


@dataclass(frozen=True)
class _Call:
    """A request over all of its attempts, and the answer as far as it has come."""

    case: Case
    tenant: str
    speculation: str
    request_id: str
    answer: Answer


class Client:
    """A connection pool for HTTP and a channel for gRPC, for as long as the context is open.

    It asks as an application does that wants its text: where a connection breaks, or the system says that it has no
    room, it asks again and goes on where it was; what it met on the way is in the answer. Anything else ends it.
    """

    def __init__(
        self,
        http_url: str,
        grpc_address: str,
        trust: ssl.SSLContext,
        credentials: grpc.ChannelCredentials,
        keys: Mapping[str, str],
    ) -> None:
        """`keys`: by tenant."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(
            base_url=http_url, timeout=ANSWER_S_MAX, limits=limits, trust_env=False, verify=trust
        )
        self._channel = grpc.aio.secure_channel(
            grpc_address, credentials, options=[("grpc.max_reconnect_backoff_ms", 1000)]
        )
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._stack = AsyncExitStack()
        self._keys = keys

    async def __aenter__(self) -> Client:
        await self._stack.enter_async_context(self._http)
        self._stack.push_async_callback(self._channel.close, None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An answer that has to come."""
        response = await self._http.post(path, json=body, timeout=10.0, headers=self._headers(TENANTS[0]))
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def _headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._keys[tenant]}"}

    async def ask(
        self,
        case: Case,
        *,
        edge: str = "http",
        tenant: str = TENANTS[0],
        speculation: str = "on",
        leave_after_s: float | None = None,
        leave: asyncio.Event | None = None,
    ) -> Answer:
        """The answer, complete or not. Raises nothing that a server can cause; the client hangs up in between
        `leave_after_s` after asking, or when `leave` is set."""
        answer = Answer(time.monotonic(), [Choice() for _ in range(case.n)])
        call = _Call(case, tenant, speculation, uuid.uuid4().hex, answer)
        reading = asyncio.create_task(self._read(call, edge))
        leaving = asyncio.create_task((leave or asyncio.Event()).wait())
        try:
            is_hung = await _is_hung(answer, reading, leaving, leave_after_s)
            answer.has_left = not reading.done() and not is_hung
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)
        if not reading.cancelled() and (bug := reading.exception()) is not None:
            raise bug
        if is_hung:
            answer.error = f"hung: nothing for {SILENCE_S_MAX:g} s, or no end within {ANSWER_S_MAX:g} s"
        answer.ended_s = time.monotonic()
        return answer

    async def _read(self, call: _Call, edge: str) -> None:
        """Asks until there is an answer, or something that asking again does not help."""
        ask = self._ask_http if edge == "http" else self._ask_grpc
        while True:
            try:
                await ask(call)
                return
            except (httpx.HTTPError, grpc.aio.AioRpcError, _Refused, _Broken) as error:
                is_refusal = _is_refusal(error)
                if is_refusal is None:
                    call.answer.error = _in_words(error)
                    return
                call.answer.incidents.append(Incident(time.monotonic(), is_refusal, _in_words(error)))
                words = _in_words(error)
                if _NO_SUCH_WEIGHTS in words or POISONOUS in words:
                    call.answer.begin_anew()  # those that could go on with it may never come back, or nobody may
                after_s = error.retry_after_s if isinstance(error, _Refused) else RECONNECT_S
                await asyncio.sleep(POISONOUS_AGAIN_S if POISONOUS in words else min(after_s, RETRY_AFTER_S_MAX))

    async def _ask_http(self, call: _Call) -> None:
        answer = call.answer
        body = call.case.body(call.speculation) | {"stream_options": {"include_event_ids": True}}
        headers = self._headers(call.tenant) | {"X-Request-Id": call.request_id}
        if answer.event_id:
            headers["Last-Event-ID"] = answer.event_id
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, response.headers, await response.aread())
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line == "data: [DONE]":
                    return
                elif line:
                    self._take_event(json.loads(line.removeprefix("data: ")), answer)
                    answer.event_id = event_id
        raise _Broken("the stream ended without [DONE]")

    def _take_event(self, event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            raise _Refused.of_body(httpx.codes.OK, event, RECONNECT_S)
        for each in event["choices"]:
            choice = answer.choices[each["index"]]
            choice.has_begun = True
            if new_ids := each.get("token_ids") or []:
                answer.chunk_times_s.append(time.monotonic())
                choice.token_ids += new_ids
            choice.text += each.get("text") or ""
            if each.get("finish_reason") is not None:
                choice.finish_reason, choice.stop_string = each["finish_reason"], each.get("stop_reason")

    async def _ask_grpc(self, call: _Call) -> None:
        answer = call.answer
        message = call.case.message(call.speculation)
        message.request_id = call.request_id
        if not any(choice.has_begun for choice in answer.choices):
            await self._read_chunks(message, call)
            return
        for choice in answer.choices:
            message.resume_from.add(
                num_tokens=len(choice.token_ids),
                has_begun=choice.has_begun,
                has_ended=choice.finish_reason is not None,
            )
        message.run = answer.run
        by_id = generation_pb2.GenerationRequest(
            request_id=call.request_id, resume_from=message.resume_from, run=answer.run
        )
        try:
            await self._read_chunks(by_id, call)
        except grpc.aio.AioRpcError as error:
            # Its replica died before the journal had it, or the journal cannot be read now.
            is_journal_away = (error.details() or "").startswith("the registry does not answer")
            if error.code() is not grpc.StatusCode.NOT_FOUND and not is_journal_away:
                raise
            await self._read_chunks(message, call)

    async def _read_chunks(self, message: generation_pb2.GenerationRequest, call: _Call) -> None:
        metadata = tuple(self._headers(call.tenant).items())
        stream = self._stub.Generate(message, timeout=ANSWER_S_MAX, metadata=metadata)
        try:
            async for chunk in stream:
                self._take_chunk(chunk, call)
        finally:
            stream.cancel()
        if not call.answer.is_complete:
            raise _Broken("the call ended without its last chunk")

    def _take_chunk(self, chunk: generation_pb2.GenerationChunk, call: _Call) -> None:
        answer, choice = call.answer, call.answer.choices[chunk.index]
        choice.has_begun = True
        if chunk.token_ids:
            answer.chunk_times_s.append(time.monotonic())
            choice.token_ids += chunk.token_ids
        choice.text += chunk.text
        answer.run = chunk.run
        if chunk.HasField("finished"):
            choice.finish_reason = chunk.finished.finish_reason
            # Over gRPC a stop token's number stands here too.
            stop_reason = chunk.finished.stop_reason
            choice.stop_string = stop_reason if stop_reason in call.case.stop else None


class _Broken(Exception):
    """The connection ended as if all had been said."""


class _Refused(Exception):
    """Somebody said something else than an answer."""

    def __init__(self, words: str, status: int, code: str | None, retry_after_s: float) -> None:
        super().__init__(words)
        self.status = status  # 200 in the middle of a stream
        self.code = code  # of the system's errors; nobody else's have one
        self.retry_after_s = retry_after_s

    @classmethod
    def of_body(cls, status: int, body: Any, retry_after_s: float) -> _Refused:
        """From an error body."""
        error = body.get("error") if isinstance(body, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        message = error.get("message") if isinstance(error, dict) else str(body)[:300]
        return cls(f"{status} {code}: {message}", status, code, retry_after_s)


async def _is_hung(
    answer: Answer, reading: asyncio.Task[None], leaving: asyncio.Task[bool], leave_after_s: float | None
) -> bool:
    """Waits for the answer's end, or for the client to leave. Whether neither came for as long as it is patient."""
    if leave_after_s is not None:
        await asyncio.wait((reading, leaving), timeout=leave_after_s, return_when=asyncio.FIRST_COMPLETED)
        return False
    while True:
        last_s = answer.chunk_times_s[-1] if answer.chunk_times_s else answer.asked_s
        until_s = min(last_s + SILENCE_S_MAX, answer.asked_s + ANSWER_S_MAX)
        if (left_s := until_s - time.monotonic()) <= 0:
            return True
        done, _ = await asyncio.wait((reading, leaving), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return False


def _refusal(status: int, headers: Mapping[str, str], content: bytes) -> _Refused:
    try:
        body = json.loads(content)
    except ValueError:
        body = content.decode(errors="replace")
    return _Refused.of_body(status, body, float(headers.get("retry-after", RECONNECT_S)))


def is_own_word(words: str) -> bool:
    """Whether the details of an error are the system's, and not those of the connection to it."""
    return _OWN_WORDS.match(words) is not None


def _is_refusal(error: Exception) -> bool | None:
    """Whether this is the system's word that it has no room or lost a part. False: a connection broke, or nobody was
    there to take it. None: it is neither, and asking again would not help."""
    if isinstance(error, grpc.aio.AioRpcError):
        words = (error.details() or "").lower()
        is_transport = not is_own_word(words) and any(each in words for each in _TRANSPORT_WORDS)
        if error.code() is grpc.StatusCode.CANCELLED and is_transport:
            return False  # what the load balancer resets when a replica dies behind it
        return not is_transport if error.code() in _REFUSALS else None
    if isinstance(error, _Refused):
        if error.status == httpx.codes.BAD_GATEWAY or (error.code is None and error.status in _NOBODY_THERE):
            return False  # whoever had the request was lost before it answered
        return True if error.code in _PASSING else None
    return False


def _in_words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}".removeprefix("_Refused: ").removeprefix("_Broken: ")
