"""Connections to workers: one channel per address for as long as the replica lives, and typed calls on them.

Channels and the loop that made them belong together, so there is one `WorkerChannels` per replica. A refused
connection fails a call at once (no `wait_for_ready`): picking another worker is faster than waiting for this
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, cast

import grpc
import grpc.aio

from coordinator.generation_request import UINT32_MAX
from outrider.tls import PLAINTEXT, Dialer, Role
from outrider.tracing import metadata_of
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_MESSAGE_BYTES_MAX: Final = 16 << 20
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    # A peer that vanished without a word is noticed after 40 s. Not more often: servers answer pings that
    # come faster than they allow by closing the connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # What a target sends and nobody reads is bounded: 64 KiB a call, where probing would let megabytes come.
    ("grpc.http2.bdp_probe", 0),
)

_NEVER_SENT: Final = "failed to connect to all addresses", "errors resolving "

GenerateCall = grpc.aio.UnaryStreamCall[target_pb2.GenerateRequest, target_pb2.GenerateEvent]
AttachCall = grpc.aio.UnaryStreamCall[draft_pb2.AttachRequest, draft_pb2.AttachStatus]


class WorkerChannels:
    """Calls to workers by their address, host:port."""

    def __init__(
        self, dialer: Dialer = PLAINTEXT, name_at: Callable[[str, Role], str] = lambda _, role: role.value
    ) -> None:
        """`name_at`: the name that the certificate of a server has to have, by its address."""
        self._dialer = dialer
        self._name_at = name_at
        self._version = dialer.version
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}  # by address and name
        self._unlisted_since_s: dict[str, float] = {}
        self._outdated: list[tuple[float, grpc.aio.Channel]] = []  # since when, seconds

    def generate(
        self, address: str, request: target_pb2.GenerateRequest, timeout_s: float, traceparent: str = ""
    ) -> GenerateCall:
        """Opens Target.Generate; nothing is sent until the event loop runs."""
        stub = target_pb2_grpc.TargetStub(self._channel(address, Role.TARGET))
        return cast(
            GenerateCall, stub.Generate(request, timeout=timeout_s, metadata=metadata_of(traceparent))
        )

    async def set_speculation(
        self, address: str, request: target_pb2.SetSpeculationRequest, timeout_s: float
    ) -> None:
        """Calls Target.SetSpeculation. Raises grpc.aio.AioRpcError."""
        stub = target_pb2_grpc.TargetStub(self._channel(address, Role.TARGET))
        await stub.SetSpeculation(request, timeout=timeout_s)

    async def has_incarnation(self, address: str, incarnation: str, timeout_s: float) -> bool:
        """Whether the same life of a target worker still answers there."""
        stub = target_pb2_grpc.TargetStub(self._channel(address, Role.TARGET))
        try:
            info = await stub.GetInfo(common_pb2.GetInfoRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return info.incarnation == incarnation

    def attach(
        self, address: str, request: draft_pb2.AttachRequest, timeout_s: float, traceparent: str = ""
    ) -> AttachCall:
        """Opens Draft.Attach; cancelling the call detaches."""
        stub = draft_pb2_grpc.DraftStub(self._channel(address, Role.DRAFT))
        return cast(AttachCall, stub.Attach(request, timeout=timeout_s, metadata=metadata_of(traceparent)))

    async def forget_all_but(self, addresses: Collection[str], now_s: float, after_s: float) -> None:
        """Closes channels to workers that have been gone for `after_s`, so that a long life does not collect
        them, and those with certificates that have been replaced since: calls from now on find new ones.

        Not sooner: a worker may be off the list (a restart of Redis, a lease that ran out) while calls to it
        go on.
        """
        if self._dialer.version != self._version:
            self._version = self._dialer.version
            self._outdated += [(now_s, channel) for channel in self._channels.values()]
            self._channels.clear()
        while self._outdated and now_s - self._outdated[0][0] >= after_s:
            await self._outdated.pop(0)[1].close(grace=None)
        for address in {address for address, _ in self._channels} - set(addresses):
            self._unlisted_since_s.setdefault(address, now_s)
        for address, since_s in list(self._unlisted_since_s.items()):
            if address in addresses:
                del self._unlisted_since_s[address]
            elif now_s - since_s >= after_s:
                del self._unlisted_since_s[address]
                for key in [key for key in self._channels if key[0] == address]:
                    await self._channels.pop(key).close(grace=None)

    async def close(self) -> None:
        """Closes every channel; calls in flight end as cancelled."""
        channels = [*self._channels.values(), *(channel for _, channel in self._outdated)]
        self._channels, self._outdated = {}, []
        await asyncio.gather(*(channel.close(grace=None) for channel in channels))

    def _channel(self, address: str, role: Role) -> grpc.aio.Channel:
        name = self._name_at(address, role)
        channel = self._channels.get((address, name))
        if channel is None:
            channel = self._dialer.open(address, role, _CHANNEL_OPTIONS, name)
            self._channels[address, name] = channel
        return channel


def remaining_s(deadline_s: float, now_s: float) -> float:
    """Time left as a call's timeout. One that has passed still makes a call, which fails with the right
    status."""
    return max(deadline_s - now_s, 0.001)


def remaining_ms(deadline_s: float, now_s: float) -> int:
    """Time left as messages carry it, where 0 says nothing."""
    return min(max(int((deadline_s - now_s) * 1e3), 1), UINT32_MAX)


def was_never_sent(error: grpc.aio.AioRpcError) -> bool:
    """Whether there was no connection to send the call on, so that no worker knows of it. gRPC tells that from a
    connection that broke later in words only (gRPC status codes, UNAVAILABLE); words we do not know say no."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(_NEVER_SENT)


def describe(error: grpc.aio.AioRpcError) -> str:
    """Code and details in one line."""
    return f"{error.code().name}: {error.details()}"
