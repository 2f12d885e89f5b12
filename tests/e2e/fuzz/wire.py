"""Bytes to a server and what it answers: HTTP/1.1 as it stands there, and HTTP/2 frames for calls over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

from tests.e2e.fuzz.judge import GrpcAnswer

_PART = 1 << 16
_WINDOW = 1 << 24


class Hung(Exception):
    """Nothing more came for as long as anybody would wait."""


async def exchange(host: str, port: int, context: ssl.SSLContext, raw: bytes, *, ends: bool, timeout_s: float) -> bytes:
    """Sends bytes and returns everything that came until the server ended the connection, or what comes within a moment
    if `ends`. Raises Hung."""
    answer = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, ssl_handshake_timeout=timeout_s)
            try:
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    writer.write(raw)
                    sending = asyncio.create_task(_drained(writer))
                    if ends:
                        # TLS has no half-closed connections: this side waits a moment, and leaves.
                        await sending
                        await asyncio.sleep(0.05)
                        return bytes(await _what_is_there(reader))
                    while part := await reader.read(_PART):
                        answer += part
                    await sending
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise Hung(f"no end within {timeout_s:g} s, {len(answer)} bytes came: {bytes(answer[:200])!r}") from None
    except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
        pass  # as good as an end
    return bytes(answer)


async def _drained(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.drain()


async def _what_is_there(reader: asyncio.StreamReader) -> bytes:
    """Returns the part that has come of an answer to a truncated request, which may never come."""
    answer = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.25):
            while part := await reader.read(_PART):
                answer += part
    return bytes(answer)


async def call(
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    server_name: str | None,
    headers: Sequence[tuple[bytes, bytes]],
    data: bytes,
    *,
    timeout_s: float,
) -> GrpcAnswer:
    """Makes one call over a connection of its own; nothing of what is sent is checked on this side. Raises Hung."""
    answer = GrpcAnswer()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=server_name if context is not None else None
            )
            try:
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    await _Call(reader, writer, answer).run(headers, data)
            finally:
                writer.transport.abort()
    except TimeoutError:
        if answer.num_bytes or answer.headers:
            answer.reset = "nothing more"
        raise Hung(f"no status within {timeout_s:g} s: {answer}") from None
    except (ConnectionError, ssl.SSLError) as error:
        answer.reset = answer.reset or type(error).__name__
    return answer


class _Call:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: GrpcAnswer) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._http = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._has_ended = False

    async def run(self, headers: Sequence[tuple[bytes, bytes]], data: bytes) -> None:
        self._http.initiate_connection()
        self._http.increment_flow_control_window(_WINDOW)
        stream = self._http.get_next_available_stream_id()
        self._http.send_headers(stream, list(headers), end_stream=not data)
        left = memoryview(data)
        while not self._has_ended:
            while left and (room := self._room(stream)) > 0:
                self._http.send_data(stream, bytes(left[:room]), end_stream=len(left) <= room)
                left = left[room:]
            self._writer.write(self._http.data_to_send())
            await self._writer.drain()
            part = await self._reader.read(_PART)
            if not part:
                self._answer.reset = self._answer.reset or "end of connection"
                return
            try:
                self._take(self._http.receive_data(part))
            except H2Error as error:
                self._answer.reset = f"no HTTP/2: {type(error).__name__}"
                return

    def _room(self, stream: int) -> int:
        return min(self._http.local_flow_control_window(stream), self._http.max_outbound_frame_size)

    def _take(self, events: Sequence[object]) -> None:
        for event in events:
            match event:
                case ResponseReceived(headers=headers):
                    self._answer.headers |= _text(headers)
                case TrailersReceived(headers=headers):
                    self._answer.trailers |= _text(headers)
                case DataReceived(data=data, flow_controlled_length=length, stream_id=stream):
                    self._answer.num_bytes += len(data or b"")
                    if length:
                        self._http.acknowledge_received_data(length, stream or 0)
                case StreamReset(error_code=code):
                    # A server that has answered before all was read says so with NO_ERROR.
                    if not self._answer.trailers and "grpc-status" not in self._answer.headers:
                        self._answer.reset = "RST_STREAM"
                    self._answer.headers.setdefault("rst", str(code))
                    self._has_ended = True
                case ConnectionTerminated(error_code=code):
                    if code != ErrorCodes.NO_ERROR:
                        self._answer.reset = "GOAWAY"
                        self._has_ended = True
                case StreamEnded():
                    self._has_ended = True


def _text(headers: Sequence[tuple[bytes, bytes]] | None) -> dict[str, str]:
    return {bytes(name).decode("latin-1"): bytes(value).decode("latin-1") for name, value in headers or ()}
