"""Registers outrider.v1.Generation with gRPC servers, Serve's and our own, so that no cancellation is lost.

- Cancellation: Serve's proxy (2.60) notices that a client left only while it waits for the next message. If the client
  leaves while a message is being sent, the replica generates to the end: 7 of 40 times, measured with a client that
  cancels on its first message. Here a separate task waits, and the end of the call, which gRPC always reports, cancels
  that task. A replica behind HAProxy serves gRPC itself; there gRPC cancels the generating task directly.
- Slow clients: gRPC waits without limit for a client that takes nothing. In both places each message has a time limit.
  The call still lasts until the client reads, leaves or loses its connection, since its status is queued behind the
  message being sent.
- Unreadable messages: gRPC answers them as a defect of the server (UNKNOWN, with a trace in the log). Here they are
  refused with their cause as the client's errors.

Serve's function runs inside the proxy or replica process, which finds it by its import path.
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

from coordinator.output.client_pace import CUT_AFTER, PaceWatch
from coordinator.settings import CLIENT_STALL_MAX_S
from outrider.errors import OutriderError, SlowReader
from protos.outrider.v1 import generation_pb2_grpc

Handler = Callable[[Any, Any], AsyncGenerator[bytes]]
UnaryHandler = Callable[[Any, Any], Awaitable[Any]]

MESSAGE_BYTES_MAX: Final = 2 << 20
"""Largest request over gRPC. A prompt of 1 MiB or 262,144 token ids, with everything else that a request may have, is
smaller; reading a message of this size takes 40 ms at most, whatever its content."""
_END: Final = object()
_ending: Final[set[asyncio.Task[None]]] = set()  # calls cut off whose status is not sent yet


def add_GenerationServicer_to_server(servicer: Any, server: Any) -> None:
    """Registers the servicer with a server of Serve's, with handlers as the module describes."""
    is_replica = _is_replica()
    make_handler = server.service_handler_factory

    def make_other_handler(service_method: str, streaming_type: Any) -> Any:
        handler = make_handler(service_method=service_method, streaming_type=streaming_type)
        if streaming_type.name == "UNARY_UNARY":
            return readable(handler)
        if streaming_type.name != "UNARY_STREAM":
            return handler
        return readable_stream(timed(handler, _pace_of_replica) if is_replica else timed(cancellable(handler), Pace))

    server.service_handler_factory = make_other_handler
    try:
        add_generation(servicer, server)
    finally:
        server.service_handler_factory = make_handler


def add_generation(servicer: Any, server: Any) -> None:
    """Registers the servicer with any server. Its methods get `Unreadable` for bytes that are no request."""
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, _ForgivingReader(server))


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
    """Replaces a request whose bytes could not be parsed."""

    cause: str


def read_or_report(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wraps a parser to return `Unreadable` instead of raising DecodeError."""

    def read_request(raw: bytes) -> Any:
        try:
            return read(raw)
        except DecodeError as error:
            return Unreadable(str(error))

    return read_request


class _ForgivingReader:
    """A server that parses the requests of all methods by `read_or_report`."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            methods = handler._method_handlers  # Serve reads this attribute, too
            for name, method in methods.items():
                methods[name] = _reading(method)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, methods: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(
            service_name, {name: _reading(method) for name, method in methods.items()}
        )


def _reading(method: Any) -> Any:
    return method._replace(request_deserializer=read_or_report(method.request_deserializer))


def readable(handler: UnaryHandler) -> UnaryHandler:
    """Wraps a handler to refuse requests that could not be parsed."""

    async def unary_unary(request: Any, context: Any) -> Any:
        if isinstance(request, Unreadable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.cause)
        return await handler(request, context)

    return unary_unary


def readable_stream(handler: Handler) -> Handler:
    """Wraps a streaming handler to refuse requests that could not be parsed."""

    async def unary_stream(request: Any, context: Any) -> AsyncGenerator[bytes]:
        if isinstance(request, Unreadable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.cause)
        async with aclosing(handler(request, context)) as messages:
            async for message in messages:
                yield message

    return unary_stream


@dataclass(frozen=True, slots=True)
class Pace:
    """The longest time that output may wait for its client, and the callback when a client is cut off."""

    stall_max_s: float = CLIENT_STALL_MAX_S
    on_cut: Callable[[], object] = lambda: None


def _pace_of_replica() -> Pace:
    from ray import serve

    pace = serve.get_replica_context().servable_object.pace  # a `Coordinator`, once it serves
    assert isinstance(pace, Pace)
    return pace


def timed(handler: Handler, pace_of_call: Callable[[], Pace]) -> Handler:
    """Wraps a handler to end with the status of `SlowReader` if the client does not take a message in time."""

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
    """Wraps a handler to run in a task of its own that ends with the call."""

    async def unary_stream(request: Any, native_context: Any) -> AsyncGenerator[bytes]:
        context = _LastingContext(native_context)
        # Unbounded: it contains at most one answer, which Serve would buffer otherwise.
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

    The native one must not be used then: Serve asks for the peer while a cancelled request unwinds, and that read of
    freed memory crashed the proxy process (grpcio 1.85, signal 11).
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
