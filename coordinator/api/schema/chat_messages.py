"""Converts chat messages from OpenAI's format to that of chat templates. Pure.

Clients send back the messages that servers gave them, with whatever fields these had. What chat templates know is
passed on; other fields cannot change the prompt and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from coordinator.api.schema.body_parts import LenientBody, Listed, described
from coordinator.api.schema.tool_schema import CalledFunction, ToolCall
from outrider.errors import InvalidRequest
from outrider.text.message_forms import PARTS_SEPARATOR

_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_PART_TYPES: Final = (*_TEXT_PARTS, "refusal")
_REASONING: Final = "reasoning_content"
"""The name by which most templates of reasoning models read an earlier answer's reasoning."""
_THINKING: Final = "thinking"
"""The name by which gpt-oss's template reads it; transformers fills it in. The template refuses a message that has
this, content and calls."""


class ContentPart(LenientBody):
    """A part of a message's content: text, or a refusal that the model gave earlier."""

    type: Annotated[str, described(enum=[*_PART_TYPES])] = Field(description="kind of the part; only text is served")
    text: str | None = Field(default=None, description="the text, except of a refusal")
    refusal: str | None = Field(default=None, description="the text of a refusal")

    def to_text(self, where: str) -> str:
        """Returns the part's text. Raises InvalidRequest for a part that is not text."""
        if self.type not in _PART_TYPES:
            raise InvalidRequest(
                f"{where}.type",
                f"{where} is of type {self.type!r}; only text can be served, not images, audio or files",
            )
        text = self.refusal if self.type == "refusal" else self.text
        if text is None:
            raise InvalidRequest(f"{where}.text", f"{where} has no text")
        return text


class ChatMessage(LenientBody):
    """A message of a conversation. Unknown fields are ignored: they cannot change the prompt."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="who wrote the message"
    )
    content: str | Listed[str | ContentPart] | None = Field(
        default=None,
        description="text, or parts of it, which are joined by newlines unless the chat template reads parts; may be "
        "null for the assistant",
    )
    name: str | None = Field(default=None, description="the author's name, for the chat template")
    tool_calls: Listed[ToolCall] | None = Field(default=None, description="role assistant only: calls that it made")
    tool_call_id: str | None = Field(default=None, description="role tool: the call that it answers")
    function_call: CalledFunction | None = Field(
        default=None, description="role assistant only: a call in OpenAI's former form"
    )
    reasoning_content: str | None = Field(default=None, description="the assistant's reasoning, for the chat template")
    reasoning: str | None = Field(default=None, description="another name of `reasoning_content`")

    def to_template(self, where: str) -> dict[str, Any]:
        """Converts the message for `Tokenizer.render_chat`. `where` names it in errors.

        Raises InvalidRequest for a message without content, or with calls that its role cannot make.
        """
        calls = [call.to_template() for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append({"id": self.function_call.name, **self.function_call.to_template()})
        if calls and self.role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls", "only messages of the assistant may have tool_calls")
        if (self.model_extra or {}).get("audio") is not None:
            raise InvalidRequest(f"{where}.audio", f"{where}.audio: audio is not served")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{where}.content", f"{where}.content is required")
        message: dict[str, Any] = {"role": _template_role(self.role), "content": self._content(f"{where}.content")}
        if self.name:
            message["name"] = self.name
        if calls:
            message["tool_calls"] = calls
        if self.role in ("tool", "function") and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.role == "assistant" and (reasoning := self.reasoning_content or self.reasoning):
            message[_REASONING] = reasoning
            if calls and message["content"]:
                message[_THINKING] = ""
        return message

    def ignored_names(self) -> Iterator[str]:
        """Yields the names of fields that are not used, as paths within the message."""
        yield from self.unknown
        if self.tool_call_id is not None and self.role not in ("tool", "function"):
            yield "tool_call_id"
        for part in self.content if isinstance(self.content, list) else ():
            if isinstance(part, ContentPart):
                yield from (f"content[].{name}" for name in part.unknown)
        for call in self.tool_calls or ():
            yield from (f"tool_calls[].{name}" for name in (*call.unknown, *call.function.unknown))

    def _content(self, where: str) -> str | list[dict[str, str]] | None:
        if self.content is None or isinstance(self.content, str):
            return self.content
        return [{"type": "text", "text": text} for text in _texts(self.content, where)]


def joined_text(content: str | Sequence[str | ContentPart] | None, where: str) -> str:
    """Returns the text of a message's content. Raises InvalidRequest for a part that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return PARTS_SEPARATOR.join(_texts(content, where))


def _texts(content: Sequence[str | ContentPart], where: str) -> Iterator[str]:
    for index, part in enumerate(content):
        yield part if isinstance(part, str) else part.to_text(f"{where}[{index}]")


def read_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Converts a conversation for chat templates. Raises InvalidRequest that names the message."""
    return [message.to_template(f"messages[{index}]") for index, message in enumerate(messages)]


def ignored_in(messages: Sequence[ChatMessage]) -> list[str]:
    """Returns the names of fields of the messages that are not used, each once."""
    names = dict.fromkeys(name for message in messages for name in message.ignored_names())
    return [f"messages[].{name}" for name in names]


def _template_role(role: str) -> str:
    """The role as chat templates know it: most know neither `developer` nor `function`."""
    return {"developer": "system", "function": "tool"}.get(role, role)
