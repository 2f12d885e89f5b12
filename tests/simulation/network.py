"""Processes, and gRPC between them as the real one behaves where it matters.

A stream keeps its order; streams do not wait for each other. What a process that has died had under way is gone, and
its peers learn of it: at once where its machine still answers for it, by their keepalive where it does not. Between
two hosts that are cut off, everything waits until they are joined again, or fails by keepalive. Messages travel as
bytes, so that nobody shares an object with anybody.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

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
"""Why a stream ended that neither side has ended."""

_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """One life of one process. Whatever it starts belongs to it, and ends with it."""

    def __init__(self, name: str) -> None:
        self.name = name  # and that of its host
        self.address = f"{name}:1"
        self.is_alive = True
        self.methods: dict[str, Method] = {}
        self.calls: dict[Call, None] = {}  # either end
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process, as are all that it starts in turn."""
        before = _CURRENT.set(self)
        try:
            return asyncio.create_task(work)
        finally:
            _CURRENT.reset(before)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda _: self._tasks.pop(task, None))

    def end(self) -> None:
        """No more of it runs. Its `finally` clauses do, but reach nobody."""
        self.is_alive = False
        for task in list(self._tasks):
            task.cancel()


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """The loop's task factory."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    process = _CURRENT.get()
    if process is not None:
        process.adopt(task)
    return task


@dataclass(frozen=True, slots=True)
class Method:
    """What a server offers. `handler` is a servicer's method; streams go both ways for one that `takes_stream`."""

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

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _AbortedError(code, details)


class _Inbox:
    """Messages that have come and are not read yet, then how it ended."""

    def __init__(self) -> None:
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
        return kind.FromString(self._messages.popleft())

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Call:
    """One RPC, as grpc.aio shows it to the client: `read`, `write`, `cancel`, or a loop over what comes."""

    def __init__(
        self, network: Network, client: Process, address: str, method: str, timeout_s: float | None
    ) -> None:
        self._network = network
        self._method_name = method
        self.client, self.host = client, address.partition(":")[0]
        self.server: Process | None = None
        self._to_client, self._to_server = _Inbox(), _Inbox()
        self._handling: asyncio.Task[Any] | None = None
        self._last_arrival = {True: 0.0, False: 0.0}  # towards the server, towards the client
        self.is_over = False
        client.calls[self] = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = network.loop.call_later(timeout_s, self._time_out)

    # The client's side.

    def open(self, request: Message | None, response_type: type[Message]) -> None:
        self._response_type = response_type
        payload = None if request is None else request.SerializeToString()
        self._send(to_server=True, deliver=lambda: self._arrive(payload))
        self._network.loop.call_later(KEEPALIVE_S, self._give_up_connecting)

    async def read(self) -> Any:
        return await self._to_client.get(self._response_type)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    async def write(self, message: Message) -> None:
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
            self._finish(lambda: _raise(grpc.StatusCode.UNAVAILABLE, details), drops=True)
        elif survivor is self.server:
            self._stop_handling()

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
                self.lose(self.client, REFUSED)
            return
        method = server.methods[self._method_name]
        self.server = server
        server.calls[self] = None
        self._handling = server.start(self._handle(server, method, payload))

    async def _handle(self, server: Process, method: Method, payload: bytes | None) -> None:
        request = (
            self._requests(method) if method.takes_stream else method.request_type.FromString(payload or b"")
        )
        until_s = None if self._timer is None else self._timer.when()
        context = _ServerContext(until_s, self._network.loop.time)
        end: Callable[[], Any] = lambda: EOF  # noqa: E731
        try:
            if method.is_unary:
                self._send_message(await method.handler(request, context))
            else:
                async with aclosing(method.handler(request, context)) as messages:
                    async for message in messages:
                        self._send_message(message)
        except _AbortedError as error:
            code, details = error.code, error.details
            end = lambda: _raise(code, details)  # noqa: E731
        except Exception as error:
            self._network.on_bug(f"{self._method_name} of {server.name} raised {error!r}", error)
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

    def _send_message(self, message: Message) -> None:
        payload = message.SerializeToString()
        self._send(to_server=False, deliver=lambda: self._to_client.put(payload))

    def _send(self, *, to_server: bool, deliver: Callable[[], None]) -> None:
        sender = self.client if to_server else self.server
        if sender is not None and sender.is_alive:
            at_s = self._network.arrival_s(self._last_arrival[to_server])
            self._last_arrival[to_server] = at_s
            self._network.loop.call_at(at_s, self._network.come_in, _Held(self, to_server, deliver))


def _raise(code: grpc.StatusCode, details: str) -> Any:
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


def _raise_cancelled() -> Any:
    raise asyncio.CancelledError


class Question:
    """What is asked of a server that does not speak gRPC: one answer, at some time, or none."""

    def __init__(self, network: Network, client: Process, host: str, work: Work, timeout_s: float) -> None:
        self._network = network
        self.client, self.host = client, host
        self.server: Process | None = None
        self._work = work
        self._answer: asyncio.Future[Any] = network.loop.create_future()
        self._timer = network.loop.call_later(timeout_s, self.lose, client, "timeout")
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
            self.lose(self.client, REFUSED)
        else:
            self._work(self.server, self._reply)

    def _reply(self, answer: Any) -> None:
        self._send(to_server=False, deliver=lambda: self._take(answer))

    def _take(self, answer: Any) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def _send(self, *, to_server: bool, deliver: Callable[[], object]) -> None:
        sender = self.client if to_server else self.server
        if sender is not None and sender.is_alive:
            held = _Held(self, to_server, deliver)
            self._network.loop.call_at(self._network.arrival_s(0.0), self._network.come_in, held)


Work = Callable[[Any, Callable[[Any], None]], None]
"""What a server does about a question: told itself and how to reply, once."""


@dataclass(frozen=True, slots=True)
class _Held:
    call: Call | Question
    to_server: bool
    deliver: Callable[[], object]


_EVERYBODY: Final = "*"


@dataclass
class Network:
    """Hosts, named after the one process that each of them runs."""

    loop: asyncio.AbstractEventLoop
    chance: random.Random
    on_bug: Callable[[str, BaseException], None]
    slow_share: float = 0.02  # of messages that take up to `slow_s`
    slow_s: float = 0.3
    processes: dict[str, Process] = field(default_factory=dict)
    lost_hosts: set[str] = field(default_factory=set)  # machines that are gone and refuse nothing
    _cuts: set[tuple[str, str]] = field(default_factory=set)
    _held: list[_Held] = field(default_factory=list)  # by cuts, in the order in which it came
    num_messages: int = 0

    def arrival_s(self, not_before_s: float) -> float:
        """When what is sent now arrives, behind what the stream has sent before."""
        self.num_messages += 1
        delay_s = self.chance.uniform(0.0001, 0.002)
        if self.chance.random() < self.slow_share:
            delay_s = self.chance.uniform(0.0, self.slow_s)
        return max(self.loop.time() + delay_s, not_before_s + 1e-6)  # asyncio mixes up what is due at once

    def come_in(self, held: _Held) -> None:
        """Something arrives, unless its way is cut."""
        call = held.call
        if not self._cuts.isdisjoint(_pairs(call.client.name, call.host)):
            self._held.append(held)
            return
        receiver = call.server if held.to_server else call.client
        if receiver is None or receiver.is_alive:  # none: this is what opens the call
            held.deliver()

    # Calls.

    def stream(self, client: Process, address: str, method: str, request: Message | None,
               response_type: type[Message], timeout_s: float | None = None) -> Call:  # fmt: skip
        call = Call(self, client, address, method, timeout_s)
        call.open(request, response_type)
        return call

    async def unary(self, client: Process, address: str, method: str, request: Message,
                    response_type: type[Message], timeout_s: float) -> Any:  # fmt: skip
        call = self.stream(client, address, method, request, response_type, timeout_s)
        try:
            return await call.read()
        finally:
            call.cancel()

    @asynccontextmanager
    async def dial(
        self, client: Process, address: str, method: str, response_type: type[Message]
    ) -> AsyncIterator[Call]:
        """A call that is open as long as the context."""
        call = self.stream(client, address, method, None, response_type)
        try:
            yield call
        finally:
            call.cancel()

    async def ask(self, client: Process, host: str, work: Work, timeout_s: float) -> Any:
        """Raises ConnectionError."""
        return await Question(self, client, host, work, timeout_s).answer()

    # Faults.

    def start(self, process: Process) -> None:
        """It listens from now on, in the place of an earlier one of its name."""
        self.processes[process.name] = process
        self.lost_hosts.discard(process.name)

    def end(self, process: Process, *, is_machine_lost: bool = False) -> None:
        """A process is killed, or vanishes with its machine."""
        calls = list(process.calls)
        process.end()
        if self.processes.get(process.name) is process:
            del self.processes[process.name]
            if is_machine_lost:
                self.lost_hosts.add(process.name)
        for call in calls:
            survivor = call.server if call.client is process else call.client
            if survivor is not None and survivor is not process:
                delay_s = KEEPALIVE_S if is_machine_lost else self.chance.uniform(0.0001, 0.01)
                self.loop.call_later(delay_s, call.lose, survivor, GONE)

    def cut(self, one: str, other: str = _EVERYBODY) -> None:
        """From now on nothing gets through between two hosts, or to and from one; nobody is told."""
        pair = _pair(one, other)
        if pair not in self._cuts:
            self._cuts.add(pair)
            self.loop.call_later(KEEPALIVE_S, self._expire, pair)

    def join(self, one: str, other: str = _EVERYBODY) -> None:
        """What was on its way arrives now, unless its stream has ended meanwhile or another cut holds it."""
        self._cuts.discard(_pair(one, other))
        held_before, self._held = self._held, []
        for held in held_before:
            self.come_in(held)

    def reset(self, one: str, other: str = _EVERYBODY, details: str = RESET) -> None:
        """Every stream between two hosts breaks."""
        found: dict[Call, None] = {}
        for process in self.processes.values():
            for call in process.calls:
                if _pair(one, other) in _pairs(call.client.name, call.host):
                    found[call] = None
        for call in found:
            for end in (call.client, call.server):
                if end is not None:
                    call.lose(end, details)

    def _expire(self, pair: tuple[str, str]) -> None:
        if pair in self._cuts:
            held_before, self._held = self._held, []
            for held in held_before:
                if pair in _pairs(held.call.client.name, held.call.host):
                    held.call.lose(held.call.client, SILENT)
                else:
                    self._held.append(held)
            self.reset(*pair, details=SILENT)
            self.loop.call_later(KEEPALIVE_S, self._expire, pair)


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _pairs(one: str, other: str) -> tuple[tuple[str, str], ...]:
    return _pair(one, other), _pair(one, _EVERYBODY), _pair(other, _EVERYBODY)
