"""Admits calls over gRPC before their messages are read: by a check, or by a bound where no credential is needed.

grpc.aio reads the message of a unary request before any code of ours runs. Here every method is served as if its
requests were a stream, so that an `Admission` runs first. Until a message is asked for, gRPC keeps at most
UNREAD_BYTES_MAX of a call, and a message that was not asked for is never parsed. `READING_OPTIONS` belong to it: they
keep gRPC from raising that bound, and from expanding what callers send.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from inspect import isasyncgenfunction
from typing import Any, Final, cast

import grpc
import grpc.aio

from outrider.errors import BodyTooSlow, InvalidRequest, OutriderError, Overloaded

UNCOMPRESSED: Final = ("grpc.compression_enabled_algorithms_bitset", 1)
"""For servers and channels: a message with another encoding than identity is refused by its head. A megabyte could
expand to a thousand."""
READING_OPTIONS: Final = (
    UNCOMPRESSED,
    # With it gRPC takes megabytes of each call on a fast network, whether or not somebody reads them.
    ("grpc.http2.bdp_probe", 0),
)
"""For every server."""
UNREAD_BYTES_MAX: Final = 64 << 10
READ_MAX_S: Final = 60.0
"""Longest wait for a message after its head; HTTP has the same bound for a body."""
OPEN_CALLS_MAX: Final = 256
"""Calls at once, of a server, that need no credential: checks and watches of its health."""
OPEN_READS_MAX: Final = 16
"""Those of them whose messages are being read. An honest one takes milliseconds; others may be as large as any."""
MADE_ROOM_S: Final = 5.0
"""How long a call that makes room stays open, as far as there are no more of these than of the others: clients of gRPC
call again at once, and would end one another without a pause where they are too many."""

Read = Callable[[], Coroutine[Any, Any, Any]]
Admission = Callable[[Any, Read], AbstractAsyncContextManager[Any]]
"""A context that lasts as long as the call, from the call's own context and what reads its request. It yields the
request. An OutriderError from it ends the call, with nothing read if `read` was not called."""


def admitted(handler: Any, admission: Admission) -> Any:
    """Returns a handler of the same method that enters `admission` before it reads a message.

    Failures that are an OutriderError get its status, wherever they come from."""
    kinds = ("stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming))
    inner = getattr(handler, "_".join(kinds))

    async def serve(requests: Any, context: Any) -> None:
        async def read() -> Any:
            return requests if handler.request_streaming else await _message_of(context)

        try:
            async with admission(context, read) as request:
                await _answer(inner, request, context, is_stream=handler.response_streaming)
        except OutriderError as error:
            await context.abort(grpc.StatusCode[error.grpc_code], error.told)

    return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)


async def _message_of(context: Any) -> Any:
    """Reads the only message of a call. Raises BodyTooSlow if it is late, and InvalidRequest if there is none."""
    try:
        async with asyncio.timeout(READ_MAX_S):
            message = await context.read()
    except TimeoutError:
        raise BodyTooSlow(f"the message did not arrive within {READ_MAX_S:g} s") from None
    if message is cast(Any, grpc.aio).EOF:
        raise InvalidRequest(None, "the call has no message")
    return message


async def _answer(inner: Any, request: Any, context: Any, *, is_stream: bool) -> None:
    if isasyncgenfunction(inner):
        async with aclosing(inner(request, context)) as messages:
            async for message in messages:
                await context.write(message)
        return
    answer = await inner(request, context)
    if not is_stream and context.code() in (None, grpc.StatusCode.OK):  # else the status is all there is to send
        await context.write(answer)


class OpenCalls:
    """The calls of one server that need no credential. So that nobody can shut out the others, one call too many ends
    the oldest one of the address that has most."""

    def __init__(self, address_of: Callable[[Any], str] | None = None) -> None:
        """`address_of` finds a caller's address in a call's context; by default, the peer's."""
        self._reads, self._calls = (
            _NewestCalls(num_max, address_of or address_of_peer) for num_max in (OPEN_READS_MAX, OPEN_CALLS_MAX)
        )

    @asynccontextmanager
    async def admission(self, context: Any, read: Read) -> AsyncGenerator[Any]:
        """The `Admission` of such calls."""
        # First: a call that is ended in the middle of its first message has lost count of whether it sent this, and
        # could not send its status.
        await context.send_initial_metadata(())
        async with self._calls.entered(context):
            async with self._reads.entered(context):
                request = await read()
            yield request


def address_of_peer(context: Any) -> str:
    """The address of the other end of a call's connection, without its port."""
    return str(context.peer()).rpartition(":")[0]


class OpenCallLimit(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Applies `OpenCalls` to some methods of a server."""

    def __init__(self, methods: Collection[str]) -> None:
        """`methods` as /package.Service/Method."""
        self._methods, self._calls = methods, OpenCalls()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in self._methods:
            return cast(Any, handler)
        return cast(Any, admitted(handler, self._calls.admission))


class _NewestCalls:
    def __init__(self, num_max: int, address_of: Callable[[Any], str]) -> None:
        self._num_max, self._address_of = num_max, address_of
        self._tasks: dict[str, dict[asyncio.Task[Any], None]] = {}  # by address; the oldest first
        self._ended: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def entered(self, context: Any) -> AsyncGenerator[None]:
        """Counts a call inside the block. Raises Overloaded when it has to make room."""
        task, address = asyncio.current_task(), self._address_of(context)
        assert task is not None
        self._tasks.setdefault(address, {})[task] = None
        if sum(map(len, self._tasks.values())) > self._num_max:
            self._end_oldest()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended or task.uncancel() > 0:  # cancelled by others
                raise
            if len(self._ended) <= self._num_max:
                await asyncio.sleep(MADE_ROOM_S)
            raise Overloaded(f"more than {self._num_max} calls without a key; this one made room, call again") from None
        finally:
            self._ended.discard(task)
            self._forget(address, task)

    def _end_oldest(self) -> None:
        address = max(self._tasks, key=lambda each: len(self._tasks[each]))
        task = next(iter(self._tasks[address]))
        self._forget(address, task)
        self._ended.add(task)
        task.cancel()

    def _forget(self, address: str, task: asyncio.Task[Any]) -> None:
        tasks = self._tasks.get(address, {})
        tasks.pop(task, None)
        if not tasks:
            self._tasks.pop(address, None)
