"""The answers of Anthropic's Messages API, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from coordinator.api.schema.answers import Count, Metrics


class AnthropicErrorDetails(BaseModel):
    type: str = Field(description="class of the error")
    message: str = Field(description="the reason, which names the parameter")


class AnthropicError(BaseModel):
    """Why a request failed, in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str = Field(description="the request's id")


class MessageUsage(BaseModel):
    input_tokens: Count = Field(description="tokens in the prompt whose KV was not there already")
    cache_read_input_tokens: Count = Field(description="the other tokens of the prompt")
    cache_creation_input_tokens: Count = Field(description="always 0")
    output_tokens: Count = Field(description="generated tokens")


class MessageAnswer(BaseModel):
    """A message of the assistant."""

    id: str = Field(description="`msg_` and the request's id")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str = Field(description="the model that answered")
    content: list[dict[str, Any]] = Field(description="blocks of type `text`, `thinking` and `tool_use`")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] = (
        Field(description="why the output ended")
    )
    stop_sequence: str | None = Field(description="the stop sequence that ended the output")
    usage: MessageUsage
    metrics: Metrics


class TokenCount(BaseModel):
    input_tokens: Count = Field(description="tokens in the prompt")
