"""The gRPC edge: outrider.v1.Generation, translated to and from the service. Pure but for the calls it
forwards."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from coordinator.answer_size import SMALL_ANSWER_VALUES, num_values
from coordinator.choices import ChoiceNews, RequestFinished
from coordinator.generation_request import (
    CHOICES_MAX,
    MESSAGES_MAX,
    NOWHERE,
    PROMPT_TOKENS_MAX,
    STOP_STRINGS_MAX,
    UINT32_MAX,
    GenerationInput,
    GenerationSpec,
    Origin,
    check_count,
)
from coordinator.journal import JournalEntry
from coordinator.request_session import Finished
from coordinator.resumption import Claim, ResumePoint
from coordinator.service import GenerationService
from coordinator.text_output import PromptOutput, VisibleOutput
from outrider.errors import InvalidRequest, NotFound
from outrider.sampling_params import MAX_BAD_WORDS, SamplingParams, SpeculationSettings, check_counts
from protos.outrider.v1 import common_pb2, generation_pb2

CANARY_KEY_METADATA: Final = "x-canary-key"
_DEFAULT_SAMPLING: Final = common_pb2.SamplingParams(temperature=1, top_p=1)


def read_request(request: generation_pb2.GenerationRequest, origin: Origin = NOWHERE) -> GenerationInput:
    """The request as the service takes it. Raises InvalidRequest naming the field; bounds are checked later."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", "one of prompt, prompt_token_ids and chat is required")
    has_sampling = request.HasField("sampling")
    # Before they are copied: a message of a megabyte may hold half a million of anything.
    check_count("prompt_token_ids", request.prompt_token_ids.token_ids, PROMPT_TOKENS_MAX)
    check_count("messages", request.chat.messages, MESSAGES_MAX)
    check_count("stop", request.stop, STOP_STRINGS_MAX)
    check_count("bad_words", request.bad_words, MAX_BAD_WORDS)
    for message in request.chat.messages:
        if message.role not in ("system", "user", "assistant"):
            raise InvalidRequest("role", f"role must be system, user or assistant, got {message.role!r}")
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
        sampling=_read_sampling(request.sampling if has_sampling else _DEFAULT_SAMPLING),
        bad_words=tuple(request.bad_words),
        n=request.n or 1,
        best_of=request.best_of or None,
        echo=request.echo,
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        speculation=SpeculationSettings.from_proto(request.speculation)
        if request.HasField("speculation")
        else SpeculationSettings(),
        deadline_s=request.deadline_ms / 1000 if request.deadline_ms else None,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        canary_key=origin.canary_key or request.tenant,
        origin=origin,
        priority=request.priority,
    )


async def generate(
    service: GenerationService, request: generation_pb2.GenerationRequest, origin: Origin = NOWHERE
) -> AsyncGenerator[generation_pb2.GenerationChunk]:
    """Generation.Generate. Raises OutriderError, whose `grpc_code` names the status to answer with."""
    arrival_s, threads = service.environment.now_s(), service.environment.threads
    points, recollection = _read_position(request), None
    claim = Claim.of(request.run, points, "run")
    if points:
        has_input = request.WhichOneof("input") is not None
        look_up = service.recall if has_input else service.look_up
        recollection = await look_up(request.request_id, origin.caller)
        if not has_input:
            request = _begun_as(request.request_id, recollection.entry)
    has_begun = recollection is not None and recollection.has_begun(claim)
    spec = await service.prepare(read_request(request, origin), has_begun=has_begun)
    resumption = None
    if recollection is not None:
        if len(points) != spec.num_choices:
            raise InvalidRequest(
                "resume_from", f"resume_from needs one point for each of {spec.num_choices} texts"
            )
        spec, resumption = service.resume(spec, claim, recollection)
    entry = JournalEntry("grpc", request.SerializeToString())
    async with aclosing(service.generate(spec, arrival_s, entry, resumption)) as items:
        async for item in items:
            # Each text's end has told the rest.
            if not isinstance(item, RequestFinished) and not item.news.is_repeat:
                is_long = num_values(spec, item.news) > SMALL_ANSWER_VALUES  # of a prompt
                yield await threads.run_admitted(_chunk, spec, item) if is_long else _chunk(spec, item)


def _read_position(request: generation_pb2.GenerationRequest) -> tuple[ResumePoint, ...]:
    check_count("resume_from", request.resume_from, CHOICES_MAX)
    if request.resume_from and not request.request_id:
        raise InvalidRequest("request_id", "request_id names the stream to go on with; it is missing")
    return tuple(
        ResumePoint(point.num_tokens, point.has_begun, point.has_ended) for point in request.resume_from
    )


def _begun_as(request_id: str, entry: JournalEntry | None) -> generation_pb2.GenerationRequest:
    """The request that a stream began with."""
    assert entry is not None, "look_up raises where there is none"
    if entry.kind != "grpc":
        raise NotFound(f"the stream {request_id} was begun over HTTP, where it can be resumed", "request_id")
    request = generation_pb2.GenerationRequest.FromString(entry.payload)
    request.request_id = request_id  # where it was made up, it is not in there
    return request


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


def _read_sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    # max_tokens is checked with the context at hand, and may be 0 where the prompt is only scored.
    check_counts(message)
    unbounded = common_pb2.SamplingParams()
    unbounded.CopyFrom(message)
    unbounded.max_tokens = UINT32_MAX
    return SamplingParams.from_proto(unbounded)


def _chunk(spec: GenerationSpec, item: ChoiceNews) -> generation_pb2.GenerationChunk:
    chunk = generation_pb2.GenerationChunk(
        request_id=spec.request.request_id, index=item.index, text=item.news.text, run=spec.run.fingerprint
    )
    match item.news:
        case PromptOutput(logprobs=logprobs):
            num_top = spec.request.sampling.num_prompt_logprobs
            if num_top is not None:
                chunk.prompt_logprobs.extend(_cut(each, num_top) for each in logprobs)
        case VisibleOutput() as output:
            chunk.token_ids.extend(output.token_ids)
            chunk.origins.extend(output.origins)
            if spec.shows_logprobs:
                chunk.logprobs.extend(output.logprobs)
        case Finished() as finished:
            chunk.finished.CopyFrom(_finished(finished))
    return chunk


def _cut(logprobs: common_pb2.TokenLogprobs, num_top: int) -> common_pb2.TokenLogprobs:
    """Without those that only the echo had needed."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids[:num_top],
        top_logprobs=logprobs.top_logprobs[:num_top],
    )


def _finished(finished: Finished) -> generation_pb2.GenerationFinished:
    return generation_pb2.GenerationFinished(
        finish_reason=finished.finish_reason,
        stop_reason="" if finished.stop_reason is None else str(finished.stop_reason),
        num_prompt_tokens=finished.num_prompt_tokens,
        num_output_tokens=finished.num_output_tokens,
        stats=finished.counts.to_proto(),
        decoding_mode=finished.decoding_mode,
        time_to_first_token_ms=finished.times.time_to_first_token_ms or 0.0,
        generation_time_ms=finished.times.generation_ms,
    )
