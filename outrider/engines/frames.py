"""Framed messages between an engine and its hint server: length, kind, number, protobuf. Pure.

The messages are those of `protos`: an AttachRequest announces a request to the hint server, a CommitFrame tells it
what was committed, a HintFrame brings hints back. Channels of these are the numbers of requests.

`BYTES_MAX` has the largest message of each kind. What is sent, what is read and the room of a reader follow from it, so
that no message that may be sent is one that its reader cannot hold.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Set
from enum import IntEnum
from typing import Final

from outrider.message_sizes import MAX_MESSAGE_BYTES

_HEADER: Final = struct.Struct("<IBI")
NUMBER_MAX: Final = (1 << 32) - 1


class FrameKind(IntEnum):
    """The contents of a frame."""

    HELLO = 1  # JSON: the hint server's settings
    OPEN = 2  # an AttachRequest for the request with the frame's number
    COMMITS = 3  # a CommitFrame; the number: microseconds that the engine waited for hints since the last one
    HINTS = 4  # a HintFrame, which the hint server had at `time_number`
    TAKEN = 5  # nothing; the number: frames with hints that the engine has taken since the last one of this kind


BYTES_MAX: Final = {
    FrameKind.HELLO: MAX_MESSAGE_BYTES,
    FrameKind.OPEN: MAX_MESSAGE_BYTES,  # a draft worker is sent it in one message
    FrameKind.COMMITS: MAX_MESSAGE_BYTES,
    FrameKind.HINTS: 8192,  # of `MAX_FRAME_NODES`: an engine takes one in 0.1 ms
    FrameKind.TAKEN: 0,
}
"""Most bytes of a frame's body."""
MAX_FRAME_NODES: Final = 128
"""Most hints of a frame."""
MAX_FRAME_REQUESTS: Final = 32
"""Most requests that a frame with hints is about."""
FROM_ENGINE: Final = frozenset({FrameKind.HELLO, FrameKind.OPEN, FrameKind.COMMITS, FrameKind.TAKEN})
FROM_HINT_SERVER: Final = frozenset({FrameKind.HINTS})


class BadFrame(Exception):
    """The peer sent something that is no frame; the connection must end."""


class FrameTooLarge(Exception):
    """A message that no reader would take; it must not be sent."""


def pack(kind: FrameKind, body: bytes, number: int = 0) -> bytes:
    """A frame as it is sent. Raises FrameTooLarge."""
    if len(body) > BYTES_MAX[kind]:
        raise FrameTooLarge(f"a frame of kind {kind.name} with {len(body)} bytes; permitted: {BYTES_MAX[kind]}")
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
    """Cuts a stream of bytes into frames of the kinds that its peer may send.

    It holds one frame of the largest size and no byte more. While `next` has none, there is room to read on.
    """

    def __init__(self, kinds: Set[FrameKind] = frozenset(FrameKind)) -> None:
        self._bytes_max = {int(kind): BYTES_MAX[kind] for kind in kinds}
        self._capacity = _HEADER.size + max(self._bytes_max.values())
        self._buffer = bytearray()

    @property
    def num_buffered(self) -> int:
        """Bytes that are not a whole frame yet, or were not asked for."""
        return len(self._buffer)

    @property
    def room(self) -> int:
        """Bytes that may be fed."""
        return self._capacity - len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Adds at most `room` bytes."""
        assert len(data) <= self.room
        self._buffer += data

    def next(self) -> tuple[FrameKind, int, bytes] | None:
        """Returns the next whole frame: kind, number, body. None while there is none. Raises BadFrame."""
        if len(self._buffer) < _HEADER.size:
            return None
        size, kind, number = _HEADER.unpack_from(self._buffer)
        bytes_max = self._bytes_max.get(kind)
        if bytes_max is None:
            raise BadFrame(f"a frame of kind {kind}, which it may not send")
        if size > bytes_max:
            raise BadFrame(f"a frame of kind {FrameKind(kind).name} with {size} bytes; permitted: {bytes_max}")
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return FrameKind(kind), number, body

    def frames(self) -> Iterator[tuple[FrameKind, int, bytes]]:
        """Yields the whole frames. Raises BadFrame."""
        while (frame := self.next()) is not None:
            yield frame

    @property
    def has_frame(self) -> bool:
        """Whether `next` would return one or raise."""
        if len(self._buffer) < _HEADER.size:
            return False
        size, kind, _ = _HEADER.unpack_from(self._buffer)
        return len(self._buffer) >= _HEADER.size + min(size, self._bytes_max.get(kind, 0))
