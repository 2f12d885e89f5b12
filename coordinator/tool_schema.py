"""OpenAI's fields for functions that a chat may call, and for calls in its messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import StringConstraints

from coordinator.body_parts import Body
from coordinator.json_size import check_json_size
from coordinator.tool_calls import ToolMode, ToolUse
from outrider.errors import InvalidRequest

TOOLS_MAX: Final = 128

FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(Body):
    """`parameters` is a JSON schema of the arguments; calls always follow it, whatever `strict` says."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def to_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude_none=True)


class FunctionRef(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionRef


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(Body):
    name: str
    arguments: str  # JSON


class ToolCall(Body):
    """A call that the assistant made, in a message of the conversation so far."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """As chat templates expect it: they write the arguments themselves. Raises InvalidRequest."""
        check_json_size(
            self.function.arguments.encode(), "messages", f"the arguments of tool call {self.id!r}"
        )
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                "messages", f"the arguments of tool call {self.id!r} are not JSON: {error}"
            ) from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


def read_tool_use(
    tools: Sequence[Tool], choice: ToolChoice | None, *, is_parallel: bool
) -> tuple[ToolUse | None, list[dict[str, Any]]]:
    """What may be called, and the tools as the chat template is shown them; None and [] where nothing may.

    Raises InvalidRequest for too many tools, a name given twice, or a choice that is not among them.
    """
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest("tools", f"tools may hold at most {TOOLS_MAX} entries, got {len(tools)}")
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    if len(functions) < len(tools):
        raise InvalidRequest("tools", "tools holds two functions of the same name")
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None, []
    if not tools:
        raise InvalidRequest("tool_choice", "tool_choice asks for a call, and there are no tools")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in functions:
            raise InvalidRequest("tool_choice", f"tool_choice names {name!r}, which is not among the tools")
        # One function by name means one call of it.
        use = ToolUse(((name, functions[name]),), ToolMode.REQUIRED, False)
    else:
        mode = ToolMode.REQUIRED if choice == "required" else ToolMode.AUTO
        use = ToolUse(tuple(functions.items()), mode, is_parallel)
    return use, [tool.to_template() for tool in tools]
