"""The OpenAPI document of the HTTP API. Pure; built on the first request for it.

Its schemas are the models' own: of the bodies those that check them (`openai_schema`), of the answers those of
`answers`. The rooms of the other APIs have tables of their own. Bodies are read by hand, so that each error names its
parameter as OpenAI's does, and FastAPI knows nothing of them; so what it would tell of the routes stands here.

Invariant: the service refuses whatever this document refuses. It refuses more: no schema expresses bounds that depend
on the model, its context and vocabulary, or on two parameters together.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from coordinator.api.anthropic.paths import ANTHROPIC_MODELS, ANTHROPIC_OPERATIONS
from coordinator.api.batches.paths import BATCH_MODELS, BATCH_OPERATIONS
from coordinator.api.responses.paths import RESPONSE_MODELS, RESPONSE_OPERATIONS
from coordinator.api.schema import answers
from coordinator.api.schema.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from coordinator.api.schema.openapi_parts import (
    REF,
    TEXT,
    Operation,
    Schema,
    as_json,
    error,
    event_stream,
    generated,
    json_answer,
    locked,
    parameter,
    ref,
    refused,
)
from coordinator.intake.generation_request import CANARY_KEY_CHARS_MAX, REQUEST_ID_CHARS_MAX
from outrider import __version__

_MODELS: Final[tuple[type[BaseModel], ...]] = (
    *(CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, answers.Error, answers.Completion),
    *(answers.ChatCompletion, answers.Models, answers.Health, answers.Alive, answers.Tokens, answers.Text),
    *(answers.Version, answers.Load),
    *RESPONSE_MODELS,
    *ANTHROPIC_MODELS,
    *BATCH_MODELS,
)


@functools.cache
def openapi_json() -> bytes:
    """Returns the document as it is served."""
    return json.dumps(openapi_document()).encode()


def openapi_document() -> Schema:
    """As OpenAPI 3.1 has it, whose schemas are JSON Schema's."""
    schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=REF)[1]["$defs"]
    about = "an API key, if the coordinator has any (`--api-keys`)"
    paths: dict[str, Schema] = {}
    rows = [Operation(*row) for row in _OPERATIONS]
    for each in (*rows, *RESPONSE_OPERATIONS, *ANTHROPIC_OPERATIONS, *BATCH_OPERATIONS):
        paths.setdefault(each.path, {})[each.verb] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": __version__,
            "description": "OpenAI's and Anthropic's calls, and calls for operators. A parameter that changes the "
            "output is honoured or refused by name.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": about},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": about},
            },
        },
    }


def _operation(told: Operation) -> Schema:
    is_open = told.name in ("health", "livez", "ping", "version")  # to those without a key
    operation: Schema = {
        "operationId": told.name,
        "summary": told.summary,
        "parameters": [*told.parameters],
        "responses": told.responses if is_open else told.responses | locked(told.error),
        # Or nothing, where there are no keys.
        "security": [{}] if is_open else [{"key": []}, {"x-api-key": []}, {}],
    }
    if told.upload is not None:
        form = {"multipart/form-data": {"schema": ref(told.upload)}}
        operation["requestBody"] = {"required": True, "content": form}
        return operation | {"responses": operation["responses"] | refused(told.error)}
    if told.body is None:
        return operation
    operation["requestBody"] = {"required": True, "content": as_json(ref(told.body))}
    headers = _HEADERS if told.can_resume else _HEADERS[:1] + _HEADERS[2:]
    return operation | {"parameters": [*headers], "responses": operation["responses"] | refused(told.error)}


_LAST_EVENT: Final = parameter(
    "Last-Event-ID",
    "the id of the last event that came: what follows it is sent. The request goes by its X-Request-Id",
)
_HEADERS: Final = (
    parameter(
        "X-Request-Id",
        f"1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters; comes back, made up where it is left out",
    ),
    _LAST_EVENT,
    parameter(
        "X-Canary-Key",
        "requests with the same one get the same arm while a canary lasts; at most "
        f"{CANARY_KEY_CHARS_MAX} characters; `prompt_cache_key`, `user` or the request's id where it is left out",
    ),
)
_EVENTS: Final = "the data of each event is a chunk as JSON, an error, or at last [DONE]"
_COMPLETION: Final = generated(answers.Completion, _EVENTS)
_CHAT: Final = generated(answers.ChatCompletion, _EVENTS)
_RESUMED: Final[Schema] = _CHAT | {
    "200": {"description": "The rest of its events.", "content": event_stream(_EVENTS)},
    "400": error("It cannot be resumed, or not behind this event."),
    "404": error("There is no such stream, or no longer."),
}
_NAME: Final = parameter("name", "The model's name.", where="path")
_STREAM: Final = parameter("request_id", "The request's id, percent-encoded, slashes as well.", where="path")
_MODEL: Final = {"200": json_answer(answers.Model), "404": error("No such model.")}
_UNKNOWN: Final = {"404": error("The model is not served.")}
_TOKENS: Final = {"200": json_answer(answers.Tokens)} | _UNKNOWN
_TEXT: Final = {"200": json_answer(answers.Text)} | _UNKNOWN
_NOT_LIVE: Final = json_answer(answers.Health, "No target worker is live.")
_PLAIN: Final = {"description": "Done.", "content": {"text/plain": {"schema": TEXT}}}
_EMPTY: Final = {"description": "Without a body."}
_OBJECT: Final = {"description": "Done.", "content": as_json({"type": "object"})}

# As `Operation` has them: path, name, summary, answers, body, parameters.
_OPERATIONS: Final[tuple[tuple[Any, ...], ...]] = (
    ("/v1/completions", "completions", "Completes a prompt.", _COMPLETION, CompletionBody),
    ("/v1/chat/completions", "chat_completions", "Answers a conversation.", _CHAT, ChatBody),
    ("/v1/streams/{request_id}", "resume", "Goes on with a stream that broke, at any replica.", _RESUMED, None,
     [_STREAM, _LAST_EVENT]),
    ("/v1/models", "models", "The models served now.", {"200": json_answer(answers.Models)}),
    ("/v1/models/{name}", "model", "One of them.", _MODEL, None, [_NAME]),
    ("/tokenize", "tokenize", "Token ids of a text or a conversation.", _TOKENS, TokenizeBody),
    ("/detokenize", "detokenize", "The text of token ids.", _TEXT, DetokenizeBody),
    ("/health", "health", "Whether a target worker is usable.", {"200": json_answer(answers.Health), "503": _NOT_LIVE}),
    ("/ping", "ping", "Whether a target worker is usable, without a body.", {"200": _EMPTY, "503": _EMPTY}),
    ("/version", "version", "The version of this server.", {"200": json_answer(answers.Version)}),
    ("/load", "load", "The number of sequences at the replica that answers.", {"200": json_answer(answers.Load)}),
    ("/livez", "livez", "Whether this replica is alive.", {"200": json_answer(answers.Alive)}),
    ("/metrics", "metrics", "Of the replica that answers.", {"200": _PLAIN}),
    ("/openapi.json", "openapi", "This document.", {"200": _OBJECT}),
)  # fmt: skip
