"""The gRPC API, outrider.v1.Generation: translates its calls to and from the service."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Final

from coordinator.access.api_keys import Caller
from coordinator.api.answer.answer_size import SMALL_ANSWER_VALUES, num_values
from coordinator.intake.generation_request import (
    CHOICES_MAX,
    MESSAGES_MAX,
    NOWHERE,
    PROMPT_TOKENS_MAX,
    STOP_STRINGS_MAX,
    GenerationInput,
    GenerationSpec,
    Origin,
)
from coordinator.observability.statistics import outcome_of
from coordinator.output.sequence_output import SequenceFinished
from coordinator.output.text_output import PromptOutput, VisibleOutput
from coordinator.recovery.journal_entry import JournalEntry
from coordinator.recovery.resumption import Claim, ResumePoint
from coordinator.request.choices import ChoiceOutput, RequestFinished
from coordinator.service.generation_service import GenerationService
from coordinator.service.streams import hiding_model
from outrider.errors import InvalidRequest, NotFound
from outrider.objective import Objective
from outrider.sampling_params import (
    MAX_BAD_WORDS,
    UINT32_MAX,
    SamplingParams,
    SpeculationSettings,
    check_count,
    check_counts,
)
from protos.outrider.v1 import common_pb2, generation_pb2

CANARY_KEY_METADATA: Final = "x-canary-key"
_DEFAULT_SAMPLING: Final = common_pb2.SamplingParams(temperature=1, top_p=1)


def fill_defaults(request: generation_pb2.GenerationRequest) -> None:
    """Sets the fields of a client's request that are unset, and whose default is not 0, to their defaults.

    A request from the journal is not filled again: every one written here has these fields. A release whose fields had
    no presence left zeros out, so that an unset field of its entries is 0, as in its clients' requests at that time.
    """
    if request.HasField("sampling"):
        for name in ("temperature", "top_p"):
            if not request.sampling.HasField(name):
                setattr(request.sampling, name, getattr(_DEFAULT_SAMPLING, name))
    if request.HasField("speculation") and not request.speculation.HasField("enabled"):
        request.speculation.enabled = True


def read_request(request: generation_pb2.GenerationRequest, origin: Origin = NOWHERE) -> GenerationInput:
    """Converts a request after `fill_defaults`. Raises InvalidRequest naming the field; bounds are checked later."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", "one of prompt, prompt_token_ids and chat is required")
    # Checked before copying: a message of 1 MB may contain 500,000 entries of any field.
    check_count("prompt_token_ids", request.prompt_token_ids.token_ids, PROMPT_TOKENS_MAX)
    check_count("messages", request.chat.messages, MESSAGES_MAX)
    check_count("prediction_token_ids", request.prediction_token_ids.token_ids, PROMPT_TOKENS_MAX)
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
        max_tokens=request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None,
        max_tokens_default=None if kind == "chat" else 16,
        sampling=_read_sampling(request.sampling if request.HasField("sampling") else _DEFAULT_SAMPLING),
        bad_words=tuple(request.bad_words),
        n=request.n or 1,
        best_of=request.best_of or None,
        echo=request.echo,
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        speculation=SpeculationSettings.from_proto(request.speculation)
        if request.HasField("speculation")
        else SpeculationSettings(),
        objective=Objective.from_proto(request.slo),
        prediction=_read_prediction(request),
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
    """Serves Generation.Generate; fills the request. Raises OutriderError, whose `grpc_code` names the status."""
    arrival_s, tenant = service.environment.now_s(), origin.caller.tenant
    await service.admit(origin.caller, may_have_begun=bool(request.resume_from))
    fill_defaults(request)
    points, recollection = _read_position(request), None
    claim = Claim.of(request.run, points, "run")
    is_by_id = bool(points) and request.WhichOneof("input") is None
    if points:
        look_up = service.streams.look_up if is_by_id else service.streams.recall
        recollection = await look_up(request.request_id, origin.caller)
        if is_by_id:
            request = _begun_as(request.request_id, recollection.entry)
    has_begun = recollection is not None and recollection.has_begun(claim)
    if recollection is not None and not has_begun:
        await service.check_new(origin.caller)
    with hiding_model(request.request_id, origin.caller) if is_by_id else nullcontext():
        asked = read_request(request, replace(origin, num_bytes=request.ByteSize()))
        spec = await service.prepare(asked, has_begun=has_begun)
    resumption = None
    if recollection is not None:
        if len(points) != spec.num_choices:
            raise InvalidRequest("resume_from", f"resume_from needs one point for each of {spec.num_choices} sequences")
        spec, resumption = service.streams.resume(spec, claim, recollection)
    entry = JournalEntry("grpc", request.SerializeToString())
    async with aclosing(service.generate(spec, arrival_s, entry, resumption)) as items:
        async for item in items:
            # The end of each sequence has carried the rest.
            if not isinstance(item, RequestFinished) and not item.item.is_repeat:
                if (num := num_values(spec, item.item)) > SMALL_ANSWER_VALUES:  # a long prompt
                    yield await service.threads.of(tenant, num).run_admitted(_chunk, spec, item)
                else:
                    yield _chunk(spec, item)


def _read_position(request: generation_pb2.GenerationRequest) -> tuple[ResumePoint, ...]:
    check_count("resume_from", request.resume_from, CHOICES_MAX)
    if request.resume_from and not request.request_id:
        raise InvalidRequest("request_id", "request_id, which names the stream to resume, is missing")
    return tuple(ResumePoint(point.num_tokens, point.has_begun, point.has_ended) for point in request.resume_from)


def _begun_as(request_id: str, entry: JournalEntry | None) -> generation_pb2.GenerationRequest:
    """Reads the request that began a stream from its journal entry."""
    assert entry is not None, "look_up raises where there is none"
    if entry.kind != "grpc":
        raise NotFound(f"the stream {request_id} was begun over HTTP, where it can be resumed", "request_id")
    request = generation_pb2.GenerationRequest.FromString(entry.payload)
    request.request_id = request_id  # the entry lacks an id that the server drew
    return request


def list_models(service: GenerationService, caller: Caller) -> generation_pb2.ListModelsResponse:
    """Serves Generation.ListModels."""
    return generation_pb2.ListModelsResponse(
        models=[
            generation_pb2.ModelInfo(
                id=status.model,
                max_model_len=status.max_model_len,
                num_target_workers=status.num_target_workers,
                num_draft_workers=status.num_draft_workers,
            )
            for status in service.catalog.served(caller)
        ]
    )


def _read_prediction(request: generation_pb2.GenerationRequest) -> str | tuple[int, ...] | None:
    match request.WhichOneof("prediction"):
        case "prediction_text":
            return request.prediction_text
        case "prediction_token_ids":
            return tuple(request.prediction_token_ids.token_ids)
    return None


def _read_sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    # max_tokens is checked later against the context, and may be 0 to only score the prompt.
    check_counts(message)
    unbounded = common_pb2.SamplingParams()
    unbounded.CopyFrom(message)
    unbounded.max_tokens = UINT32_MAX
    return SamplingParams.from_proto(unbounded)


def _chunk(spec: GenerationSpec, item: ChoiceOutput) -> generation_pb2.GenerationChunk:
    chunk = generation_pb2.GenerationChunk(
        request_id=spec.request.request_id, index=item.index, text=item.item.text, run=spec.run.fingerprint
    )
    match item.item:
        case PromptOutput(logprobs=logprobs):
            num_top = spec.request.sampling.num_prompt_logprobs
            if num_top is not None:
                chunk.prompt_logprobs.extend(_cut(each, num_top) for each in logprobs)
        case VisibleOutput() as output:
            chunk.token_ids.extend(output.token_ids)
            chunk.origins.extend(output.origins)
            if spec.shows_logprobs:
                chunk.logprobs.extend(output.logprobs)
        case SequenceFinished() as finished:
            chunk.finished.CopyFrom(_finished(finished, spec))
    return chunk


def _cut(logprobs: common_pb2.TokenLogprobs, num_top: int) -> common_pb2.TokenLogprobs:
    """Removes the log probabilities that only the echo needed."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids[:num_top],
        top_logprobs=logprobs.top_logprobs[:num_top],
    )


def _finished(finished: SequenceFinished, spec: GenerationSpec) -> generation_pb2.GenerationFinished:
    outcome = outcome_of(spec.objective, [(finished.times, finished.num_output_tokens)])
    return generation_pb2.GenerationFinished(
        finish_reason=finished.finish_reason,
        stop_reason="" if finished.stop_reason is None else str(finished.stop_reason),
        num_prompt_tokens=finished.num_prompt_tokens,
        num_output_tokens=finished.num_output_tokens,
        stats=finished.counts.to_proto(),
        decoding_mode=finished.decoding_mode,
        exactness=finished.exactness,
        time_to_first_token_ms=finished.times.time_to_first_token_ms or 0.0,
        generation_time_ms=finished.times.generation_ms,
        slo_met=all(outcome.values()) if outcome else None,
        seed=spec.sampling.seed,
    )
