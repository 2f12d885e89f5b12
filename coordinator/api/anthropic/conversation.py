"""Converts the messages of Anthropic's API to those of a chat. Pure.

There, a message is a list of blocks: text, calls of tools and their results. In a chat each result is a message of its
own, and calls stand beside the text of a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from coordinator.api.schema.body_parts import LenientBody, Listed, described
from coordinator.api.schema.chat_messages import ChatMessage
from coordinator.api.schema.tool_schema import CalledFunction, ToolCall
from outrider.errors import InvalidRequest
from outrider.text.message_forms import PARTS_SEPARATOR

_TYPES: Final = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class TextBlock(LenientBody):
    """A block of text."""

    type: Annotated[str, described(enum=["text"])] = Field(description="kind of the block; only text is served")
    text: str | None = Field(default=None, description="the text")


class ContentBlock(LenientBody):
    """A block of a message. Unknown fields are ignored: they cannot change the prompt."""

    type: Annotated[str, described(enum=[*_TYPES])] = Field(
        description="kind of the block; images, documents and tools that run on a server are refused"
    )
    text: str | None = Field(default=None, description="of text: the text")
    id: str | None = Field(default=None, description="of a call: its id")
    name: str | None = Field(default=None, description="of a call: the tool's name")
    input: dict[str, Any] | None = Field(default=None, description="of a call: its arguments")
    tool_use_id: str | None = Field(default=None, description="of a result: the id of the call")
    content: str | Listed[TextBlock] | None = Field(default=None, description="of a result: the text")
    thinking: str | None = Field(default=None, description="of a thinking: its text, for the chat template")
    signature: str | None = Field(default=None, description="of a thinking: not used")
    data: str | None = Field(default=None, description="of a redacted thinking: not used")


class InputMessage(LenientBody):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="who wrote the message")
    content: str | Listed[ContentBlock] = Field(description="text, or blocks, whose texts are joined by newlines")

    def ignored_names(self) -> Iterator[str]:
        """Yields the names of fields that are not used."""
        yield from self.unknown
        for block in self.content if isinstance(self.content, list) else ():
            yield from (f"content[].{name}" for name in block.unknown)
            if block.type == "redacted_thinking":
                yield "content[].data"
            for part in block.content if isinstance(block.content, list) else ():
                yield from (f"content[].content[].{name}" for name in part.unknown)


def read_conversation(messages: Sequence[InputMessage]) -> list[ChatMessage]:
    """Converts messages to a chat's. Raises InvalidRequest that names the block."""
    chat: list[ChatMessage] = []
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            chat.append(ChatMessage(role=message.role, content=message.content))
            continue
        where = f"messages[{index}].content"
        if message.role == "assistant":
            chat.append(_of_assistant(message.content, where))
        else:
            chat += _of_others(message.role, message.content, where)
    return chat


def joined_blocks(content: str | Sequence[TextBlock], where: str) -> str:
    """Returns the text of blocks. Raises InvalidRequest for a block that is not text."""
    if isinstance(content, str):
        return content
    return PARTS_SEPARATOR.join(_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def ignored_in(messages: Sequence[InputMessage]) -> list[str]:
    """Returns the names of fields of the messages that are not used, each once."""
    names = dict.fromkeys(name for message in messages for name in message.ignored_names())
    return [f"messages[].{name}" for name in names]


def _of_assistant(blocks: Sequence[ContentBlock], where: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block.type:
            case "tool_use":
                name, call_id = _needed(block, "name", place), _needed(block, "id", place)
                calls.append(ToolCall(id=call_id, function=CalledFunction(name=name, arguments=block.input or {})))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":  # only its author could read it
                pass
            case _:
                texts.append(_text(block, place))
    return ChatMessage(
        role="assistant",
        content=PARTS_SEPARATOR.join(texts),
        tool_calls=calls or None,
        reasoning_content=PARTS_SEPARATOR.join(thoughts) or None,
    )


def _of_others(role: Literal["user", "system"], blocks: Sequence[ContentBlock], where: str) -> list[ChatMessage]:
    chat: list[ChatMessage] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            chat.append(ChatMessage(role=role, content=PARTS_SEPARATOR.join(texts)))
            texts.clear()

    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.type == "tool_result" and role == "user":
            end_text()
            content = joined_blocks(block.content or "", f"{place}.content")
            chat.append(ChatMessage(role="tool", content=content, tool_call_id=_needed(block, "tool_use_id", place)))
        else:
            texts.append(_text(block, place))
    if not blocks:
        chat.append(ChatMessage(role=role, content=""))
    end_text()
    return chat


def _text(block: TextBlock | ContentBlock, where: str) -> str:
    if block.type != "text":
        raise InvalidRequest(
            f"{where}.type", f"{where} is of type {block.type!r}, which is not served there; only text is"
        )
    if block.text is None:
        raise InvalidRequest(f"{where}.text", f"{where} has no text")
    return block.text


def _needed(block: ContentBlock, name: str, where: str) -> str:
    value = getattr(block, name)
    if not value:
        raise InvalidRequest(f"{where}.{name}", f"{where}.{name} is required in a block of type {block.type!r}")
    return str(value)
