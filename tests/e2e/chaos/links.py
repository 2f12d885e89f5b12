"""A network that can be broken: a TCP relay at a fixed address, whose connections are cut, stalled or delayed at will.

    Link(where the server is) ── start() ──► address to dial

A stalled connection is what a lost network looks like from both ends: it stands, nothing arrives, not even its end,
and new ones are taken by nobody. When the link opens again what was under way arrives, late and in order, as TCP's own
retransmissions would bring it. One direction may be stalled alone: the server hears its callers and is not heard, or
the other way round. A fault may concern some callers only; they are told apart by the port they call from.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum, Flag, auto
from typing import cast

Callers = Callable[[int], bool]
"""Whether a connection from this port is meant."""


class State(Enum):
    OPEN = "open"
    REFUSING = "refusing"  # what stands is reset, what comes is reset
    STALLED = "stalled"  # nothing passes


class Direction(Flag):
    """Which way data goes."""

    TO_SERVER = auto()
    TO_CALLER = auto()
    BOTH = TO_SERVER | TO_CALLER


def everybody(port: int) -> bool:
    return True


class _End(asyncio.Protocol):
    """One of a relayed connection's two ends. What it receives goes to its peer, late where the link says so."""

    def __init__(self, relay: _Relay, sends: Direction) -> None:
        """`sends` is which way that goes."""
        self.sends = sends
        self.transport: asyncio.Transport | None = None
        self.peer: _End
        self.is_stalled = False  # what it receives does not go on
        self.is_lost = False  # nothing comes from it any more
        self._relay = relay
        self._is_peer_full = False
        self._under_way: deque[tuple[float, bytes]] = deque()  # (when due on the loop's clock, what)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._relay.set_up(self)

    def data_received(self, data: bytes) -> None:
        # Before Python 3.11.4 an end that begins is read though its reading was paused: its peer may not stand yet.
        if self._relay.delay_s > 0 or self._under_way or self.is_stalled or self.peer.transport is None:
            self._under_way.append((asyncio.get_running_loop().time() + self._relay.delay_s, data))
            self.deliver()
        else:
            self.peer.write(data)

    def pause_writing(self) -> None:
        self.peer.set_full(True)

    def resume_writing(self) -> None:
        self.peer.set_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if not self.is_stalled:  # else its end is not heard of either
            self._relay.close()

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def set_full(self, is_peer_full: bool) -> None:
        self._is_peer_full = is_peer_full
        self.set_reading()

    def stall(self, is_stalled: bool) -> None:
        self.is_stalled = is_stalled
        self.set_reading()
        if not is_stalled:
            self.deliver()

    def set_reading(self) -> None:
        """Reads exactly when what comes can go on."""
        if self.transport is None or self.transport.is_closing():
            return
        if self.is_stalled or self._is_peer_full or self.peer.transport is None:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def end(self, how: Callable[[asyncio.Transport], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.transport is not None:
            how(self.transport)

    def deliver(self) -> None:
        """Passes on what is due and sees to the rest later. What is behind waits its turn."""
        loop = asyncio.get_running_loop()
        while self._under_way and not self.is_stalled and self.peer.transport is not None:
            due, data = self._under_way[0]
            if (wait_s := due - loop.time()) > 0:
                if self._timer is None:
                    self._timer = loop.call_later(wait_s, self._resume)
                return
            self._under_way.popleft()
            self.peer.write(data)

    def _resume(self) -> None:
        self._timer = None
        self.deliver()


class _Relay:
    """One connection: the caller's end and the server's."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.caller = _End(self, Direction.TO_SERVER)
        self.server = _End(self, Direction.TO_CALLER)
        self.caller.peer, self.server.peer = self.server, self.caller
        self.caller_port = 0
        self._is_connecting = False
        self._is_closed = False

    @property
    def delay_s(self) -> float:
        return self._link.delay_s

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
            for each in (self.caller, self.server):
                each.set_reading()
                each.deliver()

    def stall(self, directions: Direction) -> None:
        """These and no others."""
        for end in (self.caller, self.server):
            end.stall(bool(directions & end.sends))
        if not directions and self.server.transport is None:
            self.connect()
        if any(end.is_lost and not end.is_stalled for end in (self.caller, self.server)):
            self.close()

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
        for end in (self.caller, self.server):
            end.end(how)


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

    def stall(self, callers: Callers = everybody, directions: Direction = Direction.BOTH) -> int:
        """Lets nothing pass in these directions until `open`. Returns how many connections stood. None comes about
        meanwhile: that takes both directions."""
        self._state, self._callers = State.STALLED, callers
        found = [relay for relay in self.relays if callers(relay.caller_port)]
        for relay in found:
            relay.stall(directions)
        return len(found)

    def open(self) -> None:
        """As if nothing had been."""
        self._state, self._callers, self.delay_s = State.OPEN, everybody, 0.0
        for relay in list(self.relays):
            relay.stall(Direction(0))

    def take(self, relay: _Relay) -> None:
        """A caller has come."""
        self.relays.add(relay)
        if self._state is State.OPEN or not self._callers(relay.caller_port):
            relay.connect()
        elif self._state is State.REFUSING:
            relay.reset()
        else:
            relay.stall(Direction.BOTH)


def _reset(transport: asyncio.Transport) -> None:
    """RST instead of FIN: what was not read yet is gone too."""
    with contextlib.suppress(OSError):
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
