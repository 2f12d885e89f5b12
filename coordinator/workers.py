"""Connections to workers: one channel per address for as long as the replica lives, and typed calls on them.

Channels and the loop that made them belong together, so there is one `WorkerChannels` per replica. A refused
connection fails a call at once (no `wait_for_ready`): picking another worker is faster than waiting for this
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, cast

import grpc
import grpc.aio

from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

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
)

GenerateCall = grpc.aio.UnaryStreamCall[target_pb2.GenerateRequest, target_pb2.GenerateEvent]
AttachCall = grpc.aio.UnaryStreamCall[draft_pb2.AttachRequest, draft_pb2.AttachStatus]


class WorkerChannels:
    """Calls to workers by their address, host:port. Plaintext for now."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def generate(self, address: str, request: target_pb2.GenerateRequest, timeout_s: float) -> GenerateCall:
        """Opens Target.Generate; nothing is sent until the event loop runs."""
        stub = target_pb2_grpc.TargetStub(self._channel(address))
        return cast(GenerateCall, stub.Generate(request, timeout=timeout_s))

    async def set_speculation(
        self, address: str, request: target_pb2.SetSpeculationRequest, timeout_s: float
    ) -> None:
        """Calls Target.SetSpeculation. Raises grpc.aio.AioRpcError."""
        stub = target_pb2_grpc.TargetStub(self._channel(address))
        await stub.SetSpeculation(request, timeout=timeout_s)

    def attach(self, address: str, request: draft_pb2.AttachRequest, timeout_s: float) -> AttachCall:
        """Opens Draft.Attach; cancelling the call detaches."""
        stub = draft_pb2_grpc.DraftStub(self._channel(address))
        return cast(AttachCall, stub.Attach(request, timeout=timeout_s))

    async def forget_all_but(self, addresses: Collection[str]) -> None:
        """Closes idle channels to workers that are gone, so that a long life does not collect them."""
        gone = [address for address in self._channels if address not in addresses]
        await asyncio.gather(*(self._channels.pop(address).close(grace=60.0) for address in gone))

    async def close(self) -> None:
        """Closes every channel; calls in flight end as cancelled."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close(grace=None) for channel in channels))

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return channel


def is_refusal(error: grpc.aio.AioRpcError) -> bool:
    """Whether the worker declined before any work because it is full."""
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def describe(error: grpc.aio.AioRpcError) -> str:
    """Code and details in one line."""
    return f"{error.code().name}: {error.details()}"
