"""Calls over gRPC by a client that shapes its HTTP/2 frames itself: what it sends, compresses and takes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, PingAckReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes, Settings

TIMEOUT_S = 20.0


def framed(message: bytes, *, is_compressed: bool = False) -> bytes:
    """A message as gRPC frames it."""
    message = gzip.compress(message) if is_compressed else message
    return bytes([is_compressed]) + len(message).to_bytes(4, "big") + message


class RawConnection:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int | None) -> None:
        self._reader, self._writer = reader, writer
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        if window is not None:
            # Not an item of the settings: h2 sends those that are current, and takes a later one for acknowledged.
            self._http.local_settings = Settings(True, {SettingCodes.INITIAL_WINDOW_SIZE: window})
        self._http.initiate_connection()
        self.statuses: dict[int, tuple[int, str]] = {}
        """The status of each call that has ended, by its number: code and message; -1 where it was reset."""

    async def begin(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> int:
        """Sends the head of a call; returns its number."""
        number = self._http.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        head += [("content-type", "application/grpc"), ("te", "trailers"), *metadata]
        self._http.send_headers(number, head)
        await self._flush()
        return number

    async def send(self, number: int, data: bytes, *, is_end: bool = True) -> int:
        """Sends as much of the data as the server takes without an answer; returns how much that was."""
        num_sent = 0
        while number not in self.statuses:
            room = min(self._http.local_flow_control_window(number), self._http.max_outbound_frame_size)
            if room <= 0 or num_sent == len(data):
                # Twice: gRPC may widen the window on its own account some time after the last byte.
                if not await self._round_trips(2, until=lambda: self._http.local_flow_control_window(number) > 0):
                    break
                if num_sent == len(data):
                    break
                continue
            part = data[num_sent : num_sent + room]
            num_sent += len(part)
            self._http.send_data(number, part, end_stream=is_end and num_sent == len(data))
            await self._flush()
        return num_sent

    async def status(self, number: int) -> tuple[int, str]:
        """Waits for the end of a call."""
        async with asyncio.timeout(TIMEOUT_S):
            while number not in self.statuses:
                await self._receive()
        return self.statuses[number]

    async def _round_trips(self, num: int, until: object = None) -> bool:
        for _ in range(num):
            self._http.ping(b"roundtri")
            await self._flush()
            async with asyncio.timeout(TIMEOUT_S):
                while not any(isinstance(event, PingAckReceived) for event in await self._receive()):
                    pass
            if callable(until) and until():
                return True
        return False

    async def _receive(self) -> list[Event]:
        data = await self._reader.read(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        events = self._http.receive_data(data)
        for event in events:
            if isinstance(event, ResponseReceived | TrailersReceived):
                told = {str(name): str(value) for name, value in event.headers or ()}
                if "grpc-status" in told:
                    self.statuses[event.stream_id or 0] = int(told["grpc-status"]), told.get("grpc-message", "")
            elif isinstance(event, StreamReset | StreamEnded):
                self.statuses.setdefault(event.stream_id or 0, (-1, "reset"))
        await self._flush()
        return events

    async def _flush(self) -> None:
        self._writer.write(self._http.data_to_send())
        await self._writer.drain()


@asynccontextmanager
async def raw_connection(address: str, window: int | None = None) -> AsyncIterator[RawConnection]:
    """Opens a connection. `window`: bytes that the server may send of a call before this side takes some; 0 takes
    none."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawConnection(reader, writer, window)
    finally:
        writer.transport.abort()
