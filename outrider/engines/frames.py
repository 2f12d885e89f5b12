"""Framed messages between an engine and its hint server: length, kind, number, protobuf. Pure.

The messages are those of `protos`: an AttachRequest announces a request to the hint server, a CommitFrame tells it
what was committed, a HintFrame brings hints back. Channels of these are the numbers of requests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

_HEADER: Final = struct.Struct("<IBI")
NUMBER_MAX: Final = (1 << 32) - 1
MAX_FRAME_BYTES: Final = 8 * 1024 * 1024
"""Twice what a draft worker may be sent."""


class FrameKind(IntEnum):
    """The contents of a frame."""

    HELLO = 1  # JSON: the hint server's settings
    OPEN = 2  # an AttachRequest for the request with the frame's number
    COMMITS = 3  # a CommitFrame; the number: microseconds that the engine waited for hints since the last one
    HINTS = 4  # a HintFrame, which the hint server had at `time_number`


_KINDS: Final = frozenset(int(kind) for kind in FrameKind)


class BadFrame(Exception):
    """The peer sent something that is no frame; the connection must end."""


def pack(kind: FrameKind, body: bytes, number: int = 0) -> bytes:
    """A frame as it is sent."""
    return _HEADER.pack(len(body), kind, number) + body


def time_number(at: float) -> int:
    """A moment of the machine's monotonic clock, seconds, as a frame's number: microseconds, modulo 2^32."""
    return round(at * 1e6) & NUMBER_MAX


def moment(number: int, now: float) -> float:
    """The moment before `now`, seconds, with this number; at most `now` itself. Moments of the last half hour are
    told apart from those to come."""
    age_us = (time_number(now) - number) & NUMBER_MAX
    return now - (age_us / 1e6 if age_us <= NUMBER_MAX // 2 else 0.0)


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def num_buffered(self) -> int:
        """Bytes that are not a whole frame yet, or were not asked for."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def frames(self, limit: int = 1 << 30) -> Iterator[tuple[FrameKind, int, bytes]]:
        """Yields at most `limit` whole frames: kind, number, body. Raises BadFrame."""
        for _ in range(limit):
            if len(self._buffer) < _HEADER.size:
                return
            size, kind, number = _HEADER.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES or kind not in _KINDS:
                raise BadFrame(f"a frame of kind {kind} with {size} bytes")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield FrameKind(kind), number, body
