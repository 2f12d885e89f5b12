"""The target side of one session: the call, and its errors and silences as exceptions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Final

import grpc
import grpc.aio

from coordinator.request.draft_link import LinkedSession
from coordinator.request.environment import Environment
from coordinator.workers.channels import describe, remaining_s, was_never_sent
from coordinator.workers.silence import SilenceWatch, is_own_loss
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
from protos.outrider.v1 import common_pb2, target_pb2

_RETRY_AFTER_S: Final = 1.0
_STEP_HINTS_MAX: Final = 1024  # far more than any target verifies; histograms have that size


class TargetCall:
    """One call of Target.Generate, open from construction to `cancel`."""

    def __init__(self, environment: Environment, session: LinkedSession) -> None:
        self._environment = environment
        self._target = target = session.target
        self._has_answered = False
        # It watches from the beginning: a target confirms a request at once, and reports once a second that it waits.
        self._watch = SilenceWatch(
            lambda: self._call.cancel(), environment.settings.target_silence_max_s, environment.loop.lag
        )
        timeout_s = remaining_s(session.deadline_s, environment.now_s())
        traceparent = session.spec.span.traceparent
        self._call = environment.channels.generate(target.address, session.request, timeout_s, traceparent)
        self._watch.start()

    def cancel(self) -> None:
        """Frees the session at the target; does nothing once the call has ended."""
        self._watch.stop()
        self._call.cancel()

    async def read(self) -> target_pb2.GenerateEvent:
        """Reads the target's next event; the caller reads no further than the last one.

        Raises Overloaded if the target is full, WorkerUnreached if there is no connection to it or it gives the request
        back, WorkerUnanswered if it has not answered for long, WorkerSilent if it has answered and no longer does,
        WorkerLostAtOnce and WorkerLost if the connection breaks before and after its answer, WorkerFailed if it fails,
        ends without a last event or sends a malformed one, DeadlineExceeded, and InvalidRequest if it refuses a value.
        """
        watch, worker_id = self._watch, self._target.worker_id
        try:
            watch.begin()
            event = await self._call.read()
            watch.end()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not watch.has_cancelled or (task is not None and task.cancelling()):
                raise  # not by the watch
            self._pass_over()
            if not self._has_answered:
                raise WorkerUnanswered(f"target worker {worker_id} does not answer") from None
            raise WorkerSilent(f"target worker {worker_id} fell silent") from None
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        self._has_answered = True
        if not isinstance(event, target_pb2.GenerateEvent):
            raise WorkerFailed(f"target worker {worker_id} ended without a last event")
        if not _makes_sense(event):
            self._pass_over()
            raise WorkerFailed(f"target worker {worker_id} sent a malformed event")
        return event

    def _translated(self, error: grpc.aio.AioRpcError) -> OutriderError:
        match error.code():
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                full = Overloaded(f"every target worker is full ({error.details()})", _RETRY_AFTER_S)
                full.told_as = "every target worker is full"
                return full
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(None, f"the target worker refused the request: {error.details()}")
            case grpc.StatusCode.FAILED_PRECONDITION:
                # It is draining, or a later run with other weights answers: it was not lost to the request.
                self._pass_over()
                return WorkerUnreached(
                    f"target worker {self._target.worker_id} gives the request back: {error.details()}"
                )
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded("not finished within the request's deadline")
            case _:
                if is_own_loss(error, self._environment.loop.lag):
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
        self._environment.placement.router.pass_over(self._target, self._environment.now_s())


def _loss(error: grpc.aio.AioRpcError) -> type[Unavailable]:
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return WorkerFailed
    return WorkerUnreached if was_never_sent(error) else WorkerLost


def _makes_sense(event: target_pb2.GenerateEvent) -> bool:
    """Whether an event is well-formed, as far as a malformed one would fail the request or grow its output without
    end."""
    kind = event.WhichOneof("event")
    if kind == "step":
        step = event.step
        return (
            len(step.origins) == len(step.token_ids)
            and max(step.num_draft_tokens, step.num_accepted_draft_tokens) <= _STEP_HINTS_MAX
            and step.num_branches <= step.num_draft_tokens
            and step.num_accepted_branches <= step.num_accepted_draft_tokens
            and step.num_accepted_prediction_tokens <= step.num_prediction_tokens <= _STEP_HINTS_MAX
            and (not step.logprobs or _are_paired(step.logprobs))
        )
    if kind == "finished":
        return math.isfinite(event.finished.queue_ms) and math.isfinite(event.finished.prefill_ms)
    return kind != "prompt" or _are_paired(event.prompt.logprobs)


def _are_paired(logprobs: Iterable[common_pb2.TokenLogprobs]) -> bool:
    return all(len(each.top_token_ids) == len(each.top_logprobs) for each in logprobs)
