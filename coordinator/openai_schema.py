"""The bodies of OpenAI's completion calls, with the extras that vLLM and SGLang users know.

Every parameter is honoured or refused by name. Those known elsewhere and not served are accepted at the
value that changes nothing (clients send `"priority": 0` without being asked) and refused at any other; a field that
nobody knows is refused too, for a misspelt `temperture` must not go unnoticed.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeVar

from pydantic import ValidationError

from coordinator.body_parts import Body, Listed
from coordinator.chat_messages import ChatMessage, read_messages
from coordinator.generation_fields import GenerationBody
from coordinator.generation_request import MESSAGES_MAX, PROMPT_TOKENS_MAX, GenerationInput
from coordinator.json_size import check_json_size
from coordinator.tool_schema import Tool, ToolChoice, read_tool_use
from coordinator.unserved_parameters import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_MESSAGE,
    NEUTRAL_STRUCTURED_OUTPUTS,
    successor,
    without_neutral,
)
from outrider.errors import InvalidRequest

DEPTH_MAX: Final = 256  # of a body; grammars end at half of that
DETOKENIZE_TOKENS_MAX: Final = PROMPT_TOKENS_MAX


class CompletionBody(GenerationBody):
    """POST /v1/completions. Exactly one prompt: a text or a list of token ids, bare or alone in a list."""

    neutral = NEUTRAL_COMPLETION

    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    def to_input(self, request_id: str) -> GenerationInput:
        """Raises InvalidRequest when a value is out of its bounds, or there is not exactly one prompt."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)):
            if len(prompt) != 1:
                raise InvalidRequest("prompt", f"exactly one prompt per request is served, got {len(prompt)}")
            prompt = prompt[0]
        if self.is_streaming and self.best_of is not None and self.best_of > (self.n or 1):
            raise InvalidRequest(
                "best_of", "best_of above n cannot be streamed: the best is known at the end"
            )
        return GenerationInput(
            **self.common_input(request_id, self.logprobs, "logprobs"),
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            max_tokens=self.max_tokens,
            max_tokens_default=16,
            echo=bool(self.echo),
            best_of=self.best_of,
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Without a bound the answer may fill the context."""

    neutral = NEUTRAL_CHAT

    messages: Listed[ChatMessage]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def to_input(self, request_id: str) -> GenerationInput:
        """Raises InvalidRequest when a value is out of its bounds or two parameters contradict each other."""
        bounds = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(bounds) > 1:
            raise InvalidRequest("max_tokens", "max_tokens and max_completion_tokens contradict each other")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs: true")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        common = self.common_input(request_id, num_logprobs, "top_logprobs")
        use, shown_tools = read_tool_use(
            self.tools or [], self.tool_choice, is_parallel=self.parallel_tool_calls is not False
        )
        if use is not None:
            if common["sampling"].grammar is not None:
                raise InvalidRequest(
                    common["grammar_parameter"],
                    f"tools and {common['grammar_parameter']} both say what the output may be",
                )
            common["grammar_parameter"] = "tools"
        return GenerationInput(
            **common,
            messages=read_messages(self.messages),
            chat_template_kwargs=(self.chat_template_kwargs or {}) | ({"tools": shown_tools} if use else {}),
            tools=use,
            max_tokens=next(iter(bounds), None),
            max_tokens_default=None,
        )


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation as the chat template renders it."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})

    model: str = ""
    prompt: str | None = None
    messages: Listed[ChatMessage] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})

    model: str = ""
    tokens: Listed[int]


BodyT = TypeVar("BodyT", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Reads a request body. Raises InvalidRequest that names the first parameter that is wrong.

    One of more than `coordinator.http_transport.SMALL_BODY_BYTES` takes milliseconds: not on the event loop.
    """
    content = without_neutral(_read_object(raw), kind.neutral, "")
    if isinstance(content.get("structured_outputs"), dict):
        content["structured_outputs"] = without_neutral(
            content["structured_outputs"], NEUTRAL_STRUCTURED_OUTPUTS, "structured_outputs."
        )
    if isinstance(content.get("messages"), list):
        if len(content["messages"]) > MESSAGES_MAX:
            raise InvalidRequest("messages", f"messages may hold at most {MESSAGES_MAX} entries")
        content["messages"] = [
            without_neutral(message, NEUTRAL_MESSAGE, f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(content["messages"])
        ]
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _named(error) from error


def _read_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest."""
    check_json_size(raw)
    try:
        # Not by json.loads, which guesses at other encodings and lets half of a surrogate pair pass.
        content = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode())
        if b"\\ud" in raw.lower():  # as an escape it is JSON all the same, but no text
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply
        raise InvalidRequest(None, f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(None, "the body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > DEPTH_MAX:
        _check_depth(content)
    return content


def _check_depth(content: dict[str, Any]) -> None:
    """Raises InvalidRequest for what can be read but not be written again wherever that is needed: Python's stack ends
    somewhere."""
    level: list[Any] = [content]
    for _ in range(DEPTH_MAX):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    if level:
        raise InvalidRequest(None, f"the body is JSON nested more than {DEPTH_MAX} deep")


def _named(error: ValidationError) -> InvalidRequest:
    # Of a union every branch reports; the first complaint about the first parameter will do.
    detail = error.errors(include_url=False)[0]
    parameter = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            parameter += f"[{part}]"
        # Branches of a union stand among the names, as a type or as a model.
        elif part.isidentifier() and part not in ("str", "int", "bool") and not part[0].isupper():
            parameter += f".{part}" if parameter else part
    if detail["type"] == "extra_forbidden":
        return InvalidRequest(parameter, f"unknown parameter {parameter!r}{successor(parameter)}")
    if detail["type"] == "missing":
        return InvalidRequest(parameter, f"parameter {parameter!r} is required")
    return InvalidRequest(parameter, f"{parameter}: {detail['msg']}")
