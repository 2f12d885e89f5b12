"""Sends an answer to one HTTP client in parts of bounded size, each within a time limit.

The server (uvicorn) buffers what the system's socket does not take, and blocks its application while that exceeds
64 KiB. So a client that reads, however slowly, takes a part now and then. A connection is reset if its client takes no
part for `CUT_AFTER` times the limit of its pace, or if it takes a message of many parts, such as a whole answer, at
less than `PACE_BYTES` in that time. Such a client would keep memory and one of the requests that this replica admits.
A server that takes everything at once, as Serve's own proxy does, never blocks, so nothing is cut there.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, cast

from starlette.types import Message, Receive, Send

from coordinator.output.client_pace import CUT_AFTER, PACE_BYTES, PaceWatch

PART_BYTES_MAX: Final = 64 << 10
"""Most bytes passed to the server at once. It may buffer two parts, because it takes one while less than that waits."""
# SO_LINGER: close drops what the system's socket buffers, and the client sees a reset, not an end.
_RESET: Final = struct.pack("ii", 1, 0)


class ClientConnection:
    """The connection to a client, for one answer. Call `end` when the answer is complete."""

    def __init__(self, receive: Receive, send: Send, stall_max_s: float, on_cut: Callable[[], object]) -> None:
        """`receive` and `send` are the server's, `stall_max_s` limits the client's pace; `on_cut` is called when the
        client is cut off."""
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
        """Whether the client was cut off for taking nothing. What is sent afterwards is dropped."""

    async def send(self, message: Message) -> None:
        """Sends an ASGI message; waits while the client is slow."""
        self._watch.start()
        body, begin_s = message.get("body", b""), self._loop.time()
        if len(body) <= PART_BYTES_MAX:
            await self._send_part(message, begin_s)
            return
        has_more = message.get("more_body", False)
        for begin in range(0, len(body), PART_BYTES_MAX):
            end = begin + PART_BYTES_MAX
            more_body = has_more or end < len(body)
            due_s = begin_s + self._take_max_s * begin / PACE_BYTES  # when the earlier parts had to be taken
            await self._send_part({**message, "body": body[begin:end], "more_body": more_body}, due_s)

    def end(self) -> None:
        """Ends the answer, complete or not. The client has to take the buffered rest, at most two parts, in time."""
        self._watch.stop()
        if self._num_unread:
            self._loop.call_later(self._take_max_s, self._cut_if_unread)

    async def _send_part(self, message: Message, due_s: float) -> None:
        """Sends one part, whose time runs from `due_s` if that has passed, else from now."""
        if self.is_cut:
            return
        self._task = task = asyncio.current_task()
        self._since_s = min(due_s, self._loop.time())
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if not self._is_cancelled or task is None or task.uncancel():
                raise  # not a cancellation of ours
        finally:
            self._since_s = None

    def _cut(self) -> None:
        self.is_cut = True
        self._on_cut()
        if self._cycle is not None:
            if (connected := self._cycle.transport.get_extra_info("socket")) is not None:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._cycle.transport.abort()  # unblocks the sender
        elif self._task is not None:
            self._is_cancelled = True
            self._task.cancel()

    @property
    def _num_unread(self) -> int:
        """Bytes that the server buffers because the system's socket is full."""
        return 0 if self._cycle is None else cast(int, self._cycle.transport.get_write_buffer_size())

    def _cut_if_unread(self) -> None:
        if self._cycle is None or not self._num_unread:
            return
        if getattr(self._cycle.transport.get_protocol(), "cycle", None) is not self._cycle:
            return  # the connection carries another answer, which has its own watch
        self._cut()


def _cycle_of(receive: Receive) -> Any:
    """Finds uvicorn's state of one request, which has the transport; None for other servers.

    ASGI cannot end a connection without the client's help. The `receive` that uvicorn passes is a method of that state;
    a replica of Serve passes it on in a wrapper.
    """
    cycle = getattr(getattr(receive, "_receive", receive), "__self__", None)
    return cycle if hasattr(cycle, "transport") else None
