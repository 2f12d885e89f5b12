"""Sends one input to a running system and judges what comes back."""

from __future__ import annotations

import json
import ssl
import uuid
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from outrider.security.tls import Role
from tests.e2e.fuzz.http_inputs import COMPLETIONS
from tests.e2e.fuzz.inputs import GrpcInput, HttpInput, Input, StreamInput
from tests.e2e.fuzz.judge import (
    HttpAnswer,
    error_of_stream,
    judge_grpc,
    judge_http,
    read_answer,
    status_class,
    tokens_of_stream,
)
from tests.e2e.fuzz.stream_inputs import Comeback, comeback, is_rest, stream_body
from tests.e2e.fuzz.wire import Hung, call, exchange
from tests.e2e.secured import SecuredSystem

TIMEOUT_S = 240.0  # of one answer: twenty sequences of a context each take minutes on a slow machine
CHECK = {"prompt": "def read_file(path):\n", "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an input was answered."""

    answer: str  # by status class
    fault: str | None = None


class Sender:
    """For as long as its system runs; `close` it then."""

    def __init__(self, system: SecuredSystem) -> None:
        self._system = system
        self._run = uuid.uuid4().hex[:8]
        address = urlsplit(system.url())
        self._host, self._port = str(address.hostname), int(address.port or 443)
        self._context = self._of_protocol("http/1.1", system.context())
        workers = system.context(Role.OPERATOR)
        workers.check_hostname = False  # the certificate names the part, not the machine
        self._h2_context = self._of_protocol("h2", system.context())
        self._worker_context = self._of_protocol("h2", workers)
        self._client = system.http(system.key)
        self._right: dict[str, list[int]] = {}  # by the body, as it stands in the input

    async def close(self) -> None:
        await self._client.aclose()

    @staticmethod
    def _of_protocol(name: str, context: ssl.SSLContext) -> ssl.SSLContext:
        context.set_alpn_protocols([name])
        return context

    def _filled(self, raw: bytes) -> bytes:
        words = {b"{KEY}": self._system.key, b"{OTHER_KEY}": self._system.other_key, b"{RUN}": self._run}
        for mark, word in words.items():
            raw = raw.replace(mark, word.encode())
        return raw

    async def send(self, each: Input) -> Verdict:
        """The verdict on its answer. Raises nothing that a server can cause."""
        try:
            match each:
                case HttpInput():
                    return await self._send_http(each)
                case GrpcInput():
                    return await self._send_grpc(each)
                case StreamInput():
                    return await self._send_stream(each)
        except Hung as error:
            return Verdict("hung", f"hung: {error}")
        except (ValueError, httpx.HTTPError, OSError) as error:
            return Verdict("broken", f"{type(error).__name__}: {error}")
        raise AssertionError(f"there is no way to send {type(each).__name__}")

    async def _exchange(self, raw: bytes, *, ends: bool = False) -> HttpAnswer | None:
        content = await exchange(
            self._host, self._port, self._context, self._filled(raw), ends=ends, timeout_s=TIMEOUT_S
        )
        return read_answer(content, is_head=raw.startswith(b"HEAD "))

    async def _send_http(self, each: HttpInput) -> Verdict:
        answer = await self._exchange(each.raw, ends=each.ends)
        is_head = each.raw.startswith((b"HEAD ", b"CONNECT "))
        fault = judge_http(answer, allows=each.allows, may_hang_up=each.may_hang_up or each.ends, is_head=is_head)
        return Verdict(status_class(answer), fault)

    async def _send_grpc(self, each: GrpcInput) -> Verdict:
        context: ssl.SSLContext | None = self._h2_context
        address = self._system.grpc_address()
        if each.to != "coordinator":
            name, _, part = each.to.partition("/")
            ready = self._system.ready(name)
            address = f"127.0.0.1:{ready['health_port']}" if part else str(ready["address"])
            context = None if part else self._worker_context
        host, _, port = address.rpartition(":")
        headers = [(name, self._filled(value)) for name, value in each.headers]
        may_last = "unanswered" in each.allows
        try:
            answer = await call(
                *(host, int(port), context, host, headers, each.data),
                timeout_s=1.0 if may_last else TIMEOUT_S,
            )
        except Hung:
            if may_last:
                return Verdict("unanswered")
            raise
        return Verdict(answer.code, judge_grpc(answer, allows=each.allows))

    # Streams.

    async def right(self, body: str) -> list[int]:
        """Token ids of the undisturbed answer to a body; asked for once."""
        if body not in self._right:
            response = await self._client.post(COMPLETIONS, json=json.loads(body) | {"return_token_ids": True})
            response.raise_for_status()
            self._right[body] = list(response.json()["choices"][0]["token_ids"])
        return self._right[body]

    async def _send_stream(self, each: StreamInput) -> Verdict:
        right = await self.right(each.body)
        request_id = f"{self._run}-{uuid.uuid4().hex[:12]}"
        event_id, seen, has_ended = await self._read_events(each.body, request_id, each.cut_after)
        if seen != right[: len(seen)]:
            return Verdict("2xx", f"before it was cut: {seen}, not {right}")
        other_id = event_id
        if each.mutation == "of another stream":
            other = json.dumps(json.loads(each.body) | {"prompt": "another"})
            other_id, _, _ = await self._read_events(other, f"{request_id}-2", 1)
        back = comeback(each, request_id, event_id, other_id)
        answer = await self._exchange(back.raw)
        # An id with a line break in it is no header any more.
        fault = judge_http(answer, may_hang_up="bits flipped" in each.mutation)
        if fault is None and answer is not None and answer.status == 200:
            fault = _fault_of_rest(answer, right, back)
        if fault is None and back.is_good and (answer is None or answer.status != 200):
            fault = f"refused: {None if answer is None else answer.body[:300]!r}"
        return Verdict(
            status_class(answer), None if fault is None else f"{fault} (last event {event_id}, {has_ended=})"
        )

    async def _read_events(self, body: str, request_id: str, num_events: int) -> tuple[str, list[int], bool]:
        """The id of the last event that was read, the token ids up to it and whether the stream had ended."""
        event_id, seen, count = "", list[int](), 0
        headers = {"X-Request-Id": request_id}
        async with self._client.stream("POST", COMPLETIONS, json=stream_body(body), headers=headers) as response:
            if response.status_code != 200:
                raise ValueError(f"a stream was refused: {response.status_code} {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        seen += choice.get("token_ids") or ()
                    count += 1
                    if count == num_events:
                        return event_id, seen, False
        return event_id, seen, True

    # What is right in between.

    async def check(self, edge: str) -> Verdict:
        """A good request, which has the answer that it had at first."""
        right = await self.right(json.dumps(CHECK))
        try:
            if edge == "http":
                response = await self._client.post(COMPLETIONS, json=CHECK)
                if response.status_code != 200:
                    return Verdict(str(response.status_code), f"a good request was refused: {response.text[:300]}")
                token_ids = response.json()["choices"][0]["token_ids"]
            else:
                token_ids = await self._ask_grpc()
        except (httpx.HTTPError, ValueError) as error:
            return Verdict("broken", f"a good request failed: {type(error).__name__}: {error}")
        except Hung as error:
            return Verdict("hung", f"a good request hung: {error}")
        if token_ids != right:
            return Verdict("2xx", f"a good request's answer was {token_ids} and not {right}")
        return Verdict("2xx")

    async def _ask_grpc(self) -> list[int]:
        import grpc

        from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc

        request = generation_pb2.GenerationRequest(
            prompt=str(CHECK["prompt"]),
            sampling=common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=int(str(CHECK["max_tokens"]))),
        )
        metadata = (("authorization", f"Bearer {self._system.key}"),)
        try:
            async with self._system.channel(self._system.grpc_address()) as channel:
                chunks = generation_pb2_grpc.GenerationStub(channel).Generate(
                    request, timeout=TIMEOUT_S, metadata=metadata
                )
                return [token_id async for chunk in chunks for token_id in chunk.token_ids]
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"{error.code().name}: {error.details()}") from error


def _fault_of_rest(answer: HttpAnswer, right: list[int], back: Comeback) -> str | None:
    """Describes the fault of what a client received after the cut of its stream; returns None if there is none."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return f"200 that is no stream: {answer.body[:200]!r}"
    token_ids, error = tokens_of_stream(answer.body), error_of_stream(answer.body)
    if error is not None:
        return f"it ended with an error: {error[:300]}"
    if not back.is_own:
        return "what is another run's, or another tenant's, was taken for its own and went on"
    if not is_rest(token_ids, right, back.from_token):
        return f"not the rest of the output from {back.from_token}: {token_ids}, and the output is {right}"
    return None
