"""Registers outrider.v1.Generation with gRPC servers, Serve's and our own, so that no cancellation is lost.

- Admission: the caller is authenticated by its metadata before its message is read, expanded or parsed. A replica does
  so itself, and so does our own server; Serve's proxy asks a replica.
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
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from coordinator.output.client_pace import CUT_AFTER, PaceWatch
from coordinator.settings import CLIENT_STALL_MAX_S
from outrider.errors import OutriderError, SlowReader
from outrider.security.call_admission import Admission, Read, address_of_peer, admitted
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc

Handler = Callable[[Any, Any], AsyncGenerator[bytes]]
UnaryHandler = Callable[[Any, Any], Awaitable[Any]]

MESSAGE_BYTES_MAX: Final = 2 << 20
"""Largest request over gRPC. A prompt of 1 MiB or 262,144 token ids, with everything else that a request may have, is
smaller; reading a message of this size takes 40 ms at most, whatever its content."""
SERVICE: Final = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
AUTHENTICATE: Final = f"/{SERVICE.full_name}/Authenticate"
"""The method of a `Coordinator` by which Serve's proxy asks for a caller; no server offers it to clients."""
CLIENT_ADDRESS_METADATA: Final = "x-client-address"
_END: Final = object()
_ending: Final[set[asyncio.Task[None]]] = set()  # calls cut off whose status is not sent yet


def add_GenerationServicer_to_server(servicer: Any, server: Any) -> None:
    """Registers the service with a server of Serve's, with handlers as the module describes; `servicer` is Serve's
    placeholder."""
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    in_replica, make_handler = is_replica(), server.service_handler_factory

    def handler_of(method: Any) -> Any:
        path = f"/{SERVICE.full_name}/{method.name}"
        if not method.server_streaming:
            return readable(make_handler(service_method=path, streaming_type=gRPCStreamingType.UNARY_UNARY))
        handler = make_handler(service_method=path, streaming_type=gRPCStreamingType.UNARY_STREAM)
        return readable_stream(timed(handler, _pace_of_replica) if in_replica else timed(cancellable(handler), Pace))

    server.add_passthrough_service(SERVICE.full_name)  # else Serve would put handlers of its own in place of these
    handlers = SimpleNamespace(**{method.name: handler_of(method) for method in SERVICE.methods})
    if in_replica:
        add_generation(handlers, server, lambda *call: _coordinator().admission(*call), is_serialized=True)
        return
    ask = make_handler(service_method=AUTHENTICATE, streaming_type=gRPCStreamingType.UNARY_UNARY)
    add_generation(handlers, server, _asking(ask), is_serialized=True)


def _asking(ask: UnaryHandler) -> Admission:
    """The admission of a proxy, which knows no keys: it asks a replica, before the message is read."""

    @asynccontextmanager
    async def admission(context: Any, read: Read) -> AsyncGenerator[Any]:
        question = Question(context.invocation_metadata())
        await ask(generation_pb2.ListModelsRequest(), question)
        if not question.is_answered:
            await context.abort(question.code(), question.details())
        yield await read()

    return admission


def add_generation(servicer: Any, server: Any, admission: Admission, *, is_serialized: bool = False) -> None:
    """Registers the servicer with any server. Its methods get `Unreadable` for bytes that are no request.
    `is_serialized`: they return bytes."""
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, _Registration(server, admission, is_serialized))


def is_replica() -> bool:
    """Whether this is a process of Serve's that has a replica, and not a proxy."""
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


@dataclass(frozen=True, slots=True)
class _Registration:
    """Stands in for a server where methods are registered: gives all of them their admission and `read_or_report`."""

    server: Any
    admission: Admission
    is_serialized: bool

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            methods = handler._method_handlers  # Serve reads this attribute, too
            for name, method in methods.items():
                methods[name] = self._changed(method)
        self.server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, methods: Mapping[str, Any]) -> None:
        self.server.add_registered_method_handlers(
            service_name, {name: self._changed(method) for name, method in methods.items()}
        )

    def _changed(self, method: Any) -> Any:
        method = method._replace(request_deserializer=read_or_report(method.request_deserializer))
        if self.is_serialized:
            method = method._replace(response_serializer=None)
        return admitted(method, self.admission)


class Question:
    """The context of a call to a replica that no client has made; Serve writes its outcome here."""

    def __init__(self, metadata: Sequence[tuple[str, Any]] = ()) -> None:
        self._metadata = metadata
        self._code: Any = None
        self._details = ""

    @property
    def is_answered(self) -> bool:
        """Whether the call has succeeded."""
        return self._code in (None, grpc.StatusCode.OK)

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def set_code(self, code: Any) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def peer(self) -> str:
        return ""

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        return self._metadata

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Serve's id of the request is for nobody."""

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer_identities(self) -> None:
        return None

    def peer_identity_key(self) -> None:
        return None


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


def _coordinator() -> Any:
    from ray import serve

    return serve.get_replica_context().servable_object  # a `Coordinator`, once it serves


def _pace_of_replica() -> Pace:
    pace = _coordinator().pace
    assert isinstance(pace, Pace)
    return pace


def client_address(context: Any) -> str:
    """The address of the client of a call to a replica, whose peer is HAProxy."""
    return str(dict(context.invocation_metadata() or ()).get(CLIENT_ADDRESS_METADATA) or address_of_peer(context))


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
        await context.abort(grpc.StatusCode[error.grpc_code], error.told)


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
