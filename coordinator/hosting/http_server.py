"""The HTTP server of a process without Ray: uvicorn, with the bounds that HAProxy has in front of Ray Serve.

A connection may neither keep its request's head back nor be idle for long, nor send the rest of a body whose answer it
has for long; heads have a largest number of bytes. There are only so many connections: whoever comes then takes the
place of the oldest that has not sent a request, or else of the one that has been idle for longest, so that a probe is
answered however many others say nothing. Connections with a request are bounded by what the application takes in, which
does not count requests that wait on their connection for the answer before: of them a connection has few.
`/-/healthz` answers as Ray Serve's does, so that probes and load balancers need not know which of the two they ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from outrider.addresses import bound_socket

READINESS_PATH: Final = "/-/healthz"
HEAD_BYTES_MAX: Final = 64 << 10
HEAD_TIME_MAX_S: Final = 10.0
IDLE_MAX_S: Final = 75
"""Longest time between two requests of a connection."""
CONNECTIONS_MAX: Final = 4096
"""Fewer where the system permits the process too few descriptors."""
_DESCRIPTORS_ASIDE: Final = 512  # for workers, Redis, gRPC, files
_DESCRIPTORS_WANTED: Final = 4 * CONNECTIONS_MAX
PIPELINED_MAX: Final = 8
"""Requests of a connection that may wait for the answer before. Some hundred bytes become kilobytes of each."""
_BACKLOG: Final = 2048
_LOOK_EVERY_S: Final = 0.02
_CUT_MAX_S: Final = 2.0
_NOT_HTTP: Final = "the request is not HTTP as it may be sent: its first line, a header, its length or its chunks"


class HttpServer:
    """Serves an ASGI application at one port."""

    def __init__(self, app: ASGIApp, host: str, port: int, is_leaving: Callable[[], bool]) -> None:
        """`is_leaving`: whether load balancers should send no more requests here."""
        # Of what clients do; the application logs its own errors.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            _with_readiness(app, is_leaving),
            http=cast(Any, partial(Connection, idle=IdleConnections())),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_MAX_S,
            backlog=_BACKLOG,
        )
        self._server = _Server(config)
        self._address = (host, port)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens; returns the port, which the system chooses for 0. Raises OSError."""
        host, port = self._address
        listener = bound_socket(host, port)
        listener.listen(_BACKLOG)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="HTTP server")
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(_LOOK_EVERY_S)  # it is asked, it does not tell
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Listens no more, closes idle connections, and returns when the others have had their answers."""
        assert self._serving is not None
        self._server.should_exit = True
        await asyncio.shield(self._serving)

    async def cut(self) -> None:
        """Ends what `stop` still waits for."""
        self._server.force_exit = self._server.should_exit = True
        state = self._server.server_state
        for connection in list(state.connections):
            cast(Connection, connection).transport.abort()
        tasks = set(state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CUT_MAX_S)


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leaves signals to the process."""
        return contextlib.nullcontext()


def _with_readiness(app: ASGIApp, is_leaving: Callable[[], bool]) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == READINESS_PATH:
            told = PlainTextResponse("DRAINING", 503) if is_leaving() else PlainTextResponse("success")
            await told(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


class IdleConnections:
    """The connections of a server that have no request under way, the oldest first."""

    def __init__(self) -> None:
        self._silent: dict[Connection, None] = {}  # have never sent one
        self._used: dict[Connection, None] = {}

    def add(self, connection: Connection, *, is_new: bool = False) -> None:
        """Adds a connection that was made, or whose answer is complete."""
        (self._silent if is_new else self._used)[connection] = None

    def remove(self, connection: Connection) -> None:
        """Removes a connection that has a request, or is lost."""
        self._silent.pop(connection, None)
        self._used.pop(connection, None)

    def take_oldest(self) -> Connection | None:
        """Removes the connection that is missed least; None if all have requests."""
        oldest = next(iter(self._silent or self._used), None)
        if oldest is not None:
            self.remove(oldest)
        return oldest


def connections_max() -> int:
    """The most connections that this process may have: half of its descriptors are for them if those are few."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return min(CONNECTIONS_MAX, max(descriptors // 2, descriptors - _DESCRIPTORS_ASIDE))


def raise_descriptor_limit() -> None:
    """Lets this process have the descriptors that it may need, as far as it may: shells and systemd permit 1024 until a
    program asks for more."""
    most, permitted = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_WANTED
    if permitted != resource.RLIM_INFINITY:
        wanted = min(wanted, permitted)
    if most != resource.RLIM_INFINITY and most < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, permitted))


class _TooManyRequests(Exception):
    """Ends the work of a connection's parser."""


class Connection(HttpToolsProtocol):
    """A connection to a client, with limits on the heads of its requests."""

    def __init__(self, *arguments: Any, idle: IdleConnections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._idle = idle

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_in_head = True  # of a request, or before it
        self._num_head_bytes = 0
        self._timer: TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        oldest = self._idle.take_oldest() if len(self.connections) > connections_max() else self
        if oldest is None:
            transport.abort()
            return
        if oldest is not self:
            oldest.transport.abort()
        self._idle.add(self, is_new=True)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._idle.remove(self)
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            # uvicorn tells the last request alone, which may wait behind this one.
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        if self._num_head_bytes > HEAD_BYTES_MAX:
            self._refuse(431, "the request's head is too large")
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # an empty line ends uvicorn's own wait for the next request

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._forget_timer()
        self._idle.remove(self)
        super().on_headers_complete()
        if len(self.pipeline) > PIPELINED_MAX:
            self.transport.abort()
            raise _TooManyRequests  # else the parser goes on with all that has come
        if self.pipeline:
            self.flow.resume_reading()  # else a client that leaves would not be noticed

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0
        self._forget_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return  # it ends, or has the next request already
        self._idle.add(self)
        if not self._is_in_head:  # a request that was answered before all of its body had come
            self._timer = self.loop.call_later(HEAD_TIME_MAX_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser did not understand, in the words of the API."""
        self._refuse(400, _NOT_HTTP)

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(
            HEAD_TIME_MAX_S, self._refuse, 408, "the request has not come in time", "request_timeout"
        )

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        self._forget_timer()
        if self.transport.is_closing():
            return
        error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
