"""What HTTP needs beside the routes: bodies of bounded size, event streams, request ids, clients that leave."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from coordinator.client_connection import ClientConnection
from coordinator.generation_request import REQUEST_ID_CHARS_MAX
from outrider.api_keys import Caller, Scope
from outrider.background import until_ended
from outrider.errors import BodyTooSlow, ClientLeft, InvalidRequest, OutriderError

ResultT = TypeVar("ResultT")

REQUEST_ID_HEADER: Final = "X-Request-Id"
_OPEN_PATHS: Final = frozenset({"/health", "/livez"})
_CONNECTION: Final = "outrider.connection"  # in the scope
# A prompt of 1 MiB in JSON's escapes, and some room.
_BODY_BYTES_MAX: Final = 8 << 20
_BODY_WAIT_MAX_S: Final = 60.0
"""For the whole of a body: one that trickles in keeps a connection and what has come of it."""
SMALL_BODY_BYTES: Final = 16 << 10
"""A body that is shorter is read on the event loop, a longer one by a thread."""


_LENGTH_DIGITS_MAX: Final = 20


class EventStream(Response):
    """Server-sent events. Closes its generator however the connection ends, so that no worker goes on for
    nobody."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], source: AsyncGenerator[Any]) -> None:
        """`source` is what the events are made from: it may have begun when the events have not."""
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: a proxy in between must not collect chunks.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._source = source

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            sending = asyncio.create_task(self._send(send, scope.get(_CONNECTION)))
            leaving = asyncio.create_task(_disconnect(receive))
            try:
                await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await until_ended(sending, leaving)  # Serve cancels more than once

    async def _send(self, send: Send, connection: ClientConnection | None) -> None:
        send_body = send if connection is None else connection.send
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send_body({"type": "http.response.body", "body": event.encode(), "more_body": True})
            if connection is not None and connection.is_cut:
                return
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


class Application(FastAPI):
    """Sends whatever it answers through a `ClientConnection`, and a stream's body straight into it, past a dozen layers
    that look at its start only."""

    def __init__(self, *, stall_max_s: float, on_cut: Callable[[], object], **options: Any) -> None:
        super().__init__(**options)
        self._stall_max_s = stall_max_s
        self._on_cut = on_cut

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        connection = ClientConnection(receive, send, self._stall_max_s, self._on_cut)
        scope[_CONNECTION] = connection
        try:
            await super().__call__(scope, receive, connection.send)
        finally:
            connection.end()


class RequestIds:
    """Gives each request an id, the client's or a new one, and puts it on the response."""

    def __init__(self, app: ASGIApp, *, is_echoing: bool) -> None:
        """`is_echoing`: False where what hosts the application answers with the id itself, as Serve does."""
        self._app = app
        self._is_echoing = is_echoing

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = Headers(scope=scope).get(REQUEST_ID_HEADER) or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_echoing:
                # One that is too long was refused; its beginning still tells the client which one.
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = state["request_id"][:REQUEST_ID_CHARS_MAX]
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeyCheck:
    """Lets in who has a key that is good for the path; health is for everybody, and says little to strangers.

    Before anything of the body is read. What a path needs is decided here alone, so that a new one is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Callable[[str | None, Scope], Caller],
        refuse: Callable[[OutriderError], Response],
    ) -> None:
        """`authenticate` takes the `Authorization` header, if any; what it raises `refuse` answers."""
        self._app = app
        self._authenticate = authenticate
        self._refuse = refuse

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        needed = Scope.METRICS if path == "/metrics" else Scope.GENERATE
        try:
            caller = self._authenticate(Headers(scope=scope).get("Authorization"), needed)
            scope.setdefault("state", {})["caller"] = caller
        except OutriderError as error:
            if path not in _OPEN_PATHS:
                await self._refuse(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def read_body(request: Request) -> bytes:
    """The whole body. Raises InvalidRequest when it is too long, before any of it is read where its length is told;
    BodyTooSlow when it does not come in time, and ClientLeft."""
    length = request.headers.get("Content-Length", "")
    # No number of this many digits is a length that we would take, and int() has a limit of its own.
    if length.isdecimal() and (len(length) > _LENGTH_DIGITS_MAX or int(length) > _BODY_BYTES_MAX):
        raise _too_long()
    raw = bytearray()
    try:
        async with asyncio.timeout(_BODY_WAIT_MAX_S):
            async for part in request.stream():
                raw += part
                if len(raw) > _BODY_BYTES_MAX:
                    raise _too_long()
    except TimeoutError:
        raise BodyTooSlow(
            f"the body has not come within {_BODY_WAIT_MAX_S:g} s: {len(raw)} bytes have"
        ) from None
    except ClientDisconnect:
        raise ClientLeft("the client went away while it sent the body") from None
    return bytes(raw)


def _too_long() -> InvalidRequest:
    return InvalidRequest(None, f"the body is longer than {_BODY_BYTES_MAX} bytes")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """The work's result, or None when the client went away first; then the work is cancelled."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await until_ended(working, leaving)


async def first_of(items: AsyncGenerator[ResultT]) -> ResultT:
    """The next item, as a coroutine that a task can run."""
    return await anext(items)


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has gone. The body has been read, so nothing else can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
