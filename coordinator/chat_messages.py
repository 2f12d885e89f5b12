"""The messages of a chat, as OpenAI's bodies have them and as chat templates expect them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from coordinator.body_parts import Body, Listed
from coordinator.tool_schema import ToolCall
from outrider.errors import InvalidRequest


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[TextPart] | None = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool: the call that it answers

    def to_template(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it, its parts as one text. `where` names it in errors.

        Raises InvalidRequest for a message without content, or with what its role does not have.
        """
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls", "only an assistant makes tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise InvalidRequest(
                f"{where}.tool_call_id",
                "tool_call_id is required in a message of the role tool, and in no other",
            )
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"{where}.content", f"{where}.content is required")
        parts = self.content or ""
        # Templates from before the new name of the role know only the old one.
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": parts if isinstance(parts, str) else "".join(part.text for part in parts),
        }
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def read_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation as chat templates expect it. Raises InvalidRequest that names the message."""
    return [message.to_template(f"messages[{index}]") for index, message in enumerate(messages)]
