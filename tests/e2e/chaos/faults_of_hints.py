"""Streams of hints, with a draft worker's certificate, that send more than any draft worker has to say."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from typing import Any, Final

import grpc
import grpc.aio

from outrider.hints.hint_wire import MAX_NODES_PER_MESSAGE
from outrider.message_sizes import MAX_MESSAGE_BYTES
from outrider.security.tls import Dialer, Role, TlsFiles
from protos.outrider.v1 import hints_pb2
from tests.e2e.chaos.fault import Fault, WorkerFault
from tests.e2e.chaos.fleet import Worker

_EXCHANGE: Final = "/outrider.v1.Hints/Exchange"
_SHOWN: Final = "draft-0"  # whose certificate is shown
_FLOOD_S: Final = (1.0, 6.0)
_ANSWER_S: Final = 60.0  # of a target that another fault may have stopped
_LARGE: Final = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT})
_BROKEN: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""Statuses that a connection has if another fault breaks it."""


class _BadHints(WorkerFault):
    part = "target"

    async def hit(self, worker: Worker) -> None:
        dialer = Dialer(TlsFiles(self.fleet.certificates.folder(_SHOWN)))
        async with dialer.open(worker.link.address, Role.TARGET, ()) as channel:
            exchange: Any = channel
            await self.send(worker, exchange.stream_stream(_EXCHANGE))

    @abstractmethod
    async def send(self, worker: Worker, exchange: Any) -> None:
        """Sends what it has by calls of the method, raw bytes."""


class HintsFlood(_BadHints):
    """Several streams at once that send trees of the largest size as fast as they are read. Nobody waits for them."""

    name = "hints flood a target"

    async def send(self, worker: Worker, exchange: Any) -> None:
        num_streams, seconds = self.rng.randint(1, 64), self.rng.uniform(*_FLOOD_S)
        self.describe(f"{worker.name}, {num_streams} streams", seconds)
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(self._flood(exchange, until_s) for _ in range(num_streams)))

    async def _flood(self, exchange: Any, until_s: float) -> None:
        tree = hints_pb2.HintNodes(
            channel=1, base_len=1, parent_ids=range(MAX_NODES_PER_MESSAGE), token_ids=range(MAX_NODES_PER_MESSAGE)
        )
        frame = hints_pb2.HintFrame(
            subscribe=[hints_pb2.Subscribe(session_id=f"nobody-{index}", channel=index) for index in range(500)],
            nodes=[tree] * 16,
        ).SerializeToString()
        while time.monotonic() < until_s:
            call = exchange(timeout=max(until_s - time.monotonic(), 0.1))
            try:
                while time.monotonic() < until_s:
                    await call.write(frame)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await asyncio.sleep(0.01)  # it comes again at once
            finally:
                call.cancel()


class HintsTooLarge(_BadHints):
    """A frame of the largest size that is permitted, and one that is a byte larger: that one ends its own stream."""

    name = "hints in the largest frames"

    async def send(self, worker: Worker, exchange: Any) -> None:
        largest = _frame_of(MAX_MESSAGE_BYTES)
        codes = [await self._end_of(exchange, data) for data in (largest, largest + b"\0")]
        self.describe(f"{worker.name}, {', '.join(code.name for code in codes)}")
        # A stream with the largest one is open until its caller leaves.
        permitted = frozenset({grpc.StatusCode.OK}), _LARGE | {grpc.StatusCode.INTERNAL}
        for code, codes_permitted in zip(codes, permitted, strict=True):
            if code not in codes_permitted | _BROKEN:
                self.fleet.surprises.append(f"{self.name}: {worker.name} answered {code.name}")

    async def _end_of(self, exchange: Any, data: bytes) -> grpc.StatusCode:
        call = exchange(timeout=_ANSWER_S)
        try:
            await call.write(data)
            await call.done_writing()
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        code: grpc.StatusCode = await call.code()
        return code


def _frame_of(num_bytes: int) -> bytes:
    """A valid frame of so many bytes: a session id that nobody has."""
    frame = hints_pb2.HintFrame(unsubscribe=["x" * (num_bytes - 16)])
    frame.unsubscribe[0] += "x" * (num_bytes - frame.ByteSize())
    return frame.SerializeToString()


FAULTS_OF_HINTS: Final[tuple[type[Fault], ...]] = (HintsFlood, HintsTooLarge)
