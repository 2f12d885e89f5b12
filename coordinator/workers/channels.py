"""Connections to workers: one channel per address for the life of the replica, and typed calls on it.

Channels belong to the loop that made them, so there is one `WorkerChannels` per replica. A refused connection fails a
call at once (no `wait_for_ready`): picking another worker is faster than waiting for this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import grpc
import grpc.aio

from outrider.observability.tracing import metadata_of
from outrider.sampling_params import UINT32_MAX
from outrider.security.call_admission import UNCOMPRESSED
from outrider.security.tls import PLAINTEXT, Dialer, Role
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_MESSAGE_BYTES_MAX: Final = 16 << 20
_CHANNEL_OPTIONS: Final = (
    UNCOMPRESSED,
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    # A peer that vanished silently is noticed after 40 s. Not sooner: servers close connections whose pings come faster
    # than they allow.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Bounds what a target has sent and nobody has read to 64 KiB a call; probing would raise it to megabytes.
    ("grpc.http2.bdp_probe", 0),
)

_STALLED_MAX_S: Final = 1.0  # without progress of its model, which it reports between two steps
_NEVER_SENT: Final = "failed to connect to all addresses", "errors resolving "

GenerateCall = grpc.aio.UnaryStreamCall[target_pb2.GenerateRequest, target_pb2.GenerateEvent]
CallT = TypeVar("CallT", bound=grpc.aio.RpcContext)
AttachCall = grpc.aio.UnaryStreamCall[draft_pb2.AttachRequest, draft_pb2.AttachStatus]


@dataclass(slots=True, eq=False)
class _Line:
    """A channel and the number of calls on it."""

    channel: grpc.aio.Channel
    num_calls: int = 0
    unwanted_since_s: float | None = None  # when it was replaced, or its worker left the list

    def is_over(self, now_s: float, after_s: float) -> bool:
        """Whether it can be closed: unwanted, and without calls or for long enough."""
        since_s = self.unwanted_since_s
        return since_s is not None and (not self.num_calls or now_s - since_s >= after_s)

    @contextmanager
    def busy(self) -> Iterator[grpc.aio.Channel]:
        """Counts one call that ends with the context."""
        self.num_calls += 1
        try:
            yield self.channel
        finally:
            self.num_calls -= 1

    def carry(self, call: CallT) -> CallT:
        """Counts a call just opened on the channel, until it is done."""
        self.num_calls += 1
        call.add_done_callback(self._end)
        return call

    def _end(self, _: object) -> None:
        self.num_calls -= 1


class WorkerChannels:
    """Calls to workers by address, host:port."""

    def __init__(
        self, dialer: Dialer = PLAINTEXT, name_at: Callable[[str, Role], str] = lambda _, role: role.value
    ) -> None:
        """`name_at`: the name that a server's certificate must have, by its address."""
        self._dialer = dialer
        self._name_at = name_at
        self._version = dialer.version
        self._lines: dict[tuple[str, str], _Line] = {}  # by address and name
        self._outdated: list[_Line] = []

    def generate(
        self, address: str, request: target_pb2.GenerateRequest, timeout_s: float, traceparent: str = ""
    ) -> GenerateCall:
        """Opens Target.Generate; nothing is sent until the event loop runs."""
        line = self._line(address, Role.TARGET)
        stub = target_pb2_grpc.TargetStub(line.channel)
        call = stub.Generate(request, timeout=timeout_s, metadata=metadata_of(traceparent))
        return line.carry(cast(GenerateCall, call))

    async def set_speculation(self, address: str, request: target_pb2.SetSpeculationRequest, timeout_s: float) -> None:
        """Calls Target.SetSpeculation. Raises grpc.aio.AioRpcError."""
        with self._line(address, Role.TARGET).busy() as channel:
            await target_pb2_grpc.TargetStub(channel).SetSpeculation(request, timeout=timeout_s)

    async def has_incarnation(self, address: str, incarnation: str, timeout_s: float) -> bool | None:
        """Whether the same run of a target worker still answers there; None: nothing answered within the time."""
        try:
            info = await self._info(address, timeout_s)
        except grpc.aio.AioRpcError as error:
            return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else False
        return info.incarnation == incarnation

    async def is_serving(self, address: str, incarnation: str, timeout_s: float) -> bool:
        """Whether the same run of a target worker answers there in time, and its model makes progress."""
        try:
            info = await self._info(address, timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return serves(info, incarnation)

    async def _info(self, address: str, timeout_s: float) -> common_pb2.WorkerInfo:
        with self._line(address, Role.TARGET).busy() as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            return cast(common_pb2.WorkerInfo, await stub.GetInfo(common_pb2.GetInfoRequest(), timeout=timeout_s))

    def attach(
        self, address: str, request: draft_pb2.AttachRequest, timeout_s: float, traceparent: str = ""
    ) -> AttachCall:
        """Opens Draft.Attach; cancelling the call detaches."""
        line = self._line(address, Role.DRAFT)
        stub = draft_pb2_grpc.DraftStub(line.channel)
        call = stub.Attach(request, timeout=timeout_s, metadata=metadata_of(traceparent))
        return line.carry(cast(AttachCall, call))

    async def forget_all_but(self, addresses: Collection[str], now_s: float, after_s: float) -> None:
        """Closes unwanted channels once no call uses them: those to unlisted workers, which would otherwise accumulate,
        and those with replaced certificates; new calls get new channels. After `after_s` their calls are ended with
        them.

        Not sooner: a worker may be off the list (Redis restarted, its lease ran out) while calls to it go on.
        """
        for (address, _), line in self._lines.items():
            if address in addresses:
                line.unwanted_since_s = None
            elif line.unwanted_since_s is None:
                line.unwanted_since_s = now_s
        if self._dialer.version != self._version:
            self._version = self._dialer.version
            for line in self._lines.values():
                line.unwanted_since_s = now_s
            self._outdated += self._lines.values()
            self._lines.clear()
        over = [line for line in (*self._lines.values(), *self._outdated) if line.is_over(now_s, after_s)]
        self._lines = {key: line for key, line in self._lines.items() if line not in over}
        self._outdated = [line for line in self._outdated if line not in over]
        for line in over:
            await line.channel.close(grace=None)

    async def close(self) -> None:
        """Closes every channel; calls in flight end as cancelled."""
        lines = [*self._lines.values(), *self._outdated]
        self._lines, self._outdated = {}, []
        await asyncio.gather(*(line.channel.close(grace=None) for line in lines))

    def _line(self, address: str, role: Role) -> _Line:
        name = self._name_at(address, role)
        line = self._lines.get((address, name))
        if line is None:
            line = self._lines[address, name] = _Line(self._dialer.open(address, role, _CHANNEL_OPTIONS, name))
        return line


def serves(info: common_pb2.WorkerInfo, incarnation: str) -> bool:
    """Whether this info is from that run of the worker, and its model makes progress."""
    return info.incarnation == incarnation and info.stalled_ms < _STALLED_MAX_S * 1e3


def remaining_s(deadline_s: float, now_s: float) -> float:
    """Time left as a call's timeout. A call after the deadline is still made, and fails with the right status."""
    return max(deadline_s - now_s, 0.001)


def remaining_ms(deadline_s: float, now_s: float) -> int:
    """Time left as messages carry it; there 0 means none given."""
    return min(max(int((deadline_s - now_s) * 1e3), 1), UINT32_MAX)


def was_never_sent(error: grpc.aio.AioRpcError) -> bool:
    """Whether there was no connection to send the call on, so that no worker knows of it. gRPC distinguishes this from
    a connection that broke later by the message only (gRPC status codes, UNAVAILABLE); an unknown message means no."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(_NEVER_SENT)


def describe(error: grpc.aio.AioRpcError) -> str:
    """Status code and details in one line."""
    return f"{error.code().name}: {error.details()}"
