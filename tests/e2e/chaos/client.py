"""One request over one of the two public edges, as an ordinary client sends it and with no patience beyond a bound."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import httpx

from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.verdict import Answer

PATIENCE_S = 90.0
"""For the whole answer. Who has none by then counts as hung."""
RECONNECT_S = 0.3
LOST_FOR_S = 20.0
"""For so long after a replica's death a connection may break, or find nobody."""


class Client:
    """A connection pool for HTTP and a channel for gRPC, for as long as the context is open."""

    def __init__(self, http_url: str, grpc_address: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(base_url=http_url, timeout=PATIENCE_S, limits=limits, trust_env=False)
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._stack = AsyncExitStack()
        self.replica_lost_s = float("-inf")  # when a replica of the coordinator was last killed

    async def __aenter__(self) -> Client:
        await self._stack.enter_async_context(self._http)
        self._stack.push_async_callback(self._channel.close, None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def get(self, path: str, timeout_s: float = 2.0) -> httpx.Response:
        return await self._http.get(path, timeout=timeout_s)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An answer that has to come."""
        response = await self._http.post(path, json=body, timeout=10.0)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    async def ask(
        self,
        case: Case,
        *,
        edge: str = "http",
        speculation: str = "on",
        leave_after_s: float | None = None,
        leave: asyncio.Event | None = None,
    ) -> Answer:
        """The answer, complete or not. Raises nothing that a server can cause; the client hangs up in between
        `leave_after_s` after asking, or when `leave` is set."""
        answer = Answer(time.monotonic())
        reading = asyncio.create_task(self._read(case, edge, speculation, answer))
        leaving = asyncio.create_task((leave or asyncio.Event()).wait())
        patience_s = PATIENCE_S if leave_after_s is None else leave_after_s
        await asyncio.wait((reading, leaving), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        is_hung = not reading.done() and leave_after_s is None and not leaving.done()
        answer.has_left = not reading.done() and not is_hung
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)
        if not reading.cancelled() and (bug := reading.exception()) is not None:
            raise bug
        if is_hung:
            answer.error = f"hung: no end within {PATIENCE_S:g} s"
        answer.ended_s = time.monotonic()
        return answer

    async def _read(self, case: Case, edge: str, speculation: str, answer: Answer) -> None:
        """Goes on where it stopped, at another replica, when its own has died; gives up at any other error."""
        ask = self._ask_http if edge == "http" else self._ask_grpc
        request_id = uuid.uuid4().hex
        while True:
            try:
                await ask(case, speculation, answer, request_id)
                return
            except (httpx.HTTPError, grpc.aio.AioRpcError, _Refused) as error:
                if time.monotonic() - self.replica_lost_s > LOST_FOR_S:
                    answer.error = _in_words(error)
                    return
                answer.num_reconnects += 1
                await asyncio.sleep(RECONNECT_S)

    async def _ask_http(self, case: Case, speculation: str, answer: Answer, request_id: str) -> None:
        body = case.body(speculation) | {"stream_options": {"include_event_ids": True}}
        headers = {"X-Request-Id": request_id}
        if answer.event_id:
            headers["Last-Event-ID"] = answer.event_id
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise _Refused(
                    f"{response.status_code} {(await response.aread()).decode(errors='replace')[:300]}"
                )
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line == "data: [DONE]":
                    return
                elif line:
                    self._take_event(json.loads(line.removeprefix("data: ")), answer)
                    answer.event_id = event_id
        raise _Refused("the stream ended without [DONE]")

    def _take_event(self, event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            raise _Refused(f"in the stream: {event['error'].get('message')}")
        for choice in event["choices"]:
            if new_ids := choice.get("token_ids") or []:
                answer.chunk_times_s.append(time.monotonic())
                answer.token_ids += new_ids
            answer.text += choice.get("text") or ""
            if choice.get("finish_reason") is not None:
                answer.finish_reason, answer.stop_string = choice["finish_reason"], choice.get("stop_reason")

    async def _ask_grpc(self, case: Case, speculation: str, answer: Answer, request_id: str) -> None:
        message = case.message(speculation)
        message.request_id = request_id
        if not answer.token_ids:
            await self._read_chunks(message, case, answer)
            return
        message.resume_from.add(num_tokens=len(answer.token_ids), has_begun=True)
        message.run = answer.run
        by_id = generation_pb2.GenerationRequest(
            request_id=request_id, resume_from=message.resume_from, run=answer.run
        )
        try:
            await self._read_chunks(by_id, case, answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            await self._read_chunks(message, case, answer)  # its replica died before the journal had it

    async def _read_chunks(
        self, message: generation_pb2.GenerationRequest, case: Case, answer: Answer
    ) -> None:
        call = self._stub.Generate(message, timeout=PATIENCE_S)
        try:
            async for chunk in call:
                self._take_chunk(chunk, case, answer)
        finally:
            call.cancel()
        if answer.finish_reason is None:
            raise _Refused("the call ended without its last chunk")

    def _take_chunk(self, chunk: generation_pb2.GenerationChunk, case: Case, answer: Answer) -> None:
        if chunk.token_ids:
            answer.chunk_times_s.append(time.monotonic())
            answer.token_ids += chunk.token_ids
        answer.text += chunk.text
        answer.run = chunk.run
        if chunk.HasField("finished"):
            answer.finish_reason = chunk.finished.finish_reason
            # Over gRPC a stop token's number stands here too.
            answer.stop_string = (
                chunk.finished.stop_reason if chunk.finished.stop_reason in case.stop else None
            )


class _Refused(Exception):
    """The server said something else than an answer."""


def _in_words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}".removeprefix("_Refused: ")
