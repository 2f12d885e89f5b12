"""The schemas of the HTTP edge's bodies and answers, as OpenAPI has them. Pure.

Bodies: the models' own schemas (`openai_schema`), and with them the bounds that are checked later, by the names under
which clients know them, each with the constant that it is checked by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from coordinator.generation_request import (
    BAD_WORD_CHARS_MAX,
    CHOICES_MAX,
    MESSAGES_MAX,
    PROMPT_TOKENS_MAX,
    REQUEST_ID_CHARS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    UINT32_MAX,
    UINT64_MAX,
)
from coordinator.openai_schema import (
    DETOKENIZE_TOKENS_MAX,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from coordinator.tool_schema import TOOLS_MAX
from coordinator.unserved_parameters import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_MESSAGE,
    NEUTRAL_STRUCTURED_OUTPUTS,
)
from outrider.sampling_params import (
    FLOAT32_ZERO_MAX,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_DRAFT_PROBS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SPECULATIVE_TOKENS,
    MAX_STOP_TOKEN_IDS,
)

Schema = dict[str, Any]

_TOKEN_ID: Final[Schema] = {"type": "integer", "minimum": 0}
_TOKEN_IDS: Final[Schema] = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_PROMPT_TOKEN_IDS: Final[Schema] = _TOKEN_IDS | {"maxItems": PROMPT_TOKENS_MAX}
_STOP_STRING: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": STOP_STRING_CHARS_MAX}
_LOGPROBS: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}


def _number(**bounds: float) -> Schema:
    return {"type": "number"} | bounds


def _integer(lowest: int, highest: int = UINT32_MAX) -> Schema:
    return {"type": "integer", "minimum": lowest, "maximum": highest}


def _strings(most: int, longest: int) -> Schema:
    return {
        "type": "array",
        "maxItems": most,
        "items": {"type": "string", "minLength": 1, "maxLength": longest},
    }


def _at_most(count: int, schema: Schema) -> Schema:
    """Entries that are told twice count once, which no keyword says."""
    return schema | {"description": f"at most {count} different ones"}


def _message(roles: list[str], *required: str, **fields: Schema) -> Schema:
    return {"properties": {"role": {"enum": roles}, **fields}, "required": ["role", *required]}


# What depends on another field. Left out, null and, of lists, empty are the same.
_NONE: Final[Schema] = {"type": "null"}
_NO_CALLS: Final[Schema] = {"type": ["array", "null"], "maxItems": 0}
_SOME: Final[Schema] = {"type": ["string", "array"]}
_VARIANTS: Final[Mapping[str, Schema]] = {
    "ChatMessage": {
        "anyOf": [
            _message(
                ["system", "developer", "user"],
                "content",
                content=_SOME,
                tool_calls=_NO_CALLS,
                tool_call_id=_NONE,
            ),
            _message(["assistant"], "content", content=_SOME, tool_call_id=_NONE),
            _message(
                ["assistant"], "tool_calls", tool_calls={"type": "array", "minItems": 1}, tool_call_id=_NONE
            ),
            _message(
                ["tool"],
                "content",
                "tool_call_id",
                content=_SOME,
                tool_calls=_NO_CALLS,
                tool_call_id={"type": "string"},
            ),
        ]
    },
    "TokenizeBody": {
        "oneOf": [
            {"properties": {"prompt": {"type": "string"}, "messages": _NONE}, "required": ["prompt"]},
            {"properties": {"messages": {"type": "array"}, "prompt": _NONE}, "required": ["messages"]},
        ]
    },
}
# Schema -> property -> what may stand there, null aside where the model permits it.
_BOUNDS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "CompletionBody": {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                _PROMPT_TOKEN_IDS,
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
                {"type": "array", "items": _PROMPT_TOKEN_IDS, "minItems": 1, "maxItems": 1},
            ],
            "description": "at most 1 MiB of text, or token ids of the model",
        },
        "logprobs": _LOGPROBS,
        "best_of": _integer(1, CHOICES_MAX),
    },
    "ChatBody": {
        "messages": {"minItems": 1, "maxItems": MESSAGES_MAX},
        "max_completion_tokens": _integer(0),
        "top_logprobs": _LOGPROBS,
        "tools": {"maxItems": TOOLS_MAX},
    },
    "TokenizeBody": {"messages": {"maxItems": MESSAGES_MAX}},
    "DetokenizeBody": {"tokens": {"items": _TOKEN_ID, "maxItems": DETOKENIZE_TOKENS_MAX}},
    "Speculation": {
        "num_speculative_tokens": _integer(0, MAX_SPECULATIVE_TOKENS),
        "num_draft_probs": _integer(0, MAX_DRAFT_PROBS),
        "draft_probs_bits": {"enum": [0, *range(4, 17)]},
    },
    "StructuredOutputs": {"choice": {"minItems": 1, "items": {"type": "string", "minLength": 1}}},
}
_GENERATION_BOUNDS: Final[Mapping[str, Schema]] = {
    "max_tokens": _integer(0) | {"description": "0 only with echo or prompt_logprobs"},
    "min_tokens": _integer(0),
    "temperature": _number(minimum=0, maximum=2),
    "top_p": _number(exclusiveMinimum=FLOAT32_ZERO_MAX, maximum=1),
    "top_k": _integer(-1) | {"description": "0 and -1 keep all"},
    "min_p": _number(minimum=0, maximum=1),
    "typical_p": _number(exclusiveMinimum=FLOAT32_ZERO_MAX, maximum=1),
    "presence_penalty": _number(minimum=-2, maximum=2),
    "frequency_penalty": _number(minimum=-2, maximum=2),
    "repetition_penalty": _number(exclusiveMinimum=FLOAT32_ZERO_MAX, maximum=10),
    "logit_bias": _at_most(
        MAX_LOGIT_BIAS,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _number(minimum=-100, maximum=100),
        },
    ),
    "bad_words": _strings(MAX_BAD_WORDS, BAD_WORD_CHARS_MAX),
    "allowed_token_ids": _at_most(MAX_ALLOWED_TOKEN_IDS, _TOKEN_IDS),
    "seed": _integer(0, UINT64_MAX),
    "n": _integer(1, CHOICES_MAX),
    "stop": {"anyOf": [_STOP_STRING, _strings(STOP_STRINGS_MAX, STOP_STRING_CHARS_MAX)]},
    "stop_token_ids": _at_most(MAX_STOP_TOKEN_IDS, {"type": "array", "items": _TOKEN_ID}),
    "prompt_logprobs": _LOGPROBS,
    "request_id": {"type": "string", "pattern": f"^[ -~]{{0,{REQUEST_ID_CHARS_MAX}}}$"},
}
_NEUTRAL: Final = {
    "CompletionBody": NEUTRAL_COMPLETION,
    "ChatBody": NEUTRAL_CHAT,
    "ChatMessage": NEUTRAL_MESSAGE,
    "StructuredOutputs": NEUTRAL_STRUCTURED_OUTPUTS,
}

# Answers.

TEXT: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(kind: str, choice: Mapping[str, Schema]) -> Schema:
    own = {
        "index": _COUNT,
        **choice,
        "logprobs": _or_null({"type": "object"}),
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "stop_reason": {"type": ["string", "integer", "null"]},
    }
    return _object(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": TEXT,
            "choices": _array(_object(own)) | {"minItems": 1, "maxItems": CHOICES_MAX},
            "usage": _object({
                "prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT,
            }),
            "metrics": _object({"decoding_mode": TEXT, "speculative_decoding": {"type": "object"}}),
        },
    )  # fmt: skip


_CALL: Final = _object({
    "id": TEXT, "type": {"const": "function"}, "function": _object({"name": TEXT, "arguments": TEXT}),
})  # fmt: skip
_MODEL: Final = _object(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": TEXT,
        "max_model_len": _COUNT,
        "num_target_workers": _COUNT,
        "num_draft_workers": _COUNT,
    }
)
_ANSWERS: Final[Mapping[str, Schema]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": TEXT,
                    "type": TEXT,
                    "param": _or_null(TEXT) | {"description": "the parameter to change"},
                    "code": _or_null(TEXT),
                }
            )
        }
    ),
    "Completion": _answer("text_completion", {"text": TEXT}),
    "ChatCompletion": _answer(
        "chat.completion",
        {
            "message": _object(
                {"role": {"const": "assistant"}, "content": _or_null(TEXT)}, tool_calls=_array(_CALL)
            )
        },
    ),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": _array({"$ref": "#/components/schemas/Model"})}),
    "Health": _object(
        {
            "status": TEXT,
            "registry": {"enum": ["ok", "degraded"]},
            "num_target_workers": _COUNT,
            "num_draft_workers": _COUNT,
            "target_weights": _array(
                _object(
                    {
                        "model": TEXT,
                        "weights_fingerprint": TEXT,
                        "numerics": TEXT,
                        "num_target_workers": _COUNT,
                    }
                )
            ),
            "excluded_workers": _array(_object({"worker_id": TEXT, "pool": TEXT, "reason": TEXT})),
            "useless_drafts": _array(_object({"worker_id": TEXT, "model": TEXT})),
        }
    ),
    "Tokens": _object({"count": _COUNT, "max_model_len": _or_null(_COUNT), "tokens": _array(_TOKEN_ID)}),
    "Text": _object({"prompt": TEXT}),
    "Alive": _object({"status": TEXT}),
}


def component_schemas() -> dict[str, Schema]:
    """By name: of what is sent and what is answered."""
    schemas: dict[str, Schema] = {}
    for model in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
        own = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= own.pop("$defs", {})
        schemas[model.__name__] = own
    for name, schema in schemas.items():
        schema |= _VARIANTS.get(name, {})
        bounds = dict(_BOUNDS.get(name, {}))
        if name in ("CompletionBody", "ChatBody"):
            bounds = {**_GENERATION_BOUNDS, **bounds}
        properties = schema["properties"]
        for field, bound in bounds.items():
            properties[field] = _bounded(properties[field], bound)
        for field, values in _NEUTRAL.get(name, {}).items():
            properties[field] = {
                "enum": [*values, None],
                "description": "not served; accepted where it changes nothing",
            }
    return {**schemas, **_ANSWERS}


def _bounded(schema: Schema, bound: Schema) -> Schema:
    """A property's schema with its bounds; null stays where it may stand."""
    branches = schema.get("anyOf", [])
    is_optional = {"type": "null"} in branches
    meaning = [branch for branch in branches if branch != {"type": "null"}]
    own = meaning[0] if len(meaning) == 1 else {} if meaning else schema
    bounded = {name: value for name, value in own.items() if name not in ("default", "title")} | bound
    if "default" in schema and not is_optional:
        bounded["default"] = schema["default"]
    return _or_null(bounded) if is_optional else bounded
