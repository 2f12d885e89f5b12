"""The HTTP server of a process without Ray: uvicorn, with the bounds that HAProxy has in front of Ray Serve.

A connection may neither keep its request's head back nor be idle for long; heads and connections have a largest number
of bytes, and there are only so many connections. `/-/healthz` answers as Ray Serve's does, so that probes and load
balancers need not know which of the two they ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

READINESS_PATH: Final = "/-/healthz"
HEAD_BYTES_MAX: Final = 64 << 10
HEAD_TIME_MAX_S: Final = 10.0
IDLE_MAX_S: Final = 75
"""Longest time between two requests of a connection."""
CONNECTIONS_MAX: Final = 4096
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
            http=Connection,
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
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
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


class Connection(HttpToolsProtocol):
    """A connection to a client, with limits on the heads of its requests."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_in_head = True  # of a request, or before it
        self._num_head_bytes = 0
        self._head_timer: TimerHandle | None = None
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        if self._num_head_bytes > HEAD_BYTES_MAX:
            self._refuse(431, "the request's head is too large")
        elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # an empty line ends uvicorn's own wait for the next request

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._forget_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser did not understand, in the words of the API."""
        self._refuse(400, _NOT_HTTP)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(
            HEAD_TIME_MAX_S, self._refuse, 408, "the request has not come in time", "request_timeout"
        )

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        self._forget_timer()
        if self.transport.is_closing():
            return
        error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
