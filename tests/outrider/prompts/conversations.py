"""Conversations as clients send them, and the variables that come with them."""

from __future__ import annotations

from typing import Any, Final

Conversation = list[dict[str, Any]]

_HI: Conversation = [{"role": "user", "content": 'Hé, a <b>bold</b> "word" <|im_end|>'}]
_SYSTEM: Conversation = [{"role": "system", "content": " Be kind. "}]


def _turn(arguments: Any, content: Any, call_id: str = "call_0123456789abcdef", **others: Any) -> Conversation:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        *_HI,
        {"role": "assistant", "content": content, "tool_calls": [call], **others},
        {"role": "tool", "tool_call_id": call_id, "content": '{"sky": "blue"}'},
        {"role": "user", "content": "Thanks"},
    ]


CONVERSATIONS: Final[dict[str, Conversation]] = {
    "a question": _HI,
    "with a system message": _SYSTEM + _HI,
    "several turns": [*_HI, {"role": "assistant", "content": "So?"}, {"role": "user", "content": "Then\nwhat"}],
    "an empty text": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    "a part in a conversation": [
        *_SYSTEM, {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "So?"},
    ],
    "reasoning": [*_HI, {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}, *_HI],
    "a call": _turn('{"city": "Köln", "days": 2}', ""),
    "a call with a content of null": _turn('{"city": "Köln", "days": 2}', None),
    "a call beside a text and thoughts": _turn('{"city": "Köln"}', "I look.", reasoning_content="Hm", thinking=""),
    "a call with a short id": _turn('{"city": "Köln"}', "", "a1B2c3D4e"),
    "a call without arguments": _turn("{}", ""),
    "a call whose arguments are no JSON": _turn('{"city": ', ""),
}  # fmt: skip

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the <weather> & more: Grüße.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": None}},
                "required": ["city"],
            },
        },
    }
]

VARIABLES: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "tools": {"tools": TOOLS},
    "documents": {"documents": [{"title": "A", "text": "B"}]},
    "no generation prompt": {"add_generation_prompt": False},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
    "switches": {"enable_thinking": False, "reasoning_effort": "high", "mood": "", "nothing": None, "bos_token": "B"},
}
