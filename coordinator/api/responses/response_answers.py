"""The answers of the Responses API, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from coordinator.api.schema.answers import Count, Metrics


class CachedTokens(BaseModel):
    cached_tokens: Count = Field(description="tokens of the prompt whose KV was there already")
    cache_write_tokens: Count = Field(description="always 0")


class ReasoningTokens(BaseModel):
    reasoning_tokens: Count = Field(description="tokens of reasoning")


class ResponseUsage(BaseModel):
    input_tokens: Count = Field(description="tokens in the prompt")
    input_tokens_details: CachedTokens
    output_tokens: Count = Field(description="generated tokens")
    output_tokens_details: ReasoningTokens
    total_tokens: Count = Field(description="the sum of both")


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = Field(description="why the output is cut off")


class Response(BaseModel):
    """A response. Further fields repeat the request."""

    id: str = Field(description="`resp_` and the request's id")
    object: Literal["response"]
    created_at: Count = Field(description="seconds since 1970")
    status: Literal["completed", "incomplete"] = Field(description="`incomplete`: the output is cut off")
    incomplete_details: IncompleteDetails | None = Field(description="why the output is cut off")
    model: str = Field(description="the model that answered")
    output: list[dict[str, Any]] = Field(
        min_length=1, description="items of type `message`, `reasoning` and `function_call`"
    )
    usage: ResponseUsage
    metrics: Metrics


class DeletedResponse(BaseModel):
    id: str = Field(description="id of the response that was deleted")
    object: Literal["response"]
    deleted: Literal[True]
