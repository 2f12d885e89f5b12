"""A draft worker that asks how far away the target is has its answer without waiting for a step."""

from __future__ import annotations

import asyncio

from protos.outrider.v1 import hints_pb2, hints_pb2_grpc
from tests.served import served_target


def test_a_ping_comes_back_once() -> None:
    async def ask() -> list[int]:
        call = hints_pb2_grpc.HintsStub(target.channel).Exchange()
        found = []
        async with asyncio.timeout(10):
            for ping in (7, 0, 8):
                await call.write(hints_pb2.HintFrame(ping=ping, unsubscribe=["nobody"]))
                if ping:
                    frame = await call.read()
                    assert isinstance(frame, hints_pb2.CommitFrame)
                    found.append(frame.pong)
        call.cancel()
        return found

    with served_target() as target:
        assert target.runner.run(ask()) == [7, 8]
