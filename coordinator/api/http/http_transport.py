"""HTTP transport: bodies of bounded size, event streams, request ids, API keys and disconnecting clients."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from coordinator.access.api_keys import Caller, Scope
from coordinator.api.http.client_connection import ClientConnection
from coordinator.api.http.web_pages import WebPages
from coordinator.intake.generation_request import REQUEST_ID_CHARS_MAX
from coordinator.intake.request_limit import Arriving, RequestLimit
from coordinator.intake.worker_threads import WorkerThreads
from outrider.concurrency.background import until_ended
from outrider.errors import BodyTooLong, BodyTooSlow, ClientLeft, InvalidRequest, OutriderError, Overloaded

ResultT = TypeVar("ResultT")

REQUEST_ID_HEADER: Final = "X-Request-Id"
API_KEY_HEADER: Final = "X-Api-Key"
_OPEN_PATHS: Final = frozenset({"/health", "/livez", "/ping", "/version"})
_METRICS_PATH: Final = "/metrics"
_CONNECTION: Final = "outrider.connection"  # in the scope
# A prompt of 1 MiB, 6 MiB with JSON's escapes, and some room.
_BODY_BYTES_MAX: Final = 8 << 20
_BODY_WAIT_MAX_S: Final = 60.0
"""Most time for a whole body: a slow one keeps a connection and memory."""
BODY_GRACE_S: Final = 10.0
"""How long the first bytes of a body may be waited for."""
BODY_PACE_BYTES: Final = 1024
"""Bytes that have to come for each second more."""
SMALL_BODY_BYTES: Final = 16 << 10
"""A body up to this length is parsed on the event loop, a longer one in a thread."""
_LENGTH_DIGITS_MAX: Final = 20
CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status for a client that disconnected."""


class EventStream(Response):
    """A response of server-sent events that closes its generators however the connection ends, to free the workers."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str], source: AsyncGenerator[Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """`source` is the generator that `events` reads; it may have started before `events`."""
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: proxies must not buffer chunks.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
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
    """An application that answers through a `ClientConnection`.

    A stream's body goes directly into it, past a dozen layers that handle only the start of an answer.
    """

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


class RequestContext:
    """Middleware that gives each request an id and a caller, before its body is read.

    The id is the client's or a new one, and is returned in a header. An API key or a token with the scope of the path
    is required; health needs none, but reports little without one. Scopes are decided only here, by the route that will
    have the request, however its path is written. A new route is closed, and so is what no route matches. Websockets
    are refused: nothing here serves one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_echoing: bool,
        routes: Sequence[BaseRoute],
        web_pages: WebPages | None,
        authenticate: Callable[[str | None, Scope], Awaitable[Caller]],
        refuse: Callable[[OutriderError, HTTPConnection], Response],
    ) -> None:
        """`is_echoing`: False if the host of the application returns the id itself, as Serve does. `routes` are the
        application's, also those that it gets later. `web_pages` is None where callers need a credential.
        `authenticate` takes the `Authorization` header, if any, or a key from `X-Api-Key` in its form; `refuse` answers
        the errors."""
        self._app = app
        self._is_echoing = is_echoing
        self._routes = routes
        self._web_pages = web_pages
        self._authenticate = authenticate
        self._refuse = refuse

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app, state, headers = self._app, scope.setdefault("state", {}), Headers(scope=scope)
        state["request_id"] = headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_echoing:
                # An id that is too long is refused, and its beginning returned.
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = state["request_id"][:REQUEST_ID_CHARS_MAX]
            await send(message)

        path = _path_of_route(self._routes, scope)
        state["is_open"] = path in _OPEN_PATHS
        try:
            if self._web_pages is not None:
                self._web_pages.check(headers)
            needed = Scope.METRICS if path == _METRICS_PATH else Scope.GENERATE
            state["caller"] = await self._authenticate(_authorization(headers), needed)
        except OutriderError as error:
            if not state["is_open"]:  # health tells strangers little: a load balancer may ask under any name
                app = self._refuse(error, HTTPConnection(scope))
        await app(scope, receive, send_with_id)


def _path_of_route(routes: Sequence[BaseRoute], scope: AsgiScope) -> str | None:
    """The path, with the names of its parameters, of the route that will have a request; None if none will."""
    partial = None
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return getattr(route, "path", None)
        if match is Match.PARTIAL and partial is None:  # of another method
            partial = getattr(route, "path", None)
    return partial


class LimitedRequests:
    """Middleware that refuses requests beyond a limit before it reads their bodies. Health is always answered.

    It stands inside of `RequestContext`, and tells `read_body` how to count bodies.
    """

    def __init__(
        self, app: ASGIApp, *, limit: RequestLimit, refuse: Callable[[OutriderError, HTTPConnection], Response]
    ) -> None:
        self._app, self._limit, self._refuse = app, limit, refuse

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        app = self._app
        with ExitStack() as stack:
            if scope["type"] == "http" and not scope["state"]["is_open"]:
                state = scope["state"]
                try:
                    state["arriving"] = stack.enter_context(self._limit.entered(state["caller"].tenant))
                except Overloaded as error:
                    app = self._refuse(error, HTTPConnection(scope))
            await app(scope, receive, send)


def _authorization(headers: Headers) -> str | None:
    key = headers.get(API_KEY_HEADER)
    return headers.get("Authorization") or (f"Bearer {key}" if key else None)


def request_id_of(request: Request) -> str:
    """The id of a request: the client's, or a new one."""
    return str(request.state.request_id)


def caller_of(request: Request) -> Caller:
    """The caller of a request that was authenticated."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


async def read_body(request: Request) -> bytes:
    """Reads the whole body. Raises InvalidRequest if it is too long, BodyTooSlow if it is late, Overloaded if too many
    are on their way, and ClientLeft.

    With a `Content-Length` a body that is too long is refused before it is read.
    """
    length = request.headers.get("Content-Length", "")
    # A longer number exceeds the limit anyway, and int() limits its digits.
    if length.isdecimal() and (len(length) > _LENGTH_DIGITS_MAX or int(length) > _BODY_BYTES_MAX):
        raise _too_long()
    arriving: Arriving = request.state.arriving
    raw = bytearray()
    with arriving() as take_bytes:
        try:
            async for part in paced(request.stream(), _BODY_WAIT_MAX_S):
                take_bytes(len(part))
                raw += part
                if len(raw) > _BODY_BYTES_MAX:
                    raise _too_long()
        except ClientDisconnect:
            raise ClientLeft("the client went away while it sent the body") from None
    return bytes(raw)


async def paced(parts: AsyncIterable[bytes], wait_max_s: float) -> AsyncGenerator[bytes]:
    """Passes on the parts of a body. Raises BodyTooSlow if all of it takes longer than `wait_max_s`, or if it comes
    more slowly than `BODY_PACE_BYTES`: whoever holds room for a body has to keep sending.

    Time counts while a part is waited for, and not while one is used.
    """
    clock, reading, num_bytes, waited_s = asyncio.get_running_loop().time, aiter(parts), 0, 0.0
    while True:
        pace_max_s, begin_s = BODY_GRACE_S + num_bytes / BODY_PACE_BYTES, clock()
        try:
            async with asyncio.timeout(min(pace_max_s, wait_max_s) - waited_s):
                part = await anext(reading)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise BodyTooSlow(
                f"the body has to arrive within {wait_max_s:g} s, and after {BODY_GRACE_S:g} s at {BODY_PACE_BYTES} "
                f"bytes a second; {num_bytes} bytes did"
            ) from None
        waited_s += clock() - begin_s
        num_bytes += len(part)
        yield part


def _too_long() -> InvalidRequest:
    return BodyTooLong(None, f"the body is longer than {_BODY_BYTES_MAX} bytes")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Returns the result of `work`; None if the client disconnects first, which cancels the work."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await until_ended(working, leaving)


async def unless_left(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Returns the answer that `work` makes of a body that has been read. A client that disconnects cancels it."""
    return await unless_disconnected(request, work) or Response(status_code=CLIENT_CLOSED_REQUEST)


async def unless_small(threads: WorkerThreads, caller: Caller, raw: bytes, work: Callable[[], ResultT]) -> ResultT:
    """Does `work` on a caller's body here if that is small, else in a thread."""
    return work() if len(raw) <= SMALL_BODY_BYTES else await threads.of(caller.tenant, len(raw)).run(work)


async def first_of(items: AsyncGenerator[ResultT]) -> ResultT:
    """Returns the next item, as a coroutine that a task can run."""
    return await anext(items)


async def _disconnect(receive: Receive) -> None:
    """Waits until the client disconnects. The body has been read, so nothing else can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
