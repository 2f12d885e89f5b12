"""A network that can be broken: a TCP relay at a fixed address, whose connections are cut, stalled or delayed at will.

    Link(where the server is) ── start() ──► address to dial

A stalled connection is what a lost network looks like from both ends: it stands, nothing arrives, not even its end,
and new ones are taken by nobody. When the link opens again what was under way arrives, late and in order, as TCP's own
retransmissions would bring it. A fault may concern some callers only; they are told apart by the port they call from.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import cast

Callers = Callable[[int], bool]
"""Whether a connection from this port is meant."""


class State(Enum):
    OPEN = "open"
    REFUSING = "refusing"  # what stands is reset, what comes is reset
    STALLED = "stalled"  # nothing passes, in neither direction


def everybody(port: int) -> bool:
    return True


class _End(asyncio.Protocol):
    """One of a relayed connection's two ends. What it receives goes to its peer."""

    def __init__(self, relay: _Relay) -> None:
        self._relay = relay
        self.transport: asyncio.Transport | None = None
        self.peer: _End | None = None
        self.is_peer_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._relay.set_up(self)

    def data_received(self, data: bytes) -> None:
        assert self.peer is not None, "read before there was somebody to write to"
        self._relay.forward(self.peer, data)

    def pause_writing(self) -> None:
        if self.peer is not None:
            self.peer.is_peer_full = True
            self._relay.set_reading(self.peer)

    def resume_writing(self) -> None:
        if self.peer is not None:
            self.peer.is_peer_full = False
            self._relay.set_reading(self.peer)

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.close()


class _Relay:
    """One connection: the caller's end and the server's."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.caller = _End(self)
        self.server = _End(self)
        self.caller.peer, self.server.peer = self.server, self.caller
        self.caller_port = 0
        self.is_stalled = False
        self._is_connecting = False
        self._is_closed = False
        self._under_way: deque[tuple[float, _End, bytes]] = (
            deque()
        )  # (when due on the loop's clock, to whom, what)
        self._timer: asyncio.TimerHandle | None = None

    def set_up(self, end: _End) -> None:
        """An end stands. The caller's is not read before the server's stands too."""
        assert end.transport is not None
        if end is self.caller:
            self.caller_port = int(end.transport.get_extra_info("peername")[1])
            end.transport.pause_reading()
            self._link.take(self)
        elif self._is_closed:
            end.transport.abort()
        else:
            self.set_reading(self.caller)
            self.set_reading(self.server)

    def stall(self, is_stalled: bool) -> None:
        self.is_stalled = is_stalled
        for end in (self.caller, self.server):
            self.set_reading(end)
        if not is_stalled:
            if self.server.transport is None:
                self.connect()
            self._deliver()

    def connect(self) -> None:
        if not self._is_connecting and not self._is_closed:
            self._is_connecting = True
            task = asyncio.ensure_future(self._connect())
            self._link.tasks.add(task)
            task.add_done_callback(self._link.tasks.discard)

    async def _connect(self) -> None:
        host, port = self._link.server_address
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.server, host, port)
        except OSError:
            self.reset()  # nobody there

    def set_reading(self, end: _End) -> None:
        """Reads from an end exactly when what comes can go on."""
        if end.transport is None or end.transport.is_closing():
            return
        if self.is_stalled or end.is_peer_full or self.server.transport is None:
            end.transport.pause_reading()
        else:
            end.transport.resume_reading()

    def forward(self, to: _End, data: bytes) -> None:
        if self._link.delay_s > 0 or self._under_way or self.is_stalled:
            self._under_way.append((asyncio.get_running_loop().time() + self._link.delay_s, to, data))
            self._deliver()
        elif to.transport is not None:
            to.transport.write(data)

    def _deliver(self) -> None:
        """Passes on what is due and sees to the rest later. What is behind waits its turn."""
        loop = asyncio.get_running_loop()
        while self._under_way and not self.is_stalled:
            due, to, data = self._under_way[0]
            if (wait_s := due - loop.time()) > 0:
                if self._timer is None:
                    self._timer = loop.call_later(wait_s, self._resume)
                return
            self._under_way.popleft()
            if to.transport is not None:
                to.transport.write(data)

    def _resume(self) -> None:
        self._timer = None
        self._deliver()

    def close(self) -> None:
        """Ends both sides, once what was read has been written."""
        self._end(lambda transport: transport.close())

    def reset(self) -> None:
        """Ends both sides as a firewall or a crash would."""
        self._end(_reset)

    def _end(self, how: Callable[[asyncio.Transport], None]) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._link.relays.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        for end in (self.caller, self.server):
            if end.transport is not None:
                how(end.transport)


class Link:
    """The way to one server. Used on the event loop that started it."""

    def __init__(self, name: str, server_address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.name = name
        self.server_address = server_address  # may change; for connections to come
        self.port = 0
        self.delay_s = 0.0  # of every piece of data, each way
        self.relays: set[_Relay] = set()
        self.tasks: set[asyncio.Future[None]] = set()
        self._state = State.OPEN
        self._callers: Callers = everybody
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """host:port to dial."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Relay(self).caller, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for relay in list(self.relays):
            relay.reset()
        for task in list(self.tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def refuse(self, callers: Callers = everybody) -> int:
        """Resets connections, those that stand and those that come until `open`. Returns how many stood."""
        self._state, self._callers = State.REFUSING, callers
        return self.cut(callers)

    def cut(self, callers: Callers = everybody) -> int:
        """Resets the connections that stand; new ones are welcome. Returns how many there were."""
        found = [relay for relay in self.relays if callers(relay.caller_port)]
        for relay in found:
            relay.reset()
        return len(found)

    def stall(self, callers: Callers = everybody) -> int:
        """Lets nothing pass until `open`. Returns how many connections stood."""
        self._state, self._callers = State.STALLED, callers
        found = [relay for relay in self.relays if callers(relay.caller_port)]
        for relay in found:
            relay.stall(True)
        return len(found)

    def open(self) -> None:
        """As if nothing had been."""
        self._state, self._callers, self.delay_s = State.OPEN, everybody, 0.0
        for relay in list(self.relays):
            relay.stall(False)

    def take(self, relay: _Relay) -> None:
        """A caller has come."""
        self.relays.add(relay)
        if self._state is State.OPEN or not self._callers(relay.caller_port):
            relay.connect()
        elif self._state is State.REFUSING:
            relay.reset()
        else:
            relay.is_stalled = True


def _reset(transport: asyncio.Transport) -> None:
    """RST instead of FIN: what was not read yet is gone too."""
    with contextlib.suppress(OSError):
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
