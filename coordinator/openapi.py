"""The OpenAPI document of the HTTP edge. Pure; made once, when somebody asks for it.

Bodies are read by hand (`openapi_schema`), so that each error names its parameter as OpenAI's does, and FastAPI knows
nothing of them. What it would have to be told stands here and, body by body, in `openapi_components`.

Invariant: what this document refuses, the service refuses. The other way round there is more: what depends on the
model, its context and vocabulary, or on two parameters together, no schema says.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel

from coordinator.generation_request import CANARY_KEY_CHARS_MAX, REQUEST_ID_CHARS_MAX
from coordinator.json_size import ITEMS_MAX, PARTS_MAX
from coordinator.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from coordinator.openapi_components import TEXT, Schema, component_schemas
from outrider import __version__


@functools.cache
def openapi_json() -> bytes:
    """The document as it is served."""
    return json.dumps(openapi_document()).encode()


def openapi_document() -> dict[str, Any]:
    """As OpenAPI 3.1 has it, whose schemas are JSON Schema's."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": __version__,
            "description": "OpenAI's completion calls, and what an operator needs beside them. A parameter is honoured "
            "or refused by name, never dropped.",
        },
        "paths": {
            "/v1/completions": _post("completions", "Completes a prompt.", CompletionBody, _GENERATED["Completion"]),
            "/v1/chat/completions": _post(
                "chat_completions", "Answers a conversation.", ChatBody, _GENERATED["ChatCompletion"]
            ),
            "/v1/streams/{request_id}": _get(
                "resume", "Goes on with a stream that broke, at any replica.", _RESUMED, [_ID_IN_PATH, _LAST_EVENT]
            ),
            "/v1/models": _get("models", "The models served now.", {"200": _json("Models")}),
            "/v1/models/{name}": _get(
                "model", "One of them.", {"200": _json("Model"), "404": _error("No such model.")}
            )
            | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": TEXT}]},
            "/tokenize": _post(
                "tokenize", "Token ids of a text or a conversation.", TokenizeBody, {"200": _json("Tokens")}
            ),
            "/detokenize": _post(
                "detokenize", "The text of token ids.", DetokenizeBody, {"200": _json("Text")}
            ),
            "/health": _get(
                "health",
                "Whether a target worker is usable.",
                {"200": _json("Health"), "503": _json("Health", "No target worker is live.")},
            ),
            "/livez": _get("livez", "Whether this replica is alive.", {"200": _json("Alive")}),
            "/metrics": _get("metrics", "Of the replica that answers.", {"200": _content("text/plain", TEXT)}),
            "/openapi.json": _get(
                "openapi", "This document.", {"200": _content("application/json", {"type": "object"})}
            ),
        },
        "components": {
            "schemas": component_schemas(),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "an API key, where the coordinator was given some (`--api-keys`)",
                }
            },
        },
    }  # fmt: skip


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(media_type: str, schema: Schema, description: str = "Done.") -> Schema:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _json(name: str, description: str = "Done.") -> Schema:
    return _content("application/json", _ref(name), description)


_RETRY_AFTER: Final[Schema] = {
    "Retry-After": {
        "required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}, "description": "seconds",
    }
}  # fmt: skip


def _should_not_retry(*, is_always: bool = True) -> Schema:
    return {
        "X-Should-Retry": {
            "required": is_always, "schema": {"enum": ["false"]},
            "description": "the same request would be refused again; OpenAI's clients go by it",
        }
    }  # fmt: skip


def _error(description: str, headers: Schema | None = None) -> Schema:
    response = _json("Error", description)
    return response if headers is None else response | {"headers": headers}


_OPEN: Final = ("health", "livez")  # to those without a key
_KEY: Final[list[Schema]] = [{"key": []}, {}]  # or nothing, where there are no keys
_LOCKED: Final[Schema] = {
    "401": _error("No API key, or one that is not known."),
    "403": _error("The key is not good for this."),
}
_EVENT: Final[Schema] = {
    "type": "object",
    "properties": {"data": TEXT},
    "required": ["data"],
    "description": "of each event: a chunk as JSON, an error, or [DONE]",
}


_ANOTHER_RUN: Final = "What is to be resumed is another request, or was generated by other weights."


def _generated(name: str) -> Schema:
    whole = _json(name, "The answer; where `stream` is true, events, whose last one is `data: [DONE]`.")
    whole["content"]["text/event-stream"] = {"schema": _EVENT}
    return {
        "200": whole,
        "404": _error("The model is not served."),
        "409": _error(_ANOTHER_RUN, _should_not_retry()),
        "429": _error("Everything is full.", _RETRY_AFTER),
        "499": {"description": "The client went away first; nobody is left to read it."},
        "503": _error(
            "No target worker is live, or the ones there were are lost; with the code `poisonous_request` they were "
            "lost to this request.",
            _RETRY_AFTER | _should_not_retry(is_always=False),
        ),
        "504": _error("The request's time ran out.", _should_not_retry()),
    }


_GENERATED: Final = {name: _generated(name) for name in ("Completion", "ChatCompletion")}
_REQUEST_ID: Final[Schema] = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "schema": TEXT,
    "description": f"1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters; comes back, made up where it is left out",
}


_LAST_EVENT: Final[Schema] = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": TEXT,
    "description": "the id of the last event that came: what follows it is sent. The request goes by its X-Request-Id",
}
_CANARY_KEY: Final[Schema] = {
    "name": "X-Canary-Key",
    "in": "header",
    "required": False,
    "schema": TEXT,
    "description": "requests with the same one get the same arm while a canary lasts; at most "
    f"{CANARY_KEY_CHARS_MAX} characters; `prompt_cache_key`, `user` or the request's id where it is left out",
}
_ID_IN_PATH: Final[Schema] = {
    "name": "request_id",
    "in": "path",
    "required": True,
    "schema": TEXT,
    "description": "The request's id, percent-encoded, slashes as well.",
}
_RESUMED: Final[Schema] = _GENERATED["ChatCompletion"] | {
    "200": _content("text/event-stream", _EVENT, "The rest of its events."),
    "400": _error("It cannot be resumed, or not behind this event."),
    "404": _error("There is no such stream, or no longer."),
}


def _get(name: str, summary: str, responses: Schema, parameters: Sequence[Schema] = ()) -> Schema:
    return {
        "get": {
            "operationId": name,
            "summary": summary,
            "parameters": list(parameters),
            "responses": responses if name in _OPEN else responses | _LOCKED,
            "security": [{}] if name in _OPEN else _KEY,
        }
    }


def _post(name: str, summary: str, body: type[BaseModel], responses: Schema) -> Schema:
    refused = {
        "400": _error(
            "Refused; `param` names the parameter. Also for a body of more than 8 MiB, or one with more JSON in it "
            f"than {ITEMS_MAX} values or {PARTS_MAX} objects, lists and members."
        ),
        "408": _error("The body has not come within a minute."),
    }
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "parameters": [_REQUEST_ID, _LAST_EVENT, _CANARY_KEY],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(body.__name__)}},
            },
            "responses": responses | refused | _LOCKED,
            "security": _KEY,
        }
    }
