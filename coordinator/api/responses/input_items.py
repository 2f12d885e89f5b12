"""Converts the input of the Responses API, a list of items, to the messages of a chat. Pure.

The API has one item for each thing that happened: a message, a reasoning, a call, the output of a call. A chat has one
message for each turn, so what the assistant did in a row becomes one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from coordinator.api.responses.response_tools import ResponseTool
from coordinator.api.schema.body_parts import LenientBody, Listed, described
from coordinator.api.schema.chat_messages import ChatMessage, ContentPart, joined_text
from coordinator.api.schema.tool_schema import CalledFunction, ToolCall
from outrider.errors import InvalidRequest
from outrider.text.message_forms import PARTS_SEPARATOR

_PART_TYPES: Final = ("input_text", "output_text", "text", "refusal", "reasoning_text")
_TYPES: Final = (
    "message", "function_call", "function_call_output", "reasoning", "item_reference", "additional_tools",
)  # fmt: skip


class ItemPart(ContentPart):
    """A part of an item's content."""

    type: Annotated[str, described(enum=[*_PART_TYPES])] = Field(description="kind of the part; only text is served")


class SummaryPart(LenientBody):
    text: str = Field(default="", description="the text of this part")


class InputItem(LenientBody):
    """An item of a conversation. Unknown fields are ignored: they cannot change the prompt."""

    type: Annotated[str, described(enum=[*_TYPES])] = Field(
        default="message", description="kind of the item; items of tools that run on a server are refused"
    )
    id: str | None = Field(default=None, description="of an item_reference: the id of an item in a stored response")
    status: str | None = Field(default=None, description="not used")
    phase: str | None = Field(default=None, description="not used")
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        default=None, description="of a message: who wrote it"
    )
    content: str | Listed[str | ItemPart] | None = Field(
        default=None, description="of a message: text, or parts of it; of a reasoning: its parts"
    )
    summary: Listed[SummaryPart] | None = Field(
        default=None, description="of a reasoning: a summary, which counts where `content` is left out"
    )
    encrypted_content: str | None = Field(default=None, description="of a reasoning: not used")
    call_id: str | None = Field(default=None, description="of a call and of its output: the call's id")
    name: str | None = Field(default=None, description="of a call: the function's name")
    arguments: str | None = Field(default=None, description="of a call: its arguments as JSON")
    output: str | Listed[ItemPart] | None = Field(default=None, description="of a call's output: the text")
    tools: Listed[ResponseTool] | None = Field(
        default=None, description="of additional_tools: tools besides those of the request"
    )

    def ignored_names(self) -> Iterator[str]:
        """Yields the names of fields that are not used."""
        yield from self.unknown
        if self.encrypted_content is not None:
            yield "encrypted_content"
        for name in ("content", "output"):
            parts = getattr(self, name)
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, ContentPart):
                    # Clients send back what they received: citations and log probabilities of earlier answers.
                    yield from (f"{name}[].{each}" for each in part.unknown if each not in ("annotations", "logprobs"))


def read_items(items: Sequence[InputItem], num_before: int = 0) -> list[ChatMessage]:
    """Converts items to messages; the first `num_before` are not in the request. Raises InvalidRequest that names the
    item."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items, -num_before):
        where = f"input[{index}]"
        match item.type:
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                text = _reasoning(item, where)
                if text:
                    _turn(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
            case "function_call":
                called = CalledFunction(name=_needed(item, "name", where), arguments=item.arguments or "")
                call = ToolCall(id=_needed(item, "call_id", where), function=called)
                _turn(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                if item.output is None:
                    raise InvalidRequest(f"{where}.output", f"{where}.output is required")
                content = joined_text(item.output, f"{where}.output")
                call_id = _needed(item, "call_id", where)
                messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
            case "additional_tools":  # they are declared and not said
                pass
            case _:
                raise _refused(item, where)
    return [ChatMessage(**message) for message in messages]


def ignored_in(items: Sequence[InputItem]) -> list[str]:
    """Returns the names of fields of the items that are not used, each once."""
    return [f"input[].{name}" for name in dict.fromkeys(name for item in items for name in item.ignored_names())]


def _add_message(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    role = _needed(item, "role", where)
    if item.content is None:
        raise InvalidRequest(f"{where}.content", f"{where}.content is required")
    content = joined_text(item.content, f"{where}.content")
    if role == "assistant":
        _turn(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _turn(messages: list[dict[str, Any]], *later: str) -> dict[str, Any]:
    """Returns the assistant's message that goes on: a new one unless the last one is the assistant's and has nothing
    that comes `later` than what is to be added."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in later):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _reasoning(item: InputItem, where: str) -> str:
    parts: list[str] = []
    for index, part in enumerate(item.content if isinstance(item.content, list) else [item.content or ""]):
        text = part if isinstance(part, str) else part.text
        if text is None:
            raise InvalidRequest(f"{where}.content[{index}].text", f"{where}.content[{index}] has no text")
        parts.append(text)
    return PARTS_SEPARATOR.join(parts) or PARTS_SEPARATOR.join(part.text for part in item.summary or ())


def _needed(item: InputItem, name: str, where: str) -> str:
    value = getattr(item, name)
    if not value:
        raise InvalidRequest(f"{where}.{name}", f"{where}.{name} is required in an item of type {item.type!r}")
    return str(value)


def _refused(item: InputItem, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}.type", f"{where} is of type {item.type!r}, which is not served; permitted: {', '.join(_TYPES)}"
    )
