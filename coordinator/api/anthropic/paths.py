"""The calls of Anthropic's Messages API, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from coordinator.api.anthropic.errors import PATHS_PREFIX
from coordinator.api.anthropic.message_answers import AnthropicError, MessageAnswer, TokenCount
from coordinator.api.anthropic.message_body import CountTokensBody, MessageBody
from coordinator.api.schema.openapi_parts import RETRY_AFTER, Operation, error, generated, json_answer

ANTHROPIC_MODELS: Final[tuple[type[BaseModel], ...]] = (
    MessageBody, CountTokensBody, MessageAnswer, TokenCount, AnthropicError,
)  # fmt: skip

_EVENTS: Final = "the data of each event is an event of the Messages API as JSON"

ANTHROPIC_OPERATIONS: Final = (
    Operation(
        PATHS_PREFIX,
        "messages",
        "Answers a conversation, in the form of Anthropic's Messages API.",
        generated(MessageAnswer, _EVENTS, AnthropicError),
        MessageBody,
        can_resume=False,
        error=AnthropicError,
    ),
    Operation(
        f"{PATHS_PREFIX}/count_tokens",
        "count_tokens",
        "Tokens of a conversation, in the form of Anthropic's Messages API.",
        {
            "200": json_answer(TokenCount),
            "404": error("The model is not served.", body=AnthropicError),
            "429": error("Everything is full.", RETRY_AFTER, body=AnthropicError),
        },
        CountTokensBody,
        can_resume=False,
        error=AnthropicError,
    ),
)
