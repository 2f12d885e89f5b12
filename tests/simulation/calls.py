"""gRPC calls and questions, as the real ones behave where it matters.

A stream keeps its order; streams do not wait for each other. Whoever sends waits while too much of what it has sent
lies unread (HTTP/2 flow control). Messages travel as bytes, so that nobody shares an object with anybody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.simulation.clock import Timer
from tests.simulation.process import NOBODY, Process

if TYPE_CHECKING:
    from tests.simulation.network import Network

EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]

KEEPALIVE_S: Final = 4.0
GONE, REFUSED, RESET, SILENT, UNREACHABLE = LOSSES = (
    *(
        "the peer is gone",
        "failed to connect to all addresses; last error: connection refused",
        "connection reset",
    ),
    *("keepalive", "failed to connect to all addresses; last error: timeout"),
)
"""Reasons why a stream ends that neither side has ended."""


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC method that a server offers. handler: the servicer's method. takes_stream: both directions are streams."""

    handler: Callable[[Any, Any], Any]
    request_type: type[Message]
    response_type: type[Message]
    takes_stream: bool = False
    is_unary: bool = False


class _AbortedError(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details


class _ServerContext:
    def __init__(self, until_s: float | None, now_s: Callable[[], float]) -> None:
        """`until_s`: when the client gives up."""
        self._until_s, self._now_s = until_s, now_s

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else max(self._until_s - self._now_s(), 0.0)

    def peer(self) -> str:
        return "simulated"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _AbortedError(code, details)


class _Inbox:
    """Messages that have come and are not read yet, then how it ended."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._on_read = on_read
        self._messages: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.end: Callable[[], Any] | None = None  # what reading gives from then on

    def put(self, message: bytes) -> None:
        if self.end is None:
            self._messages.append(message)
            self._wake()

    def close(self, end: Callable[[], Any], *, drops: bool = False) -> None:
        if self.end is None:
            self.end = end
            if drops:
                self._messages.clear()
            self._wake()

    async def get(self, kind: type[Message]) -> Any:
        while not self._messages:
            if self.end is not None:
                return self.end()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._on_read()
        return kind.FromString(self._messages.popleft())

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Call:
    """One RPC, as grpc.aio shows it to the client: `read`, `write`, `cancel`, or a loop over what comes."""

    def __init__(self, network: Network, client: Process, address: str, method: str, timeout_s: float | None) -> None:
        self._network = network
        self.method_name = method
        self.client, self.host = client, address.partition(":")[0]
        self.server: Process | None = None
        self._to_client = _Inbox(partial(self._give_room, to_server=False))
        self._to_server = _Inbox(partial(self._give_room, to_server=True))
        self._num_unread = {True: 0, False: 0}  # sent towards the server, towards the client
        self._has_room: dict[bool, asyncio.Future[None]] = {}
        self._handling: asyncio.Task[Any] | None = None
        self._last_arrival = {True: 0.0, False: 0.0}  # towards the server, towards the client
        self.is_over = False
        self.on_loss: Callable[[], None] = lambda: None  # the client reads that its server is gone
        client.calls[self] = None
        self._timer: Timer | None = None
        if timeout_s is not None:
            self._timer = network.loop.call_later(timeout_s, self._time_out, context=client.context)

    # The client's side.

    def open(self, request: Message | None, response_type: type[Message]) -> None:
        self._response_type = response_type
        payload = None if request is None else request.SerializeToString()
        self._send(to_server=True, deliver=lambda: self._arrive(payload))
        self._network.loop.call_later(KEEPALIVE_S, self._give_up_connecting, context=self.client.context)

    async def read(self) -> Any:
        return await self._to_client.get(self._response_type)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    async def write(self, message: Message) -> None:
        await self._until_room(to_server=True)
        if self.is_over:
            raise asyncio.InvalidStateError("the call has ended")
        payload = message.SerializeToString()
        self._send(to_server=True, deliver=lambda: self._to_server.put(payload))

    def cancel(self) -> bool:
        if self.is_over:
            return False
        self._send(to_server=True, deliver=self._stop_handling)
        self._finish(_raise_cancelled, drops=True)
        return True

    # What happens to it.

    def lose(self, survivor: Process, details: str) -> None:
        """One end hears that the other is gone."""
        if survivor is self.client:
            self._finish(partial(self._tell_loss, details), drops=True)
        elif survivor is self.server:
            self._stop_handling()

    def _tell_loss(self, details: str) -> None:
        self.on_loss()
        _raise(grpc.StatusCode.UNAVAILABLE, details)

    def _time_out(self) -> None:
        if not self.is_over:
            self._send(to_server=True, deliver=self._stop_handling)
            self._finish(lambda: _raise(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), drops=True)

    def _finish(self, end: Callable[[], Any], *, drops: bool = False) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self.client.calls.pop(self, None)
        self._to_client.close(end, drops=drops)
        self._grant(to_server=True)

    # The server's side.

    def _give_up_connecting(self) -> None:
        if self.server is None:
            self.lose(self.client, UNREACHABLE)

    def _arrive(self, payload: bytes | None) -> None:
        server = self._network.processes.get(self.host)
        if self.is_over:
            return
        if server is None:  # its machine refuses, or there is none
            if self.host not in self._network.lost_hosts:
                self.client.receive(partial(self.lose, self.client, REFUSED))
            return
        server.receive(partial(self._accept, server, payload))

    def _accept(self, server: Process, payload: bytes | None) -> None:
        if self.is_over or not server.is_alive:
            return
        method = server.methods[self.method_name]
        self.server = server
        server.calls[self] = None
        self._handling = server.start(self._handle(server, method, payload))

    async def _handle(self, server: Process, method: Method, payload: bytes | None) -> None:
        request = self._requests(method) if method.takes_stream else method.request_type.FromString(payload or b"")
        until_s = None if self._timer is None else self._timer.when()
        context = _ServerContext(until_s, self._network.loop.time)
        end: Callable[[], Any] = lambda: EOF  # noqa: E731
        try:
            if method.is_unary:
                await self._send_message(await method.handler(request, context))
            else:
                async with aclosing(method.handler(request, context)) as messages:
                    async for message in messages:
                        await self._send_message(message)
        except _AbortedError as error:
            code, details = error.code, error.details
            end = lambda: _raise(code, details)  # noqa: E731
        except Exception as error:
            self._network.on_bug(f"{self.method_name} of {server.name} raised {error!r}", error)
            end = lambda: _raise(grpc.StatusCode.UNKNOWN, "a bug")  # noqa: E731
        finally:
            server.calls.pop(self, None)
        self._send(to_server=False, deliver=lambda: self._finish(end))

    async def _requests(self, method: Method) -> AsyncIterator[Any]:
        while (message := await self._to_server.get(method.request_type)) is not EOF:
            yield message

    def _stop_handling(self) -> None:
        if self._handling is not None:
            self._handling.cancel()

    async def _send_message(self, message: Message) -> None:
        await self._until_room(to_server=False)
        payload = message.SerializeToString()
        self._send(to_server=False, deliver=lambda: self._to_client.put(payload))

    # Flow control.

    @property
    def waits_for_reader(self) -> object:
        """The future that the server waits for until its client reads; None while it does not wait."""
        return self._has_room.get(False)

    async def _until_room(self, *, to_server: bool) -> None:
        while self._num_unread[to_server] >= self._network.window and not self.is_over:
            self._has_room[to_server] = asyncio.get_running_loop().create_future()
            if not to_server:
                self._network.on_blocked(self)
            await self._has_room[to_server]
        self._num_unread[to_server] += 1

    def _give_room(self, *, to_server: bool) -> None:
        """Counts a message as read, and notifies a sender that waits for room."""
        self._num_unread[to_server] -= 1
        if to_server in self._has_room:
            self._send(to_server=not to_server, deliver=partial(self._grant, to_server=to_server))

    def _grant(self, *, to_server: bool) -> None:
        waiting = self._has_room.pop(to_server, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _send(self, *, to_server: bool, deliver: Callable[[], None]) -> None:
        sender = self.client if to_server else self.server
        if sender is not None and sender.is_alive:
            at_s = self._network.arrival_s(self._last_arrival[to_server])
            self._last_arrival[to_server] = at_s
            held = Held(self, to_server, deliver)
            self._network.loop.call_at(at_s, self._network.come_in, held, context=NOBODY)


def _raise(code: grpc.StatusCode, details: str) -> Any:
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


def _raise_cancelled() -> Any:
    raise asyncio.CancelledError


class Question:
    """A request to a server that does not use gRPC, such as Redis: it gets one reply, at some time, or none."""

    def __init__(self, network: Network, client: Process, host: str, work: Work, timeout_s: float) -> None:
        self._network = network
        self.client, self.host = client, host
        self.server: Process | None = None
        self._work = work
        self._answer: asyncio.Future[Any] = network.loop.create_future()
        self._timer = network.loop.call_later(timeout_s, self.lose, client, "timeout", context=client.context)
        self._send(to_server=True, deliver=self._arrive)

    async def answer(self) -> Any:
        """Raises ConnectionError."""
        try:
            return await self._answer
        finally:
            self._timer.cancel()

    def lose(self, survivor: Process, details: str) -> None:
        if survivor is self.client and not self._answer.done():
            self._answer.set_exception(ConnectionError(details))

    def _arrive(self) -> None:
        self.server = self._network.processes.get(self.host)
        if self.server is None:
            self.client.receive(partial(self.lose, self.client, REFUSED))
        else:
            self.server.receive(partial(self._work, self.server, self._reply))

    def _reply(self, answer: Any) -> None:
        self._send(to_server=False, deliver=lambda: self._take(answer))

    def _take(self, answer: Any) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def _send(self, *, to_server: bool, deliver: Callable[[], object]) -> None:
        sender = self.client if to_server else self.server
        if sender is not None and sender.is_alive:
            held = Held(self, to_server, deliver)
            self._network.loop.call_at(self._network.arrival_s(0.0), self._network.come_in, held, context=NOBODY)


Work = Callable[[Any, Callable[[Any], None]], None]
"""A server's handler of a `Question`: called with the server and a function to call once with the reply."""


@dataclass(frozen=True, slots=True)
class Held:
    """Something on its way."""

    call: Call | Question
    to_server: bool
    deliver: Callable[[], object]
