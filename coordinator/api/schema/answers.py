"""The answers of the HTTP edge, for its OpenAPI document. Pure.

They are written key by key elsewhere (`coordinator.api.answer`), where most of the time of a stream goes; these models
describe them, and a test compares what is answered with them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from coordinator.api.schema.tool_schema import CalledFunction, ToolCall
from coordinator.intake.generation_request import CHOICES_MAX

Count = Annotated[int, Field(ge=0)]


class ErrorDetails(BaseModel):
    """Why a request failed, in OpenAI's form."""

    message: str = Field(description="the reason, for people")
    type: str = Field(description="class of the error")
    param: str | None = Field(description="the parameter to change")
    code: str | None = Field(description="the reason, for programs")


class Error(BaseModel):
    error: ErrorDetails


class Choice(BaseModel):
    index: Count = Field(description="number of the choice, from 0")
    logprobs: dict[str, Any] | None = Field(description="log probabilities, if requested, in OpenAI's form")
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] = Field(description="why the output ended")
    stop_reason: str | int | None = Field(description="the stop string or stop token that ended the output")


class TextChoice(Choice):
    text: str = Field(description="the output")


class Message(BaseModel):
    role: Literal["assistant"]
    content: str | None = Field(description="the output; null where it is only calls or reasoning")
    refusal: None = Field(description="always null: a model of ours does not tell refusals from other output")
    reasoning: str | None = Field(default=None, description="the reasoning before the output, of models that reason")
    reasoning_content: str | None = Field(default=None, description="the same as `reasoning`, for older clients")
    tool_calls: list[ToolCall] = Field(default=[], description="the calls that the model makes")
    function_call: CalledFunction | None = Field(default=None, description="its call, if `functions` were sent")


class ChatChoice(Choice):
    message: Message


class PromptTokensDetails(BaseModel):
    cached_tokens: Count = Field(description="tokens of the prompt whose KV was in the cache")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: Count = Field(default=0, description="of a chat: tokens of the model's reasoning, shown or not")
    accepted_prediction_tokens: Count | None = Field(
        default=None, description="with `prediction`: tokens of it that are in the output"
    )
    rejected_prediction_tokens: Count | None = Field(
        default=None,
        description="with `prediction`: tokens of it that were compared with the output in vain; not part of "
        "`completion_tokens`",
    )


class Usage(BaseModel):
    prompt_tokens: Count = Field(description="tokens in the prompt")
    completion_tokens: Count = Field(description="generated tokens of all sequences, their stop tokens included")
    total_tokens: Count = Field(description="the sum of both")
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        default=None, description="of a chat, or where `prediction` is given"
    )


class Metrics(BaseModel):
    decoding_mode: str = Field(description="`greedy`, `coupled` or `rejection`: how tokens were chosen")
    exactness: str = Field(
        description="`tokens`: speculation changes no token of the output; `distribution`: only their distribution is "
        "the same"
    )
    speculative_decoding: dict[str, Any] = Field(description="counts of steps and hints, and acceptance")
    slo: dict[str, Any] | None = Field(
        default=None, description="with an objective: its times, and which of them were met"
    )


class Answer(BaseModel):
    id: str = Field(description="`cmpl-` or `chatcmpl-`, and the request's id")
    created: Count = Field(description="seconds since 1970")
    model: str = Field(description="the model that answered")
    usage: Usage
    metrics: Metrics


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice] = Field(min_length=1, description="the `n` outputs of each prompt")


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(min_length=1, max_length=CHOICES_MAX, description="the `n` outputs")


class Model(BaseModel):
    id: str = Field(description="the name that clients request")
    object: Literal["model"]
    created: Count = Field(description="when the replica that answers started, seconds since 1970")
    owned_by: str = Field(description="always `outrider`")
    max_model_len: Count = Field(description="longest prompt plus output, tokens")
    has_chat_template: bool = Field(description="false: messages are joined by newlines, as for a base model")
    num_target_workers: Count = Field(description="live now")
    num_draft_workers: Count = Field(description="live now")


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model] = Field(description="models with at least one live target worker")


class TargetWeights(BaseModel):
    """Live targets that compute the same logits bit for bit: a sequence moves only between these."""

    model: str = Field(description="the name that clients request")
    weights_fingerprint: str = Field(description="hash of the checkpoint")
    numerics: str = Field(description="what else determines the bits of the logits")
    num_target_workers: Count = Field(description="live now")


class ExcludedWorker(BaseModel):
    """A registered worker that the coordinator does not use."""

    worker_id: str = Field(description="the worker's id")
    pool: str = Field(description="`target` or `draft`")
    reason: str = Field(description="why it is not used")


class UnpairedWorkers(BaseModel):
    """Draft workers and targets that are not paired, because the targets keep no features for their draft head."""

    model: str = Field(description="the target model")
    draft_head: str = Field(description="fingerprint of the draft head that the draft workers run")
    target_head: str = Field(description="that of the head that the targets keep features for; empty: for none")
    num_draft_workers: Count = Field(description="usable now")
    num_target_workers: Count = Field(description="usable now")
    reason: str = Field(description="names of the workers, and the way out")


class UselessDraft(BaseModel):
    """A draft worker whose hints are hardly ever accepted."""

    worker_id: str = Field(description="the worker's id")
    model: str = Field(description="the target model that it drafts for")


class Health(BaseModel):
    """A coordinator with API keys shows only `status` to callers without a key."""

    status: str = Field(description="`ready`, or what is missing")
    registry: Literal["ok", "degraded"] = Field(description="`degraded`: Redis does not answer")
    num_target_workers: Count = Field(description="usable now")
    num_draft_workers: Count = Field(description="usable now")
    target_weights: list[TargetWeights] = Field(description="live targets by weights and numerics")
    excluded_workers: list[ExcludedWorker] = Field(description="registered workers that are not used")
    unpaired_workers: list[UnpairedWorkers] = Field(description="pairs that draft heads rule out")
    useless_drafts: list[UselessDraft] = Field(description="draft workers with an acceptance alarm")


class Alive(BaseModel):
    status: str = Field(description="always `alive`")


class Version(BaseModel):
    version: str = Field(description="the version of Outrider")


class Load(BaseModel):
    server_load: Count = Field(description="sequences that are served or wait for a slot")


class Tokens(BaseModel):
    count: Count = Field(description="number of tokens")
    max_model_len: Count | None = Field(description="longest prompt plus output, tokens")
    tokens: list[Count] = Field(description="token ids")
    token_strs: list[str] = Field(default=[], description="the vocabulary's entries, if requested")


class Text(BaseModel):
    prompt: str = Field(description="the text of the tokens")
