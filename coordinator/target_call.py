"""The target side of one session: the call, its errors and its silence, in our words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import grpc
import grpc.aio

from coordinator.environment import Environment
from coordinator.workers import describe, remaining_s
from outrider.errors import DeadlineExceeded, InvalidRequest, OutriderError, Overloaded, WorkerLost
from outrider.registry import WorkerRecord
from protos.outrider.v1 import target_pb2

_RETRY_AFTER_S: Final = 1.0


class TargetCall:
    """One Target.Generate, open from construction to `cancel`."""

    def __init__(
        self,
        environment: Environment,
        target: WorkerRecord,
        request: target_pb2.GenerateRequest,
        deadline_s: float,
    ) -> None:
        """`deadline_s` is on the environment's clock."""
        self._environment = environment
        self._target = target
        self._call = environment.channels.generate(
            target.address, request, remaining_s(deadline_s, environment.now_s())
        )

    def cancel(self) -> None:
        """Frees the session at the target; does nothing once the call has ended."""
        self._call.cancel()

    async def events(self) -> AsyncGenerator[target_pb2.GenerateEvent]:
        """What the target says, the last word included.

        Raises Overloaded when the target is full, WorkerLost when it fails, ends without a last word or falls
        silent between two steps, DeadlineExceeded, and InvalidRequest when it refuses a value.
        """
        silence_max_s: float | None = None  # until the first token a request may wait for its turn
        try:
            while True:
                async with asyncio.timeout(silence_max_s):
                    event = await self._call.read()
                if not isinstance(event, target_pb2.GenerateEvent):
                    raise WorkerLost(f"target worker {self._target.worker_id} ended without a last word")
                if event.WhichOneof("event") == "step":
                    silence_max_s = self._environment.settings.target_silence_max_s
                yield event
        except TimeoutError as error:
            self._pass_over()
            raise WorkerLost(f"target worker {self._target.worker_id} fell silent") from error
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error

    def _translated(self, error: grpc.aio.AioRpcError) -> OutriderError:
        match error.code():
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return Overloaded(f"every target worker is full ({error.details()})", _RETRY_AFTER_S)
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(None, f"the target worker refused the request: {error.details()}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded("not finished within the request's deadline")
            case _:
                self._pass_over()
                return WorkerLost(f"target worker {self._target.worker_id} failed: {describe(error)}")

    def _pass_over(self) -> None:
        self._environment.router.pass_over(self._target, self._environment.now_s())
