"""The calls of the Responses API, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from coordinator.api.responses.response_answers import DeletedResponse, Response
from coordinator.api.responses.response_body import ResponseBody
from coordinator.api.schema.openapi_parts import RETRY_AFTER, Operation, error, generated, json_answer, parameter

RESPONSE_MODELS: Final[tuple[type[BaseModel], ...]] = (ResponseBody, Response, DeletedResponse)

_EVENTS: Final = "the data of each event is an event of the Responses API as JSON, the last one with the whole answer"
_ID: Final = parameter("response_id", "The response's id.", where="path")
_GONE: Final = {
    "404": error("It is not stored, or no longer."),
    "429": error("Everything is full.", RETRY_AFTER),
    "503": error("Redis does not answer.", RETRY_AFTER),
}

RESPONSE_OPERATIONS: Final = (
    Operation(
        "/v1/responses",
        "responses",
        "Answers a conversation, in the form of OpenAI's Responses API.",
        generated(Response, _EVENTS),
        ResponseBody,
        can_resume=False,
    ),
    Operation(
        "/v1/responses/{response_id}",
        "response",
        "A stored response.",
        {"200": json_answer(Response), **_GONE},
        None,
        [_ID],
    ),
    Operation(
        "/v1/responses/{response_id}",
        "delete_response",
        "Deletes a stored response.",
        {"200": json_answer(DeletedResponse), **_GONE},
        None,
        [_ID],
        method="delete",
    ),
)
