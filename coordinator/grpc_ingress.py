"""Registers outrider.v1.Generation with Serve's gRPC servers so that no cancellation is lost.

Serve's proxy (2.60) notices a client that leaves only while it waits for the next message. One that leaves
while a message is on its way to it, as clients do that have just read what they wanted, goes unnoticed and
the replica generates to the end: measured with a client that cancels on its first message, 7 of 40 times.
Here the waiting happens in a task that does nothing else, and the end of the call, which gRPC always reports,
cancels that task.

A replica behind HAProxy serves gRPC itself: there gRPC cancels the very task that generates, and nothing stands in
between that could lose it.

gRPC itself waits for ever for a client that takes nothing. In both places each message to it has a time limit. Its call
cannot be taken back from here: its status waits behind the one message that was under way, until the client reads, or
leaves, or its connection ends.

And to gRPC a message that cannot be read is a defect of the server's (UNKNOWN, with a trace in the log). Here it is
refused by its cause, as everything is that a client can put right.

Runs inside the proxy or replica process, which finds this function by its import path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from coordinator.client_pace import CUT_AFTER, PaceWatch
from coordinator.settings import CLIENT_STALL_MAX_S
from outrider.errors import OutriderError, SlowReader
from protos.outrider.v1 import generation_pb2_grpc

Handler = Callable[[Any, Any], AsyncGenerator[bytes]]
UnaryHandler = Callable[[Any, Any], Awaitable[Any]]

_END: Final = object()
_ending: Final[set[asyncio.Task[None]]] = (
    set()
)  # calls that were ended and whose clients have not heard of it


def add_GenerationServicer_to_server(servicer: Any, server: Any) -> None:
    """As the generated function of this name, with streaming handlers that pass every cancellation on and do not wait
    for those who do not read."""
    is_replica = _is_replica()
    make_handler = server.service_handler_factory

    def make_other_handler(service_method: str, streaming_type: Any) -> Any:
        handler = make_handler(service_method=service_method, streaming_type=streaming_type)
        if streaming_type.name == "UNARY_UNARY":
            return readable(handler)
        if streaming_type.name != "UNARY_STREAM":
            return handler
        return readable_stream(
            timed(handler, _pace_of_replica) if is_replica else timed(cancellable(handler), Pace)
        )

    server.service_handler_factory = make_other_handler
    try:
        generation_pb2_grpc.add_GenerationServicer_to_server(servicer, _ForgivingReader(server))
    finally:
        server.service_handler_factory = make_handler


def _is_replica() -> bool:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where a request would, had its bytes been one."""

    cause: str


def read_or_tell(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The same, but what cannot be read comes as `Unreadable`."""

    def read_request(raw: bytes) -> Any:
        try:
            return read(raw)
        except DecodeError as error:
            return Unreadable(str(error))

    return read_request


class _ForgivingReader:
    """A server with whose methods requests are read by `read_or_tell`."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            methods = handler._method_handlers  # as Serve does
            for name, method in methods.items():
                methods[name] = _reading(method)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, methods: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(
            service_name, {name: _reading(method) for name, method in methods.items()}
        )


def _reading(method: Any) -> Any:
    return method._replace(request_deserializer=read_or_tell(method.request_deserializer))


def readable(handler: UnaryHandler) -> UnaryHandler:
    """The handler, for requests that could be read; others are refused."""

    async def unary_unary(request: Any, context: Any) -> Any:
        if isinstance(request, Unreadable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.cause)
        return await handler(request, context)

    return unary_unary


def readable_stream(handler: Handler) -> Handler:
    """As `readable`, for an answer that streams."""

    async def unary_stream(request: Any, context: Any) -> AsyncGenerator[bytes]:
        if isinstance(request, Unreadable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.cause)
        async with aclosing(handler(request, context)) as messages:
            async for message in messages:
                yield message

    return unary_stream


@dataclass(frozen=True, slots=True)
class Pace:
    """How long output may wait for its client, and who is told of one that takes nothing for even longer."""

    stall_max_s: float = CLIENT_STALL_MAX_S
    on_cut: Callable[[], object] = lambda: None


def _pace_of_replica() -> Pace:
    from ray import serve

    pace = serve.get_replica_context().servable_object.pace  # a `Coordinator`, once it serves
    assert isinstance(pace, Pace)
    return pace


def timed(handler: Handler, pace_of_call: Callable[[], Pace]) -> Handler:
    """The handler, ended with the status of `SlowReader` when a message of its waits for too long to be taken."""

    async def unary_stream(request: Any, context: Any) -> AsyncGenerator[bytes]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        pace = pace_of_call()
        since_s: float | None = None

        def cut() -> None:
            pace.on_cut()
            ending = loop.create_task(_abort(context, SlowReader(pace.stall_max_s)))
            _ending.add(ending)
            ending.add_done_callback(_ending.discard)
            task.cancel()  # it is sending

        watch = PaceWatch(lambda: since_s, CUT_AFTER * pace.stall_max_s, cut)
        watch.start()
        try:
            async with aclosing(handler(request, context)) as messages:
                async for message in messages:
                    since_s = loop.time()
                    yield message
                    since_s = None
        finally:
            watch.stop()

    return unary_stream


async def _abort(context: Any, error: OutriderError) -> None:
    with suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):  # the client may be gone
        await context.abort(grpc.StatusCode[error.grpc_code], error.message)


def cancellable(handler: Handler) -> Handler:
    """The handler, run in a task of its own that ends with the call."""

    async def unary_stream(request: Any, native_context: Any) -> AsyncGenerator[bytes]:
        context = _LastingContext(native_context)
        # No bound of its own: it holds at most one answer, which Serve would otherwise hold.
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for message in handler(request, context):
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(_END)

        task = asyncio.create_task(pump())
        native_context.add_done_callback(lambda _: task.cancel())
        try:
            while (message := await messages.get()) is not _END:
                yield message
            await task  # raises what the handler raised
        finally:
            task.cancel()

    return unary_stream


class _LastingContext:
    """A call's context that may be used after the call has ended.

    The native one must not be: Serve asks for the peer once more while a cancelled request unwinds, and that
    read of freed memory ended the proxy process (grpcio 1.85, signal 11).
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()
        self._is_open = True
        context.add_done_callback(self._close)

    def peer(self) -> str:
        """Address of the client."""
        return str(self._peer)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._context, name)
        return lambda *arguments, **named: method(*arguments, **named) if self._is_open else None

    def _close(self, _: Any) -> None:
        self._is_open = False
