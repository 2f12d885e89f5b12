"""The gRPC edge: outrider.v1.Generation, translated to and from the service. Pure but for the calls it
forwards."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from coordinator.generation_request import GenerationInput, Sampling, SpeculationChoice
from coordinator.request_session import Finished
from coordinator.service import GenerationService
from coordinator.text_output import VisibleOutput
from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2, generation_pb2


def read_request(request: generation_pb2.GenerationRequest) -> GenerationInput:
    """The request as the service takes it. Raises InvalidRequest naming the field; bounds are checked later."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", "one of prompt, prompt_token_ids and chat is required")
    has_sampling = request.HasField("sampling")
    if has_sampling and request.sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens", "sampling.max_tokens must be at least 1")
    for message in request.chat.messages:
        if message.role not in ("system", "user", "assistant"):
            raise InvalidRequest("role", f"role must be system, user or assistant, got {message.role!r}")
    speculation = request.speculation
    return GenerationInput(
        request_id=request.request_id or uuid.uuid4().hex,
        model=request.model,
        text=request.prompt if kind == "prompt" else None,
        token_ids=tuple(request.prompt_token_ids.token_ids) if kind == "prompt_token_ids" else None,
        messages=(
            [{"role": message.role, "content": message.content} for message in request.chat.messages]
            if kind == "chat"
            else None
        ),
        max_tokens=request.sampling.max_tokens if has_sampling else None,
        sampling=_read_sampling(request.sampling) if has_sampling else Sampling(),
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        speculation=(
            SpeculationChoice(
                enabled=speculation.enabled, num_speculative_tokens=speculation.num_speculative_tokens
            )
            if request.HasField("speculation")
            else SpeculationChoice()
        ),
        deadline_s=request.deadline_ms / 1000 if request.deadline_ms else None,
    )


async def generate(
    service: GenerationService, request: generation_pb2.GenerationRequest
) -> AsyncGenerator[generation_pb2.GenerationChunk]:
    """Generation.Generate. Raises OutriderError, whose `grpc_code` names the status to answer with."""
    arrival_s = service.environment.now_s()
    spec = await service.prepare(read_request(request))
    request_id = spec.request.request_id
    async with aclosing(service.generate(spec, arrival_s)) as items:
        async for item in items:
            if isinstance(item, Finished):
                yield _last_chunk(request_id, item)
            else:
                yield _chunk(request_id, item)


def list_models(service: GenerationService) -> generation_pb2.ListModelsResponse:
    """Generation.ListModels."""
    return generation_pb2.ListModelsResponse(
        models=[
            generation_pb2.ModelInfo(
                id=status.model,
                max_model_len=status.max_model_len,
                num_target_workers=status.num_target_workers,
                num_draft_workers=status.num_draft_workers,
            )
            for status in service.models()
        ]
    )


def _read_sampling(sampling: common_pb2.SamplingParams) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


def _chunk(request_id: str, output: VisibleOutput) -> generation_pb2.GenerationChunk:
    return generation_pb2.GenerationChunk(
        request_id=request_id,
        text=output.text,
        token_ids=output.token_ids,
        origins=output.origins,
    )


def _last_chunk(request_id: str, finished: Finished) -> generation_pb2.GenerationChunk:
    return generation_pb2.GenerationChunk(
        request_id=request_id,
        text=finished.text,
        finished=generation_pb2.GenerationFinished(
            finish_reason=finished.finish_reason,
            stop_reason="" if finished.stop_reason is None else str(finished.stop_reason),
            num_prompt_tokens=finished.num_prompt_tokens,
            num_output_tokens=finished.num_output_tokens,
            stats=finished.counts.to_proto(),
            decoding_mode=finished.decoding_mode,
            time_to_first_token_ms=finished.times.time_to_first_token_ms or 0.0,
            generation_time_ms=finished.times.generation_ms,
        ),
    )
