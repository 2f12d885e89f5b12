"""What one client is sent over HTTP: in parts of bounded size, each within a time limit.

The server (uvicorn) keeps what the system's socket does not take, and lets its application wait once that is more than
64 KiB. So a client that reads, however slowly, takes a part now and then. From one that takes none for `CUT_AFTER`
times the limit of its pace the connection is taken away, whatever it still holds, and so it is from one that takes a
message of many parts, a finished answer above all, at less than `PACE_BYTES` in that time: what it keeps waiting is
memory, and a place among the requests that this replica takes. Where the server takes everything at
once, as Serve's own proxy does, there is nothing to wait for and nothing to cut.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, cast

from starlette.types import Message, Receive, Send

from coordinator.client_pace import CUT_AFTER, PACE_BYTES, PaceWatch

PART_BYTES_MAX: Final = 64 << 10
"""Of what the server is given at once. It holds as much again, for it takes another part while less than that waits."""
# On close: what the system's socket holds is dropped, too, and the client hears that it missed something.
_RESET: Final = struct.pack("ii", 1, 0)


class ClientConnection:
    """The way to one client, for one answer. Call `end` when that is complete."""

    def __init__(
        self, receive: Receive, send: Send, stall_max_s: float, on_cut: Callable[[], object]
    ) -> None:
        """`receive` and `send` are the server's, `stall_max_s` is the limit of the client's pace, and `on_cut` is told
        when the client is cut off."""
        self._send = send
        self._cycle = _cycle_of(receive)
        self._take_max_s = CUT_AFTER * stall_max_s
        self._on_cut = on_cut
        self._since_s: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._watch = PaceWatch(lambda: self._since_s, self._take_max_s, self._cut)
        self._is_cancelled = False
        self.is_cut = False
        """Whether the client took nothing for too long. What is sent from then on goes nowhere."""

    async def send(self, message: Message) -> None:
        """Passes an ASGI message on; waits while the client is slow."""
        self._watch.start()
        body, begin_s = message.get("body", b""), self._loop.time()
        if len(body) <= PART_BYTES_MAX:
            await self._send_part(message, begin_s)
            return
        has_more = message.get("more_body", False)
        for begin in range(0, len(body), PART_BYTES_MAX):
            end = begin + PART_BYTES_MAX
            more_body = has_more or end < len(body)
            due_s = begin_s + self._take_max_s * begin / PACE_BYTES  # then the parts before had to be taken
            await self._send_part({**message, "body": body[begin:end], "more_body": more_body}, due_s)

    def end(self) -> None:
        """The answer is complete, or given up. What the server still holds of it, two parts at most, the client has to
        fetch within the limit."""
        self._watch.stop()
        if self._num_unread:
            self._loop.call_later(self._take_max_s, self._cut_if_unread)

    async def _send_part(self, message: Message, due_s: float) -> None:
        """Its time runs from `due_s` on where that is over."""
        if self.is_cut:
            return
        self._task = task = asyncio.current_task()
        self._since_s = min(due_s, self._loop.time())
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if not self._is_cancelled or task is None or task.uncancel():
                raise  # somebody else's cancellation
        finally:
            self._since_s = None

    def _cut(self) -> None:
        self.is_cut = True
        self._on_cut()
        if self._cycle is not None:
            if (connected := self._cycle.transport.get_extra_info("socket")) is not None:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._cycle.transport.abort()  # the server hears of it, and lets whoever sends go on
        elif self._task is not None:
            self._is_cancelled = True
            self._task.cancel()

    @property
    def _num_unread(self) -> int:
        """Bytes that the server holds because the system's socket is full."""
        return 0 if self._cycle is None else cast(int, self._cycle.transport.get_write_buffer_size())

    def _cut_if_unread(self) -> None:
        if self._cycle is None or not self._num_unread:
            return
        if getattr(self._cycle.transport.get_protocol(), "cycle", None) is not self._cycle:
            return  # there is another answer on this connection, which is watched for itself
        self._cut()


def _cycle_of(receive: Receive) -> Any:
    """uvicorn's state of one request and its answer, which knows the transport. ASGI has no word for an end without the
    client's help; a method of that state is what a server hands to its application, and a replica of Serve hands on in
    a wrapper. None for other servers."""
    cycle = getattr(getattr(receive, "_receive", receive), "__self__", None)
    return cycle if hasattr(cycle, "transport") else None
