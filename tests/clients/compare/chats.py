"""Kinds of requests to `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from tests.clients.compare.kinds import MESSAGES, OMITTED, Kind, chat

_FUNCTION = {
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
_NAMED = {"type": "function", "function": {"name": "weather"}}


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


_CONVERSATIONS: dict[str, Any] = {
    "system": [{"role": "system", "content": "Be short."}, *MESSAGES],
    "developer": [{"role": "developer", "content": "Be short."}, *MESSAGES],
    "assistant": [*MESSAGES, {"role": "assistant", "content": "Well."}, *MESSAGES],
    "assistant null": [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES],
    "assistant without content": [*MESSAGES, {"role": "assistant"}, *MESSAGES],
    "assistant with a refusal": [*MESSAGES, {"role": "assistant", "content": None, "refusal": "No."}, *MESSAGES],
    "tool": [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ],
    "tool without id": [*MESSAGES, {"role": "tool", "content": "Sunny"}],
    "tool call of bad arguments": [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [_CALL | {"function": {"name": "weather", "arguments": "{"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ],
    "function": [*MESSAGES, {"role": "function", "name": "weather", "content": "Sunny"}],
    "name": [{"role": "user", "content": "Hello", "name": "Anna"}],
    "unknown role": [{"role": "wizard", "content": "Hello"}],
    "no role": [{"content": "Hello"}],
    "no content": [{"role": "user"}],
    "null content": _user(None),
    "number as content": _user(3),
    "empty content": _user(""),
    "text parts": _user([{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]),
    "no parts": _user([]),
    "text part without text": _user([{"type": "text"}]),
    "part without type": _user([{"text": "Hello"}]),
    "strings as parts": _user(["Hello"]),
    "image": _user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]),
    "audio": _user([{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]),
    "file": _user([{"type": "file", "file": {"file_id": "x"}}]),
    "unknown part": _user([{"type": "x", "x": 1}]),
    "unknown field": [{"role": "user", "content": "Hello", "x": 1}],
    "empty": [],
    "missing": OMITTED,
    "null": None,
    "string": "Hello",
    "string in list": ["Hello"],
    "too long": _user("a " * 3000),
    "reasoning": [*MESSAGES, {"role": "assistant", "content": "Well.", "reasoning": "Hm."}, *MESSAGES],
}
_VALUES: dict[str, list[Any]] = {
    "max_tokens": [0, 1, -1, 100000, None, OMITTED],
    "max_completion_tokens": [1, 0, 4],
    "temperature": [-1, 3, None],
    "top_p": [0, 2],
    "n": [0, 2],
    "stop": ["e", ["a", "e"], 3],
    "seed": [7],
    "logprobs": [True, False, 1],
    "top_logprobs": [2],
    "logit_bias": [{"5": 10}, {"x": 1}],
    "presence_penalty": [0.5, 3],
    "frequency_penalty": [0.5],
    "user": ["someone"],
    "store": [True, False],
    "metadata": [{"a": "b"}],
    "service_tier": ["auto", "flex"],
    "reasoning_effort": ["low", "none", "x"],
    "parallel_tool_calls": [True, False],
    "modalities": [["text"], ["text", "audio"]],
    "prediction": [{"type": "content", "content": "Hello"}],
    "verbosity": ["low"],
    "prompt_cache_key": ["key"],
    "safety_identifier": ["someone"],
    "web_search_options": [{}],
    "echo": [True],
    "add_generation_prompt": [False],
    "chat_template_kwargs": [{"a": 1}, {"enable_thinking": False}, "x"],
    "chat_template": ["{{ messages[0].content }}"],
    "documents": [[{"title": "A", "text": "B"}]],
    "include_reasoning": [True, False],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "truncate_prompt_tokens": [3],
    "prompt_logprobs": [1],
    "min_tokens": [2],
    "ignore_eos": [True],
    "unknown_field": [1],
    "model": [OMITTED, None, "unknown", 3, ""],
    "stream": ["x", None],
    "stream_options": [{"include_usage": True}, None],
    "functions": [[_FUNCTION]],
    "function_call": ["auto"],
    "structured_outputs": [{"choice": ["yes", "no"]}, {"regex": "[0-9]{3}"}, {"grammar": 'root ::= "yes" | "no"'}],
}
_SCHEMAS: dict[str, Any] = {
    "integer": {"type": "integer", "minimum": 3, "maximum": 5},
    "number": {"type": "number"},
    "string": {"type": "string", "minLength": 1, "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}$"},
    "format": {"type": "string", "format": "date"},
    "enum": {"enum": ["a", "b"]},
    "const": {"const": 3},
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "types": {"type": ["boolean", "null"]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    "prefix": {"type": "array", "prefixItems": [{"const": 1}], "items": False, "minItems": 1},
    "anyOf": {"anyOf": [{"const": 1}, {"const": 2}]},
    "oneOf": {"oneOf": [{"const": 1}, {"const": 2}]},
    "allOf": {"allOf": [{"type": "integer"}, {"enum": [1, 2]}]},
    "ref": {"$defs": {"a": {"const": 1}}, "$ref": "#/$defs/a"},
    "unknown ref": {"$ref": "#/$defs/a"},
    "additional": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    "not": {"not": {"type": "object"}},
    "unique": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}},
    "unknown type": {"type": "x"},
    "true": True,
    "empty": {},
}


def chats() -> list[Kind]:
    """All of them."""
    kinds = [chat("plain"), chat("top_logprobs", logprobs=True, top_logprobs=2)]
    kinds += [chat("top_logprobs out of bounds", logprobs=True, top_logprobs=21)]
    kinds += [chat(f"messages {name}", messages=messages) for name, messages in _CONVERSATIONS.items()]
    for field, values in _VALUES.items():
        kinds += [
            chat(f"{field} {number}", **{field: value}, compares_text=field != "temperature")
            for number, value in enumerate(values)
        ]
    return [*kinds, *_formats(), *_tools(), *_continued(), *_streams()]


def _formats() -> list[Kind]:
    forms: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"const": 1}}},
        {"type": "json_schema", "json_schema": {"name": "a b", "schema": {"const": 1}}},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "x"},
        {},
        "json_object",
        None,
    ]
    kinds = [chat(f"response_format {number}", response_format=form) for number, form in enumerate(forms)]
    for name, schema in _SCHEMAS.items():
        form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
        kinds.append(chat(f"schema {name}", response_format=form, max_tokens=24))
    return kinds


def _tools() -> list[Kind]:
    choices = {
        "default": OMITTED,
        "none": "none",
        "auto": "auto",
        "required": "required",
        "named": _NAMED,
        "unknown name": {"type": "function", "function": {"name": "x"}},
        "unknown": "x",
        "null": None,
        "allowed": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [_NAMED]}},
    }
    kinds = [
        chat(
            f"tool_choice {name}{' stream' if stream else ''}", tools=_TOOLS, tool_choice=choice, max_tokens=60, **more
        )
        for name, choice in choices.items()
        for stream, more in ((False, {}), (True, {"stream": True}))
    ]
    wrong: dict[str, Any] = {
        "empty": [],
        "without function": [{"type": "function"}],
        "unknown type": [{"type": "x", "function": _FUNCTION}],
        "without parameters": [{"type": "function", "function": {"name": "weather"}}],
        "bad name": [{"type": "function", "function": {"name": "a b!"}}],
        "strict": [{"type": "function", "function": _FUNCTION | {"strict": True}}],
        "custom": [{"type": "custom", "custom": {"name": "a"}}],
        "string": "x",
        "null": None,
        "twice the same": [*_TOOLS, *_TOOLS],
    }
    kinds += [chat(f"tools {name}", tools=tools) for name, tools in wrong.items()]
    return [*kinds, chat("tool_choice without tools", tool_choice="required")]


def _continued() -> list[Kind]:
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    return [
        chat("continued", messages=begun, continue_final_message=True, add_generation_prompt=False),
        chat("continued and prompted", messages=begun, **both),
        chat("last is the assistant", messages=begun),
    ]


def _streams() -> list[Kind]:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "usage": {"stream_options": {"include_usage": True}},
        "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "obfuscation": {"stream_options": {"include_obfuscation": False}},
        "logprobs": {"logprobs": True, "top_logprobs": 1},
        "n": {"n": 2},
        "stop": {"stop": "e"},
        "one token": {"max_tokens": 1},
        "json": {"response_format": {"type": "json_object"}},
        "unknown model": {"model": "unknown"},
        "bad": {"temperature": -1},
    }
    return [chat(f"stream {name}", stream=True, **fields) for name, fields in options.items()]
