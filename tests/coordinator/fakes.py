"""Workers that speak the real protocol and no model: their text is a script, their faults are chosen by the test."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio

from coordinator.formats.output_format import choose_format
from coordinator.models.model_table import ModelTable
from coordinator.models.served_model import ServedModel
from outrider.registry.worker_record import Pool, WorkerRecord
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

ACCEPTED, BONUS, PLAIN = (
    common_pb2.TOKEN_ORIGIN_ACCEPTED, common_pb2.TOKEN_ORIGIN_BONUS, common_pb2.TOKEN_ORIGIN_PLAIN,
)  # fmt: skip

WAITING_EVERY_S = 0.02


@dataclass
class FakeTarget(target_pb2_grpc.TargetServicer):
    """Says `script` again and again, whatever the prompt, `tokens_per_step` at a time.

    Position decides, so a replay continues where the committed tokens end. Each step claims `num_draft_tokens`
    hints, all but the last token accepted. Log probabilities are those of `logprob_of`; the likeliest tokens at
    position p are always p + 1, p + 2 and so on. A prediction is compared position by position.
    """

    script: list[int]
    script_of: Callable[[target_pb2.GenerateRequest], list[int]] | None = None  # instead of `script`
    logprob_of: Callable[[target_pb2.GenerateRequest, int], float] = lambda request, position: -1.0 - position
    no_token_at: int | None = None  # output length at which the parameters forbid everything
    num_cached_tokens: int = 0
    stats: common_pb2.SpeculationStats | None = None  # of the last event
    tokens_per_step: int = 1
    num_draft_tokens: int = 0
    num_accepted: int | None = None  # of each step; None: all tokens but one
    step_s: float = 0.0
    eos_at: int | None = None  # output length at which the text ends by itself
    is_full: bool = False
    refuses_with: grpc.StatusCode | None = None
    dies_at: int | None = None  # output length at which the call fails
    falls_silent_at: int | None = None
    waits_s: float = 0.0  # until the first step, saying so
    is_hung: bool = False  # takes calls and says nothing at all
    model_name: str = "demo"  # as registered
    engine: str = ""  # as registered
    fingerprint: str | None = None  # as registered; None: the cluster's
    may_step: Callable[[int], bool] = lambda num_tokens: True  # after so many tokens; it waits until it may
    held_s_max: float = 5.0  # that it waits for it
    requests: list[target_pb2.GenerateRequest] = field(default_factory=list)
    speculation_calls: list[target_pb2.SetSpeculationRequest] = field(default_factory=list)
    num_open: int = 0
    num_cancelled: int = 0
    num_died: int = 0

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[target_pb2.GenerateEvent]:
        self.requests.append(request)
        if self.is_full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no free sequence")
        if self.refuses_with is not None:
            await context.abort(self.refuses_with, "refused by the test")
        self.num_open += 1
        try:
            async for event in self._events(request, context):
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # the latter where an event was being sent
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1

    async def _events(
        self, request: target_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb2.GenerateEvent]:
        mode = common_pb2.DECODING_MODE_COUPLED if request.sampling.HasField("seed") else (
            common_pb2.DECODING_MODE_REJECTION if request.sampling.temperature else common_pb2.DECODING_MODE_GREEDY
        )  # fmt: skip
        if self.is_hung:
            await asyncio.sleep(60)
        yield target_pb2.GenerateEvent(started=target_pb2.SessionStarted(decoding_mode=mode))
        for _ in range(int(self.waits_s / WAITING_EVERY_S)):
            await asyncio.sleep(WAITING_EVERY_S)
            yield target_pb2.GenerateEvent(waiting=target_pb2.SessionWaiting())
        position = len(request.token_ids) - request.num_prompt_tokens
        if request.sampling.HasField("num_prompt_logprobs"):
            for chunk in self._prompt_chunks(request):
                yield target_pb2.GenerateEvent(prompt=chunk)
        end = min(request.sampling.max_tokens, self.eos_at if self.eos_at is not None else 1 << 30)
        while position < end:
            if self.dies_at is not None and position >= self.dies_at:
                self.num_died += 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed by the test")
            if self.falls_silent_at is not None and position >= self.falls_silent_at:
                await asyncio.sleep(60)
            if self.no_token_at is not None and position >= self.no_token_at:
                yield target_pb2.GenerateEvent(
                    finished=target_pb2.SessionFinished(reason=target_pb2.FINISH_REASON_NO_TOKEN)
                )
                return
            await asyncio.sleep(self.step_s)
            await eventually(partial(self.may_step, position), "the target may go on", self.held_s_max)
            count = min(self.tokens_per_step, end - position)
            yield target_pb2.GenerateEvent(step=self._step(request, position, count))
            position += count
        is_eos = self.eos_at is not None and position >= self.eos_at
        yield target_pb2.GenerateEvent(
            finished=target_pb2.SessionFinished(
                reason=target_pb2.FINISH_REASON_STOP if is_eos else target_pb2.FINISH_REASON_LENGTH,
                stop_token_id=0 if is_eos else None,
                stats=self.stats,
                num_cached_tokens=self.num_cached_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=position,
                queue_ms=1.5,
                prefill_ms=2.5,
            )
        )

    def _prompt_chunks(self, request: target_pb2.GenerateRequest) -> list[target_pb2.PromptLogprobs]:
        """Log probabilities of the prompt, in messages of two positions each."""
        num_top = request.sampling.num_prompt_logprobs
        positions = range(1, request.num_prompt_tokens)
        return [
            target_pb2.PromptLogprobs(
                first_position=first,
                logprobs=[token_logprobs(-0.5 * at, at, num_top) for at in positions[first - 1 : first + 1]],
            )
            for first in positions[::2]
        ]

    def _step(self, request: target_pb2.GenerateRequest, position: int, count: int) -> target_pb2.StepOutput:
        script = self.script if self.script_of is None else self.script_of(request)
        positions = range(position, position + count)
        token_ids = [script[at % len(script)] for at in positions]
        logprobs = None
        if request.sampling.HasField("num_logprobs"):
            num_top = request.sampling.num_logprobs
            logprobs = [token_logprobs(self.logprob_of(request, at), at, num_top) for at in positions]
        return target_pb2.StepOutput(
            token_ids=token_ids,
            origins=[*[ACCEPTED] * (count - 1), BONUS if self.num_draft_tokens else PLAIN],
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=count - 1 if self.num_accepted is None else self.num_accepted,
            step_ms=1.0,
            logprobs=logprobs,
            num_prediction_tokens=len(request.prediction[position : position + count]),
            num_accepted_prediction_tokens=sum(
                map(operator.eq, request.prediction[position : position + count], token_ids)
            ),
        )

    async def GetInfo(
        self, request: common_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.WorkerInfo:
        """Each death began another life; records are of the first."""
        return common_pb2.WorkerInfo(incarnation=str(1 + self.num_died))

    async def SetSpeculation(
        self, request: target_pb2.SetSpeculationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.SetSpeculationResponse:
        self.speculation_calls.append(request)
        return target_pb2.SetSpeculationResponse()


@dataclass
class FakeDraft(draft_pb2_grpc.DraftServicer):
    """Attaches to everything and hints at nothing."""

    is_full: bool = False
    lets_go_after_s: float | None = None
    is_at_limit: Callable[[], bool] = lambda: False  # whether the sequence has become too long for it
    is_mute: bool = False  # accepts the call and never reports
    model_name: str = "demo"  # as registered
    engine: str = ""  # as registered
    fingerprint: str | None = None  # as registered; None: the cluster's
    max_model_len: int = 1024  # as registered
    requests: list[draft_pb2.AttachRequest] = field(default_factory=list)
    num_open: int = 0
    num_closed: int = 0

    async def Attach(
        self, request: draft_pb2.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[draft_pb2.AttachStatus]:
        self.requests.append(request)
        if self.is_full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no free slot")
        self.num_open += 1
        try:
            while not self.is_mute:
                yield draft_pb2.AttachStatus(committed_len=len(request.token_ids))
                if self.is_at_limit():
                    return
                if self.lets_go_after_s is not None:
                    await asyncio.sleep(self.lets_go_after_s)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "killed by the test")
                await asyncio.sleep(0.05)
            await asyncio.sleep(60)
        finally:
            self.num_open -= 1
            self.num_closed += 1


def token_logprobs(logprob: float, position: int, num_top: int) -> common_pb2.TokenLogprobs:
    """Those of the fake's distribution at a position: token p + 1 first, then p + 2 and so on."""
    return common_pb2.TokenLogprobs(
        logprob=logprob,
        rank=7,
        top_token_ids=range(position + 1, position + 1 + num_top),
        top_logprobs=[-0.25 * rank for rank in range(1, num_top + 1)],
    )


@asynccontextmanager
async def serving(worker: FakeTarget | FakeDraft, port: int = 0) -> AsyncIterator[str]:
    """Serves a fake on the loopback, on a free port unless told which; yields its address."""
    server = grpc.aio.server()
    if isinstance(worker, FakeTarget):
        target_pb2_grpc.add_TargetServicer_to_server(worker, server)
    else:
        draft_pb2_grpc.add_DraftServicer_to_server(worker, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def record_of(pool: Pool, address: str, fingerprint: str, /, **changes: Any) -> WorkerRecord:
    """A registry record of a fake worker."""
    values: dict[str, Any] = {
        "worker_id": f"{pool}-{address.rpartition(':')[2]}",
        "pool": pool,
        "address": address,
        "incarnation": "1",
        "started_at_ms": 1,
        "model_name": "demo",
        "tokenizer_fingerprint": fingerprint,
        "vocab_size": 4096,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "dtype": "bfloat16",
        "num_model_parameters": 1000,
    }
    return WorkerRecord(**(values | changes))


def served_model(fingerprint: str = "0" * 16, **options: Any) -> ServedModel:
    """A model whose text nobody reads."""
    tokenizer = SimpleNamespace(fingerprint=fingerprint, has_chat_template=False)
    return ServedModel(cast(Tokenizer, tokenizer), choose_format(""), **options)


def model_table(fingerprint: str, *names: str) -> ModelTable:
    """One model under these names, or under all."""
    model = served_model(fingerprint)
    return ModelTable(dict.fromkeys(names, model), others=None if names else model)


async def eventually(condition: Callable[[], bool], what: str, within_s: float = 5.0) -> None:
    """Waits until the condition holds; fails with `what` when it does not in time."""
    for _ in range(int(within_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {within_s} s: {what}")
