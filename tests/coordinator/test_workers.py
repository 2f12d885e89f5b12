"""Channels to workers: how long each is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from coordinator.workers.channels import WorkerChannels
from outrider.security.tls import Dialer
from protos.outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

LONG_S = 1000.0


class Target(target_pb2_grpc.TargetServicer):
    """Answers each request with one event, and with its end when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[target_pb2.GenerateEvent]:
        yield target_pb2.GenerateEvent()
        await self.may_end.wait()

    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: Any) -> common_pb2.WorkerInfo:
        return common_pb2.WorkerInfo(incarnation="a")


class Certificates:
    """A fake dialer: `version` is that of its certificates, which tests may change."""

    def __init__(self) -> None:
        self.version = 0
        self.opened: list[grpc.aio.Channel] = []

    def open(self, address: str, *_: object) -> grpc.aio.Channel:
        self.opened.append(grpc.aio.insecure_channel(address))
        return self.opened[-1]

    def still_open(self) -> list[int]:
        """Numbers of the channels that have not been closed, in the order in which they were opened."""
        return [
            number
            for number, channel in enumerate(self.opened)
            if channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
        ]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Target, str, Certificates, WorkerChannels]]:
    target, server, certificates = Target(), grpc.aio.server(), Certificates()
    target_pb2_grpc.add_TargetServicer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = WorkerChannels(cast(Dialer, certificates))
    try:
        yield target, f"127.0.0.1:{port}", certificates, channels
    finally:
        await channels.close()
        await server.stop(None)


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_channel_that_is_not_wanted_any_more_is_closed_with_its_last_call(is_listed: bool) -> None:
    """For other certificates, or because nobody lists the worker."""
    async with served() as (target, address, certificates, channels):
        call = channels.generate(address, target_pb2.GenerateRequest(), LONG_S)
        await anext(aiter(call))
        certificates.version += is_listed
        await channels.forget_all_but([address] * is_listed, 0.0, LONG_S)
        assert certificates.still_open() == [0], "somebody talks on it"
        target.may_end.set()
        assert await call.code() is grpc.StatusCode.OK
        await channels.forget_all_but([address] * is_listed, 1.0, LONG_S)
        assert certificates.still_open() == []
        assert await channels.has_incarnation(address, "a", LONG_S)
        await channels.forget_all_but([address], 2.0, LONG_S)
        assert certificates.still_open() == [1], "calls find a new one, which stays"


async def test_calls_without_an_end_do_not_keep_a_channel_for_ever() -> None:
    async with served() as (_, address, certificates, channels):
        call = channels.generate(address, target_pb2.GenerateRequest(), LONG_S)
        await anext(aiter(call))
        certificates.version += 1
        await channels.forget_all_but([address], 0.0, LONG_S)
        await channels.forget_all_but([address], LONG_S, LONG_S)
        assert certificates.still_open() == []
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await anext(aiter(call))


async def test_a_worker_that_is_listed_again_keeps_its_channel() -> None:
    async with served() as (target, address, certificates, channels):
        call = channels.generate(address, target_pb2.GenerateRequest(), LONG_S)
        await anext(aiter(call))
        await channels.forget_all_but([], 0.0, LONG_S)
        await channels.forget_all_but([address], 1.0, LONG_S)
        target.may_end.set()
        assert await call.code() is grpc.StatusCode.OK
        await channels.forget_all_but([address], 2 * LONG_S, LONG_S)
        assert certificates.still_open() == [0]
