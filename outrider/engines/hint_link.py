"""An engine's end of the connection to its hint server, a process of its own that speaks gRPC with draft workers.

Why a process: a thread in the engine would compete with the scheduler for Python's lock, and a draft worker that floods
would take the engine's time. Nothing but `wait` waits: the socket does not block, what cannot be sent at once is kept
within a bound, and a hint server that is gone, or does not read, is ended and started anew after a growing pause. The
engine decodes without hints meanwhile. `receive` reads no further than its caller asks, and the hint server sends only
so much that was not taken: it holds the rest, and chooses whose hints come next.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError

from outrider.engines.frames import FROM_HINT_SERVER, BadFrame, FrameKind, FrameReader, FrameTooLarge, moment, pack
from outrider.message_sizes import MAX_MESSAGE_BYTES
from protos.outrider.v1 import hints_pb2

logger = logging.getLogger(__name__)

SEND_BYTES: Final = 256 * 1024
"""Most bytes that one call of `flush` sends."""
MAX_UNSENT_BYTES: Final = 8 * MAX_MESSAGE_BYTES
"""Bytes that may wait for the hint server to read. Above `SEND_BYTES` no request is announced to it, so that these are
one prompt, and commits that it does not read."""
STUCK_S: Final = 10.0
"""How long the hint server may read nothing, while something is to be sent, before it is given up."""
TAKEN_S: Final = 0.1
"""Longest that the hint server is not told of frames that were taken, unless something else is sent to it before."""
RESTART_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S: Final = 60.0
"""Life of a hint server after which its next pause is the shortest again."""
END_S: Final = 1.0
"""How long the end of a hint server is waited for, before it is killed."""


class Child(Protocol):
    """The process at the other end."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


Start = Callable[[socket.socket], Child]


def start_hint_server(ours: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a hint server that owns the given end of a socket pair, and ends when the other end is closed."""
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # an engine may have bound itself to cores that it wants for itself
        cores |= os.sched_getaffinity(os.getppid())
    words = [sys.executable, "-m", "outrider.engines.hint_server", str(ours.fileno())]
    words.append(",".join(str(core) for core in sorted(cores)))
    return subprocess.Popen(words, pass_fds=[ours.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())


class HintLink:
    """The connection, and the process at its other end."""

    def __init__(self, settings: Mapping[str, Any], start: Start = start_hint_server) -> None:
        """`settings` are sent first, as JSON."""
        self._hello = pack(FrameKind.HELLO, json.dumps(settings).encode())
        self._start = start
        self._socket: socket.socket | None = None
        self._process: Child | None = None
        self._killed: list[Child] = []  # not yet reaped
        self._reader = FrameReader(FROM_HINT_SERVER)
        self._unsent = bytearray()
        self._stuck_since: float | None = None  # the socket takes nothing; seconds
        self._num_taken = 0  # frames that the hint server was not told of
        self._told_at = 0.0  # of those that were taken
        self._num_failures = 0
        self._opened_at = 0.0
        self._open_at = 0.0  # not before
        self.num_starts = 0

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self, now: float) -> bool:
        """Starts the hint server if there is none and its pause is over; returns whether it did. now: seconds."""
        if self._socket is not None or now < self._open_at:
            return False
        self._killed = [process for process in self._killed if process.poll() is None]
        ours, theirs = socket.socketpair()
        try:
            self._process = self._start(theirs)
        except OSError as error:
            ours.close()
            self._fail(now, f"it cannot be started ({error})")
            return False
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket, self._opened_at, self._reader = ours, now, FrameReader(FROM_HINT_SERVER)
        self._unsent, self._num_taken, self._told_at = bytearray(self._hello), 0, now
        self._stuck_since = None
        self.num_starts += 1
        return True

    @property
    def is_busy(self) -> bool:
        """Whether what can wait should not be sent now."""
        return len(self._unsent) >= SEND_BYTES

    def send(self, kind: FrameKind, body: bytes, number: int = 0) -> None:
        """Adds a frame to what `flush` sends; does nothing without a connection. A request that is too long to be
        announced gets no hints."""
        if self._socket is None:
            return
        try:
            self._unsent += pack(kind, body, number)
        except FrameTooLarge as error:
            logger.warning("the hint server is not told of this: %s", error)

    def flush(self, now: float) -> None:
        """Sends what the socket takes now, within the bound of a step."""
        if self._socket is None:
            return
        if self._num_taken and (self._unsent or now - self._told_at >= TAKEN_S):
            self._unsent += pack(FrameKind.TAKEN, b"", self._num_taken)
            self._num_taken, self._told_at = 0, now
        num_unsent = len(self._unsent)
        try:
            left = SEND_BYTES
            while self._unsent and left > 0:
                num_sent = self._socket.send(self._unsent[:left])
                left -= num_sent
                del self._unsent[:num_sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(now, str(error))
            return
        if not num_unsent or len(self._unsent) < num_unsent:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        is_stuck = self._stuck_since is not None and now - self._stuck_since >= STUCK_S
        if is_stuck or len(self._unsent) > MAX_UNSENT_BYTES:
            self._fail(now, f"it does not read; {len(self._unsent)} bytes wait for it")

    def receive(self, now: float) -> Iterator[tuple[hints_pb2.HintFrame, float]]:
        """Yields what has arrived, frame by frame, and when the hint server had each, seconds. What the caller does not
        take is there at the next call."""
        while self._socket is not None:
            try:
                frame = self._reader.next()
                if frame is None:
                    if not self._read(now):
                        return
                    continue
                _, number, body = frame
                message = hints_pb2.HintFrame.FromString(body)
            except (BadFrame, DecodeError) as error:
                self._fail(now, f"it sent an invalid message ({error})")
                return
            self._num_taken += 1
            yield message, moment(number, now)

    def _read(self, now: float) -> bool:
        """Reads what the reader has room for; returns whether there was something."""
        assert self._socket is not None
        try:
            data = self._socket.recv(self._reader.room)
        except BlockingIOError:
            return False
        except OSError as error:
            self._fail(now, str(error))
            return False
        if not data:
            self._fail(now, "it has ended")
        self._reader.feed(data)
        return bool(data)

    def wait(self, longest_s: float) -> None:
        """Waits until something can be received."""
        if self._socket is not None and longest_s > 0.0 and not self._reader.has_frame:
            poll = select.poll()  # unlike `select.select`, it takes any number of a file
            poll.register(self._socket, select.POLLIN)
            poll.poll(longest_s * 1e3)

    def _fail(self, now: float, reason: str) -> None:
        if self._socket is not None and now - self._opened_at > STEADY_S:
            self._num_failures = 0
        pause_s = RESTART_S[min(self._num_failures, len(RESTART_S) - 1)]
        self._num_failures += 1
        self._open_at = now + pause_s
        logger.warning("the hint server is lost: %s; no hints for %g s at least", reason, pause_s)
        self._drop()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._killed.append(process)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._unsent.clear()

    def close(self) -> None:
        """Ends the hint server and waits for its end, for a bounded time."""
        self._drop()
        process, self._process = self._process, None
        self._open_at = float("inf")
        if process is not None:
            self._killed.append(process)
        until = time.monotonic() + END_S
        for each in self._killed:
            try:
                each.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self._killed.clear()
