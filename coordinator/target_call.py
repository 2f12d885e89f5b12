"""The target side of one session: the call, its errors and its silence, in our words."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable
from typing import Final

import grpc
import grpc.aio

from coordinator.environment import Environment
from coordinator.silence import SilenceWatch, is_own_loss
from coordinator.workers import describe, remaining_s, was_never_sent
from outrider.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LostByOwnPause,
    OutriderError,
    Overloaded,
    Unavailable,
    WorkerFailed,
    WorkerLost,
    WorkerLostAtOnce,
    WorkerSilent,
    WorkerUnanswered,
    WorkerUnreached,
)
from outrider.worker_record import WorkerRecord
from protos.outrider.v1 import common_pb2, target_pb2

_RETRY_AFTER_S: Final = 1.0
_STEP_HINTS_MAX: Final = 1024  # far more than any target verifies; histograms are as long


class TargetCall:
    """One Target.Generate, open from construction to `cancel`."""

    def __init__(
        self,
        environment: Environment,
        target: WorkerRecord,
        request: target_pb2.GenerateRequest,
        deadline_s: float,
        traceparent: str = "",
    ) -> None:
        """`deadline_s` is on the environment's clock."""
        self._environment = environment
        self._target = target
        self._has_answered = False
        self._call = environment.channels.generate(
            target.address, request, remaining_s(deadline_s, environment.now_s()), traceparent
        )

    def cancel(self) -> None:
        """Frees the session at the target; does nothing once the call has ended."""
        self._call.cancel()

    async def events(self) -> AsyncGenerator[target_pb2.GenerateEvent]:
        """What the target says, the last word included.

        Raises Overloaded when the target is full, WorkerUnreached when there is no connection to it or it gives the
        request back, WorkerUnanswered when the target does not answer for long, WorkerSilent when it has answered and
        no longer does, WorkerLostAtOnce and WorkerLost when the connection breaks before and after its answer,
        WorkerFailed when it fails, ends without a last word or makes no sense, DeadlineExceeded, and InvalidRequest
        when it refuses a value.
        """
        # From the beginning: a target says at once that it has the request, and once a second that it waits its turn.
        watch = SilenceWatch(
            self._call.cancel, self._environment.settings.target_silence_max_s, self._environment.lag
        )
        try:
            watch.start()
            while True:
                watch.begin()
                event = await self._call.read()
                watch.end()
                self._has_answered = True
                if not isinstance(event, target_pb2.GenerateEvent):
                    raise WorkerFailed(f"target worker {self._target.worker_id} ended without a last word")
                if not _makes_sense(event):
                    self._pass_over()
                    raise WorkerFailed(f"target worker {self._target.worker_id} said what makes no sense")
                yield event
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not watch.has_cancelled or (task is not None and task.cancelling()):
                raise  # somebody else's cancellation
            self._pass_over()
            if not self._has_answered:
                raise WorkerUnanswered(f"target worker {self._target.worker_id} does not answer") from None
            raise WorkerSilent(f"target worker {self._target.worker_id} fell silent") from None
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        finally:
            watch.stop()

    def _translated(self, error: grpc.aio.AioRpcError) -> OutriderError:
        match error.code():
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return Overloaded(f"every target worker is full ({error.details()})", _RETRY_AFTER_S)
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(None, f"the target worker refused the request: {error.details()}")
            case grpc.StatusCode.FAILED_PRECONDITION:
                # It leaves, or a later life of it answers, whose weights may be others: it was not lost to the request.
                self._pass_over()
                return WorkerUnreached(
                    f"target worker {self._target.worker_id} gives the request back: {error.details()}"
                )
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded("not finished within the request's deadline")
            case _:
                if is_own_loss(error, self._environment.lag):
                    return LostByOwnPause(
                        f"the connection to target worker {self._target.worker_id} broke while this coordinator was "
                        f"stopped: {describe(error)}"
                    )
                self._pass_over()
                kind = _loss(error)
                if kind is WorkerLost and not self._has_answered:
                    kind = WorkerLostAtOnce
                return kind(f"target worker {self._target.worker_id} failed: {describe(error)}")

    def _pass_over(self) -> None:
        self._environment.router.pass_over(self._target, self._environment.now_s())


def _loss(error: grpc.aio.AioRpcError) -> type[Unavailable]:
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return WorkerFailed
    return WorkerUnreached if was_never_sent(error) else WorkerLost


def _makes_sense(event: target_pb2.GenerateEvent) -> bool:
    """As far as an answer would fail or grow without end by it."""
    kind = event.WhichOneof("event")
    if kind == "step":
        step = event.step
        return (
            len(step.origins) == len(step.token_ids)
            and max(step.num_draft_tokens, step.num_accepted_draft_tokens) <= _STEP_HINTS_MAX
            and (not step.logprobs or _are_paired(step.logprobs))
        )
    if kind == "finished":
        return math.isfinite(event.finished.queue_ms) and math.isfinite(event.finished.prefill_ms)
    return kind != "prompt" or _are_paired(event.prompt.logprobs)


def _are_paired(logprobs: Iterable[common_pb2.TokenLogprobs]) -> bool:
    return all(len(each.top_token_ids) == len(each.top_logprobs) for each in logprobs)
