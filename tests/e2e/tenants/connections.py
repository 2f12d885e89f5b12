"""Attacks by connections: bodies that do not come, compressed messages, silence, watches, and streams nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import ssl
import struct

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import H2Error

from protos.outrider.v1 import generation_pb2
from tests.e2e.tenants.attacker import COMPLETIONS, JSON, Attacker
from tests.e2e.tenants.scenario import scenario

MANY = 700  # more than a replica takes requests in
CONNECTIONS = 4200
MESSAGE_BYTES = 2_000_000
NUM_CALLS = 500


async def compressed_calls(a: Attacker, num_calls: int, *, has_key: bool) -> None:
    """So many calls at once over one connection, each with a message near the limit, compressed."""
    prompt = generation_pb2.GenerationRequest(prompt="a" * MESSAGE_BYTES, request_id=a.letters(8))
    message = gzip.compress(prompt.SerializeToString(), 9)
    a.tally.num_requests += num_calls
    a.tally.load(num_calls * len(message), num_requests=num_calls)
    headers = [
        *((":method", "POST"), (":scheme", "http" if a.access.authority is None else "https")),
        *((":path", "/outrider.v1.Generation/Generate"), (":authority", a.access.grpc_address)),
        *(("content-type", "application/grpc"), ("grpc-encoding", "gzip"), ("te", "trailers")),
        *([("authorization", f"Bearer {a.access.key}")] if has_key else []),
    ]
    http = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    http.initiate_connection()
    unsent = []
    for _ in range(num_calls):
        stream = http.get_next_available_stream_id()
        http.send_headers(stream, headers)
        unsent.append(stream)
    num_open = num_calls
    try:
        async with asyncio.timeout(a.seconds):
            reader, writer = await a.access.connect_grpc()
            try:
                while num_open:
                    while unsent and http.local_flow_control_window(unsent[-1]) > len(message) + 5:
                        http.send_data(unsent.pop(), struct.pack(">BI", 1, len(message)) + message, end_stream=True)
                    writer.write(http.data_to_send())
                    await writer.drain()
                    if not (part := await reader.read(1 << 16)):
                        a.tally.note("hung up")
                        return
                    for event in http.receive_data(part):
                        if isinstance(event, ResponseReceived | TrailersReceived):
                            status = dict(event.headers or ()).get(b"grpc-status")
                            if status is not None:
                                a.tally.note(f"gRPC status {status.decode()}")
                        num_open -= isinstance(event, StreamEnded | StreamReset)
                        if isinstance(event, ConnectionTerminated):
                            num_open = 0
            finally:
                writer.transport.abort()
    except TimeoutError:
        a.tally.note("no answer")
    except (OSError, ssl.SSLError, H2Error):
        a.tally.note("hung up")


@scenario(3, clients=1, is_short=True)
async def compressed_calls_without_a_key(a: Attacker) -> None:
    """Five hundred calls over gRPC without a key: a megabyte, compressed, which is a gigabyte."""
    await compressed_calls(a, NUM_CALLS, has_key=False)


@scenario(3, clients=1)
async def compressed_calls_with_a_key(a: Attacker) -> None:
    """The same calls with a key."""
    await compressed_calls(a, NUM_CALLS, has_key=True)


@scenario(3, clients=2)
async def compressed_bodies(a: Attacker) -> None:
    """Compressed bodies over HTTP, which nobody has asked for."""
    await a.post(COMPLETIONS, gzip.compress(bytes(64 << 20)), {"Content-Encoding": "gzip"})


async def open_connections(a: Attacker, count: int, raw: bytes, piece: bytes = b"") -> None:
    """Opens so many connections that send `raw`, then a piece every two seconds, and stay for the whole attack."""
    a.tally.num_requests += count
    a.tally.load(count * len(raw), num_requests=count)

    async def one(index: int) -> None:
        await asyncio.sleep(index * 0.002)
        await a.send_raw(raw, piece=piece)

    await asyncio.gather(*(one(index) for index in range(count)))


@scenario(4, clients=1, times=1, is_short=True)
async def bodies_that_do_not_come(a: Attacker) -> None:
    """Seven hundred requests with a key, whose bodies are announced and never sent."""
    raw = a.head("POST", COMPLETIONS, {**JSON, "Content-Length": "200"}) + b"\r\n"
    await open_connections(a, MANY, raw + b"{")


@scenario(4, clients=1, times=1)
async def bodies_in_chunks_that_do_not_come(a: Attacker) -> None:
    """The same with chunked bodies, of which a byte comes every two seconds."""
    raw = a.head("POST", COMPLETIONS, {**JSON, "Transfer-Encoding": "chunked"}) + b"\r\n"
    await open_connections(a, MANY, raw + b"1\r\n{\r\n", b"1\r\n \r\n")


@scenario(4, clients=1, times=1)
async def slow_uploads(a: Attacker) -> None:
    """Sixteen files that are uploaded a byte every two seconds."""
    form = {"Content-Type": "multipart/form-data; boundary=b", "Content-Length": str(1 << 20)}
    raw = a.head("POST", "/v1/files", form) + b"\r\n"
    raw += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    await open_connections(a, 16, raw, b"a")


@scenario(4, clients=1, times=1)
async def heads_that_do_not_come(a: Attacker) -> None:
    """A thousand requests whose head never ends."""
    await open_connections(a, 1000, a.head("POST", COMPLETIONS), b"X-A: b\r\n")


@scenario(4, clients=1, times=1)
async def silent_connections(a: Attacker) -> None:
    """Four thousand connections that say nothing."""
    await open_connections(a, CONNECTIONS, b"")


@scenario(4, clients=1, times=1)
async def silent_connections_over_grpc(a: Attacker) -> None:
    """Two thousand connections to the gRPC port that say nothing."""
    a.tally.num_requests += 2000
    a.tally.load(0, num_requests=2000)

    async def one(index: int) -> None:
        await asyncio.sleep(index * 0.002)
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await a.access.connect_grpc()
            try:
                await asyncio.sleep(a.seconds)
            finally:
                writer.transport.abort()

    await asyncio.gather(*map(one, range(2000)))


@scenario(4, clients=8)
async def new_connections(a: Attacker) -> None:
    """A new connection, with its handshake, for each look at the list of models."""
    a.tally.num_requests += 1
    a.tally.load(0)
    await a.send_raw(a.head("GET", "/v1/models") + b"\r\n", stays_s=0.01)


@scenario(18, clients=1, times=1, is_short=True)
async def health_watches(a: Attacker) -> None:
    """Three hundred clients without a key watch the health over gRPC."""
    stub = health_pb2_grpc.HealthStub(a.channel)
    a.tally.num_requests += 300
    a.tally.load(0, num_requests=300)

    async def watch() -> None:
        try:
            async for _ in stub.Watch(health_pb2.HealthCheckRequest(), timeout=a.seconds):
                pass
        except grpc.aio.AioRpcError as error:
            a.tally.note(error.code().name)

    await asyncio.gather(*(watch() for _ in range(300)))


@scenario(0, clients=4)
async def calls_that_are_cancelled(a: Attacker) -> None:
    """Calls over gRPC that are begun and cancelled, hundreds a second."""
    for _ in range(50):
        a.tally.num_requests += 1
        a.tally.load(0)
        watching = health_pb2_grpc.HealthStub(a.channel).Watch(health_pb2.HealthCheckRequest())
        await asyncio.sleep(0.001)
        watching.cancel()
        a.tally.note("cancelled")


@scenario(0, clients=1, times=1)
async def streams_that_nobody_reads(a: Attacker) -> None:
    """Forty streams of 900 tokens with all details, of which nobody reads more than the first line."""
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4}
    content = json.dumps(body).encode()
    a.tally.num_tokens += 40 * 4 * 500
    head = a.head("POST", COMPLETIONS, {**JSON, "Content-Length": str(len(content))})
    await open_connections(a, 40, head + b"\r\n" + content)
