"""Coordinators as far as a balancer can tell: two listeners each, of HTTP/1.1 and of HTTP/2 for gRPC.

What becomes of a request is decided when it has come as a whole, by whoever asked for the coordinators: the balancer's
choice among them does not matter.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

import h2.config
import h2.connection
import h2.events

from protos.outrider.v1 import generation_pb2
from tests.e2e.load_balancers import Backend

LIMIT_BYTES = 16 << 20
Serve = Callable[["FakeCoordinators", int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Fate(Enum):
    """The fate of a coordinator once a request has arrived."""

    ANSWERS = "answers"
    DIES = "dies before the first byte"
    DIES_LATER = "dies in the middle of the answer"


@dataclass
class FakeCoordinators:
    """Fake coordinators and a record of their requests. `fate_of` gets the number of a POST or call among all that
    came, from 0. A coordinator that dies loses the connection that the request came on, and accepts new ones."""

    fate_of: Callable[[int], Fate] = lambda number: Fate.ANSWERS
    time_s: float = 0.0  # from a request to that
    taken: list[int] = field(default_factory=list)  # which coordinator, for each request
    request_ids: list[str] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)  # which coordinators were asked for their models
    backends: list[Backend] = field(default_factory=list)

    def take(self, index: int, request_id: str) -> Fate:
        self.taken.append(index)
        self.request_ids.append(request_id)
        return self.fate_of(len(self.taken) - 1)


@asynccontextmanager
async def fake_coordinators(num: int = 2) -> AsyncIterator[FakeCoordinators]:
    fakes = FakeCoordinators()
    async with AsyncExitStack() as stack:
        for index in range(num):
            ports = []
            protocols: tuple[Serve, ...] = (_serve_http, _serve_grpc)
            for serve in protocols:

                async def take(
                    reader: asyncio.StreamReader,
                    writer: asyncio.StreamWriter,
                    index: int = index,
                    serve: Serve = serve,
                ) -> None:
                    with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                        await serve(fakes, index, reader, writer)
                    writer.transport.abort()

                server = await asyncio.start_server(take, "127.0.0.1", 0, limit=LIMIT_BYTES)
                await stack.enter_async_context(server)
                ports.append(server.sockets[0].getsockname()[1])
            fakes.backends.append(Backend(*ports))
        yield fakes


async def _serve_http(
    fakes: FakeCoordinators, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().splitlines()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if first.split()[1] == "/refused":  # before the body is read, as one is who has no key
            writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            await reader.read()
            return
        await reader.readexactly(int(headers.get("content-length", 0)))
        if first.startswith("GET "):  # for its health, or its models
            if first.split()[1] == "/v1/models":
                fakes.reached.add(index)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            continue
        fate = fakes.take(index, headers.get("x-request-id", ""))
        await asyncio.sleep(fakes.time_s)
        if fate is Fate.DIES:
            return
        body = _completion(str(len(fakes.taken)))
        half = body[: len(body) // 2] if fate is Fate.DIES_LATER else body
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%s\r\n" % (len(half), half)
        )
        await writer.drain()
        if fate is Fate.DIES_LATER:
            await asyncio.sleep(0.1)  # so that what was said is not lost with the connection
            return
        writer.write(b"0\r\n\r\n")


def _completion(text: str) -> bytes:
    """The body of a completion of one token."""
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "c", "object": "text_completion", "created": 1, "model": "target"}
    return json.dumps(answer | {"choices": [choice], "usage": usage}).encode()


async def _serve_grpc(
    fakes: FakeCoordinators, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    connection.initiate_connection()
    writer.write(connection.data_to_send())
    ids: dict[int, str | None] = {}  # of calls; None: for its health, as Serve asks
    while data := await reader.read(65536):
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                headers = {bytes(name): bytes(value) for name, value in event.headers}
                is_call = headers[b":path"].startswith(b"/outrider.v1.Generation/")
                ids[event.stream_id] = headers.get(b"x-request-id", b"").decode() if is_call else None
            elif isinstance(event, h2.events.DataReceived):
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                message, request_id = b"\n\x07success", ids.pop(event.stream_id)
                if request_id is not None:
                    fate = fakes.take(index, request_id)
                    await asyncio.sleep(fakes.time_s)
                    if fate is Fate.DIES:
                        return
                    message = generation_pb2.GenerationChunk(text=str(len(fakes.taken))).SerializeToString()
                connection.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
                connection.send_data(event.stream_id, b"\0" + struct.pack(">I", len(message)) + message)
                connection.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
        writer.write(connection.data_to_send())
        await writer.drain()
